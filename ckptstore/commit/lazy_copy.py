"""The part of a copy that goes on when a commit has begun to read it: whoever must not go on before
it has ended takes part in it."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.commit.pending import Pending
from ckptstore.commit.progress import Milestone
from ckptstore.errors import Conflict
from ckptstore.repository.thread_pool import shared
from ckptstore.state.copy_progress import CopyProgress
from ckptstore.state.staging import Copy, copy_task
from ckptstore.state.staging_buffers import Buffer


class LazyCopy:
    """Copies that are left when the call returns. `versions` says how often each leaf has been
    written to, as far as torch counts it."""

    def __init__(
        self,
        pending: Pending[Any],
        tasks: Sequence[Sequence[Copy]],
        arena: Buffer,
        arrivals: CopyProgress,
        versions: Callable[[], Mapping[int, int]],
        path: Callable[[int], str],
    ) -> None:
        self._pending, self._arena, self._arrivals, self._path = pending, arena, arrivals, path
        self._versions, self._before = versions, versions()
        self._tasks = shared(enumerate(tasks))
        self._copied, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Copy until nothing is left to take; threads may do so side by side."""
        for number, task in self._tasks:
            failed: BaseException | None = None
            try:
                copy_task(task, self._arena)
            except BaseException as error:
                self._error = failed = error
            if self._arrivals.arrived(number, failed):
                self._end()

    def hold(self) -> None:
        """Return when nothing is left. Called by the training thread ahead of a write: what was
        written before by others shows here."""
        if self._copied.is_set():
            return
        started = time.perf_counter()
        self._look()
        self.work()
        self._copied.wait()
        self._pending.held_longer(time.perf_counter() - started)

    def wait(self) -> None:
        """Wait until nothing is left and that has been told; raises what went wrong."""
        self.wait_ended()
        if self._error:
            raise self._error

    def wait_ended(self) -> None:
        """The same, whatever went wrong: nothing is written to the arena any more."""
        self._ended.wait()

    def _end(self) -> None:
        try:
            self._look()
        except BaseException as error:
            self._error = error
        self._pending.copied()
        self._copied.set()  # whatever happened: an optimizer may be waiting
        try:
            self._pending.reached(Milestone.STAGED)
        finally:
            self._ended.set()  # not before: milestones are told in order

    def _look(self) -> None:
        """An alarm, not a proof: many writes are not counted, and the count rises after the
        write."""
        now = self._versions()
        written = [n for n, version in self._before.items() if now[n] != version]
        if written and not self._error:
            self._error = Conflict(
                f"{self._path(written[0])} was written to while it was staged lazily, outside of a "
                "step: the commit would hold "
                "neither state; call pending.wait_staged() before such a write, or commit with "
                "staging='eager'"
            )
