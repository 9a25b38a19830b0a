"""Leaves that stay the caller's until they have been written, and the watch that tells when: on it,
the caller waits."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptstore.commit.pending import Pending
from ckptstore.commit.plan import Run
from ckptstore.commit.progress import Milestone, Watch
from ckptstore.errors import Conflict
from ckptstore.state.staging import StagingPlan


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
