"""How does a commit start before the copy of its state is complete?

A lazy copy goes on in the background; a thread that must wait for it helps. Borrowed leaves are
not copied: the caller waits until they are written.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.commit.pending import Pending, Watch
from ckptstore.commit.plan import Run
from ckptstore.core.options import Milestone
from ckptstore.errors import Conflict
from ckptstore.repository.thread_pool import shared
from ckptstore.state.staging import StagingPlan, copy_task
from ckptstore.state.staging_buffers import Buffer, Copy, CopyProgress


class LazyCopy:
    """Copies left when the call returns. `versions` gives torch's count of writes to each leaf."""

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
        """Copy until no task is left. Several threads may call it."""
        for number, task in self._tasks:
            failed: BaseException | None = None
            try:
                copy_task(task, self._arena)
            except BaseException as error:
                self._error = failed = error
            if self._arrivals.arrived(number, failed):
                self._end()

    def hold(self) -> None:
        """Return when the copy is complete. The training thread calls it before it writes, so any
        write counted so far is someone else's."""
        if self._copied.is_set():
            return
        started = time.perf_counter()
        self._look()
        self.work()
        self._copied.wait()
        self._pending.held_longer(time.perf_counter() - started)

    def wait(self) -> None:
        """Wait until the copy is complete and reported; raise its failure."""
        self.wait_ended()
        if self._error:
            raise self._error

    def wait_ended(self) -> None:
        """Wait until the copy has ended, even if it failed: the buffer is no longer written to."""
        self._ended.wait()

    def _end(self) -> None:
        try:
            self._look()
        except BaseException as error:
            self._error = error
        self._pending.copied()
        self._copied.set()  # even after a failure: an optimizer may be waiting
        try:
            self._pending.reached(Milestone.STAGED)
        finally:
            self._ended.set()  # only now, so that milestones are reported in order

    def _look(self) -> None:
        """Detect writes during the copy. Best effort: torch misses many writes, and counts a write
        after it happened."""
        now = self._versions()
        written = [n for n, version in self._before.items() if now[n] != version]
        if written and not self._error:
            self._error = Conflict(
                f"{self._path(written[0])} was written to while it was staged lazily, outside of a "
                "step: the commit would mix two states; call pending.wait_staged() before such a "
                "write, or commit with staging='eager'"
            )


class BorrowedLeaves:
    """Leaves written directly from the caller's memory, and the caller's wait for that."""

    def __init__(self, plan: StagingPlan, leaf_bytes: Sequence[int]) -> None:
        self.leaves = frozenset(plan.borrowed)
        self._left = sum(leaf_bytes[n] for n in self.leaves)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        if not self._left:
            self._settled.set()

    def worked(self, batch: Sequence[Run]) -> bool:
        """Count a written batch; True if it completes the borrowed leaves."""
        done = sum(run.raw_bytes for run in batch if run.part.leaf in self.leaves)
        if not done:
            return False
        with self._lock:
            self._left -= done
            return not self._left

    def settle(self) -> None:
        self._settled.set()

    def wait(self) -> None:
        self._settled.wait()


class PendingWatch(Watch):
    """Reports progress to a pending commit, and stops the commit once its caller cancels it.

    `copied` waits until the state is copied and that is reported; it raises the copy's failure.
    """

    def __init__(
        self, pending: Pending[Any], borrowed: BorrowedLeaves, copied: Callable[[], object]
    ) -> None:
        self._pending, self._borrowed, self._copied, self._attempts = pending, borrowed, copied, 0

    def worked(self, batch: Sequence[Run]) -> None:
        if self._borrowed.worked(batch):
            self._pending.reached(Milestone.STAGED)
            self._borrowed.settle()
        self._pending.check()

    def reached(self, milestone: Milestone) -> None:
        self._copied()
        self._pending.reached(milestone)

    def publishing(self) -> None:
        self._pending.publish()

    def starting(self) -> None:
        self._pending.check()
        self._attempts += 1
        if self._attempts > 1 and self._borrowed.leaves:
            raise Conflict(
                f"the commit would have to start again, and {len(self._borrowed.leaves)} leaves "
                "that did not fit into the staging memory may have changed since; repeat the "
                "commit, or open the store with more staging_bytes"
            )
