"""What of an arena has been copied: whoever reads from it meanwhile waits for the bytes that it
wants, and for no others."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol


class Copied(Protocol):
    """A copy into an arena."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class CopyProgress:
    """Which of `tasks`, each some copies into one arena that do not overlap, have been carried out.
    Threads may share it."""

    def __init__(self, tasks: Sequence[Sequence[Copied]]) -> None:
        places = sorted(
            (copy.offset, copy.offset + copy.nbytes, number)
            for number, task in enumerate(tasks)
            for copy in task
        )
        self._starts, self._stops = (
            [start for start, _, _ in places],
            [stop for _, stop, _ in places],
        )
        self._tasks = [number for _, _, number in places]
        self._missing = set(range(len(tasks)))
        self._failed: dict[int, BaseException] = {}
        self._changed = threading.Condition()

    def arrived(self, task: int, error: BaseException | None = None) -> bool:
        """Note that a task is over, or what it failed with. True if it was the last one."""
        with self._changed:
            if error is not None:
                self._failed[task] = error  # first: `wait` looks without the lock
            self._missing.discard(task)
            self._changed.notify_all()
            return not self._missing

    def wait(self, start: int, stop: int) -> None:
        """Return when nothing that is to be copied to `start:stop` of the arena is missing; raises
        what its copy failed with."""
        if not self._missing and not self._failed:
            return
        wanted = set(
            self._tasks[bisect_right(self._stops, start) : bisect_left(self._starts, stop)]
        )
        with self._changed:
            self._changed.wait_for(lambda: self._missing.isdisjoint(wanted))
            for task in wanted & self._failed.keys():
                raise self._failed[task]
