"""Commits behind the caller's back: one after the other, in the order of the calls, and none
forgotten when the program ends.

The thread that makes them is no daemon, so that an interpreter that exits waits for it; it ends
when it has nothing to do. Whoever waits long (`close`, an exit) says so on stderr. A failure is
kept until somebody has seen it.
"""

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from ckptstore.commit.pending import Pending
from ckptstore.core.text import seconds_text
from ckptstore.repository.thread_pool import step_aside

NOTICE_S = 4.0
"""Who waits for so long without having been asked to says so, and again each time it has passed."""


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
        """Raise what the first commit failed with whose outcome nobody has seen."""
        if failed := self._take_failure():
            raise failed

    def admit(self, *, wait: bool) -> bool:
        """Whether there is room for one more; waits for it if wanted. Raises like `raise_failure`
        after having waited."""
        with self._changed:
            if len(self._in_flight()) >= self._limit:
                if not wait:
                    return False
                self._changed.wait_for(lambda: len(self._in_flight()) < self._limit)
        self.raise_failure()
        return True

    def start(self, pending: Pending[Any], work: Callable[[], object]) -> None:
        """Let `work` run after everything that was started before. It ends `pending` and raises
        nothing.

        Where no thread can be had (their number is limited, or the interpreter is ending), the
        caller does the work itself.
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
        """Wait until nothing is in flight; gives the first failure that nobody has seen."""
        while self.tell_if_busy():
            pass
        return self._take_failure()

    def tell_if_busy(self) -> bool:
        """Wait a while for nothing to be in flight; if something still is, say so on stderr."""
        if self._pid != os.getpid():
            return False  # a forked child has its parent's commits neither to make nor to wait for
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
        """Say on stderr what failed without anybody having seen it: the last chance."""
        if self._pid == os.getpid():
            while failed := self._take_failure():
                print(
                    f"ckptstore: a commit to {self._place} was not made: {failed}",
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
            del work  # and with it the state, which must not live until the next commit
            with self._changed:
                self._changed.notify_all()


_everybody: WeakSet[Background] = WeakSet()


def _watch_exit() -> None:
    """Say what an exiting interpreter waits for."""
    threading.main_thread().join()
    while any(background.tell_if_busy() for background in list(_everybody)):
        pass


@cache
def _have_exits_watched(pid: int) -> None:
    """Once per process. A daemon: it must not be waited for itself."""
    threading.Thread(target=_watch_exit, name="ckptstore-exit", daemon=True).start()


@atexit.register
def _tell_failures() -> None:
    for background in list(_everybody):
        background.tell_failures()
