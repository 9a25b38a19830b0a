"""Maintenance: retention, garbage collection, checking, repair and mirrors.

Long jobs report their progress: the phase, the work done, and the total work (0 if unknown).
"""

import threading
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called often and from several threads, one at a time; it should return at once."""


def silent(phase: str, done: int, total: int) -> None:
    """Ignore progress reports."""


class Counter:
    """One phase of a job: counts and reports the parts that threads complete."""

    def __init__(self, report: Progress, phase: str, total: int) -> None:
        self._report, self._phase, self._total = report, phase, total
        self._done = 0
        self._lock = threading.Lock()
        report(phase, 0, total)

    def add(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            self._report(self._phase, self._done, self._total)
