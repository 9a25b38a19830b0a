"""The part of a copy that goes on when a commit has begun to read it: whoever must not go on before
it has ended takes part in it.

Leaves that stay the caller's until they have been written, and the watch that tells when: on it,
the caller waits.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.commit.pending import Milestone, Pending, Watch
from ckptstore.commit.plan import Run
from ckptstore.errors import Conflict
from ckptstore.repository.thread_pool import shared
from ckptstore.state.staging import Copy, StagingPlan, copy_task
from ckptstore.state.staging_buffers import Buffer, CopyProgress


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


class BorrowedLeaves:
    """The bytes of leaves that stay the caller's: it waits until they have been written."""

    def __init__(self, plan: StagingPlan, leaf_bytes: Sequence[int]) -> None:
        self.leaves = frozenset(plan.borrowed)
        self._left = sum(leaf_bytes[n] for n in self.leaves)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        if not self._left:
            self._settled.set()

    def worked(self, batch: Sequence[Run]) -> bool:
        """Whether this was the last of it."""
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
    """Tells a pending commit how far it is, and stops it when its caller called it off. `copied`
    waits until the state has been copied and that has been told; it raises what went wrong."""

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
                f"the commit would have to start anew, and {len(self._borrowed.leaves)} leaves "
                "that did not fit into the staging memory "
                "may have changed since; repeat the commit, or open the store with more "
                "staging_bytes"
            )
