"""How a long job says how far it is: the phase, what is done of it, and what there is to do (0
where that is not known)."""

import threading
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called often and from several threads, one at a time; it should return at once."""


def silent(phase: str, done: int, total: int) -> None:
    """For callers who do not ask."""


class Counter:
    """One phase of a job: reports each part that some thread has done."""

    def __init__(self, report: Progress, phase: str, total: int) -> None:
        self._report, self._phase, self._total = report, phase, total
        self._done = 0
        self._lock = threading.Lock()
        report(phase, 0, total)

    def add(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            self._report(self._phase, self._done, self._total)
