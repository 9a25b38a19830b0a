"""Maintenance: retention, garbage collection, checking, repair and mirrors.

Long jobs report their progress: the phase, the work done, and the total work (0 if unknown). Their
observations are kept in notes in the host's index directory, and the next run goes on from there.

Checks, compaction, gc and mirrors plan items that need nothing of each other, and give them to a
`Spread`: the threads of this process, or the workers of an engine (docs/engines.md).
"""

import json
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from ckptstore.core.paths import make_index_directory, read_plain, replace_file

if TYPE_CHECKING:
    from ckptstore.repository.store_handle import StoreHandle
    from ckptstore.repository.thread_pool import ThreadPool

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
R = TypeVar("R")

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


def save_note(path: Path, owner: str, content: object) -> None:
    """Keep JSON `content` for `owner`, a store or a boot. A full disk may prevent that; then the
    next run observes anew."""
    with suppress(OSError):
        make_index_directory(path.parent)
        replace_file(path, json.dumps([owner, content]).encode())


def load_note(path: Path, owner: str, decode: Callable[[Any], T], default: T) -> T:
    """What was kept for `owner`; `default` if the note is absent, damaged or another's."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found, content = json.loads(read_plain(path))
        if found == owner:
            return decode(content)
    return default


Stores: TypeAlias = "tuple[StoreHandle, ...]"
"""The stores that a task works on: one, or a source and a target."""


class Spread(Protocol[S_co]):
    """Carries the parts of a job out: here, or on other hosts. So a task is a function of a module,
    and its items and results are plain values. It gets what it works on, opened where it runs."""

    def __call__(
        self, task: "Callable[[S_co, ThreadPool, T], R]", items: Iterable[T]
    ) -> Generator[tuple[T, R], None, None]:
        """Call `task` for each item; yields each with its result, in any order. Closed, it ends
        what it has begun."""


def here(opened: S, threads: "ThreadPool") -> Spread[S]:
    """One item after the other, each on the threads of this process."""

    def spread(
        task: "Callable[[S, ThreadPool, T], R]", items: Iterable[T]
    ) -> Generator[tuple[T, R], None, None]:
        return ((item, task(opened, threads, item)) for item in items)

    return spread
