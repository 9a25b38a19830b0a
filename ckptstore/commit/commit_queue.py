"""How do background commits run in order, beside the copy of their states, and complete before the
program exits?

Their thread is not a daemon, so the interpreter waits for it at exit; it ends when it is idle. A
long wait in `close` or at exit is reported on stderr. A failure is kept until the caller sees it.

A commit may start before the copy of its state is complete. A lazy copy goes on in the background;
a thread that must wait for it helps. Borrowed leaves are not copied: the caller waits until they
are written.
"""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from ckptstore.commit.pending import Pending, Watch
from ckptstore.commit.plan import Run
from ckptstore.core.options import Milestone
from ckptstore.core.text import seconds_text
from ckptstore.errors import Conflict
from ckptstore.repository.thread_pool import shared, step_aside
from ckptstore.state.staging import StagingPlan, copy_task
from ckptstore.state.staging_buffers import Buffer, Copy, CopyProgress

NOTICE_S = 4.0
"""Implicit waits are reported on stderr each time this many seconds have passed."""


class Background:
    """The commits in flight of one store object, at most `limit` at a time."""

    def __init__(self, limit: int, place: str) -> None:
        self._limit, self._place = limit, place
        self._jobs: deque[Callable[[], object]] = deque()
        self._pending: list[Pending[Any]] = []
        self._working = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        _everybody.add(self)

    def raise_failure(self) -> None:
        """Raise the first failure that the caller has not seen."""
        if failed := self._take_failure():
            raise failed

    def admit(self, *, wait: bool) -> bool:
        """Whether one more commit may start; with `wait`, waits until it may. Then raises like
        `raise_failure`."""
        with self._changed:
            if len(self._in_flight()) >= self._limit:
                if not wait:
                    return False
                self._changed.wait_for(lambda: len(self._in_flight()) < self._limit)
        self.raise_failure()
        return True

    def start(self, pending: Pending[Any], work: Callable[[], object]) -> None:
        """Run `work` after all work started before. It must end `pending` and raise nothing.

        The calling thread runs it if no thread can be started, because of a limit or because the
        interpreter is exiting.
        """
        with self._changed:
            self._jobs.append(work)
            self._pending.append(pending)
            if self._working:
                return
            self._working = True
        try:
            _have_exits_watched(os.getpid())
            threading.Thread(target=self._run_aside, name="ckptstore-commits").start()
        except RuntimeError:
            self._run()

    def drain(self) -> BaseException | None:
        """Wait until nothing is in flight; return the first failure not yet seen."""
        while self.tell_if_busy():
            pass
        return self._take_failure()

    def tell_if_busy(self) -> bool:
        """Wait up to `NOTICE_S` for commits in flight; report those still running on stderr."""
        if self._pid != os.getpid():
            return False  # these are the commits of the parent of a forked child
        with self._changed:
            if self._changed.wait_for(lambda: not self._working, NOTICE_S):
                return False
            waiting = self._in_flight()
        for pending in waiting:
            what = f"{pending.name} to {self._place}"
            print(
                f"ckptstore: waiting for {what}, {pending.stage} after "
                f"{seconds_text(pending.age_s)}",
                file=sys.stderr,
                flush=True,
            )
        return True

    def tell_failures(self) -> None:
        """Report unseen failures on stderr, at exit."""
        if self._pid == os.getpid():
            while failed := self._take_failure():
                print(
                    f"ckptstore: a commit to {self._place} failed: {failed}",
                    file=sys.stderr,
                    flush=True,
                )

    def _take_failure(self) -> BaseException | None:
        with self._changed:
            while self._pending and self._pending[0].done():
                pending = self._pending.pop(0)
                if not pending.seen and (error := pending.failure()):
                    pending.seen = True
                    return error
        return None

    def _in_flight(self) -> list[Pending[Any]]:
        return [pending for pending in self._pending if not pending.done()]

    def _run_aside(self) -> None:
        step_aside()
        self._run()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._working = False
                    self._changed.notify_all()
                    return
                work = self._jobs.popleft()
            work()
            del work  # frees the state, which must not live until the next commit
            with self._changed:
                self._changed.notify_all()


_everybody: WeakSet[Background] = WeakSet()


def _watch_exit() -> None:
    """Report what the interpreter waits for at exit."""
    threading.main_thread().join()
    while any(background.tell_if_busy() for background in list(_everybody)):
        pass


@cache
def _have_exits_watched(pid: int) -> None:
    """Once per process. A daemon, so that the exit does not wait for it."""
    threading.Thread(target=_watch_exit, name="ckptstore-exit", daemon=True).start()


@atexit.register
def _tell_failures() -> None:
    for background in list(_everybody):
        background.tell_failures()


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
