"""How do background commits run in order, and complete before the program exits?

Their thread is not a daemon, so the interpreter waits for it at exit; it ends when it is idle. A
long wait in `close` or at exit is reported on stderr. A failure is kept until the caller sees it.
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
