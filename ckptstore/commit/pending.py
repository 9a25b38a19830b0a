"""How does a caller follow a commit in flight (query it, wait for it, cancel it), and how do
commits in the background run in order and complete before the program exits?

Their thread is not a daemon, so the interpreter waits for it at exit; it ends when it is idle. A
long wait in `close` or at exit is reported on stderr. A failure is kept until the caller sees it.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakSet

from ckptstore.commit.plan import ChunkRun
from ckptstore.core.forks import Condition, new_event, new_future, survives_forks
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.options import CommitProgress, Milestone
from ckptstore.core.public_calls import public_methods
from ckptstore.core.text import seconds_text
from ckptstore.errors import Busy, Cancelled, InvalidInput, Unavailable
from ckptstore.repository.thread_pool import step_aside


class Watch:
    """Callbacks of a commit, called from any of its threads. These do nothing.

    A callback's exception becomes the commit's.
    """

    def starting(self) -> None:
        """An attempt begins and reads all sources. If the store changed meanwhile, another attempt
        follows."""

    def worked(self, batch: Sequence[ChunkRun]) -> None:
        """A batch was hashed and its new chunks written; this attempt does not read it again."""

    def reached(self, milestone: Milestone) -> None:
        """`HASHED`, `WRITTEN` or `DURABLE`."""

    def publishing(self, session: SessionId) -> None:
        """The log is about to be asked, by this process or the first rank's, to take the commit of
        `session`; after that it cannot be cancelled."""


UNWATCHED = Watch()


logger = logging.getLogger("ckptstore")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the call to each milestone; None for those ahead.

    `held_s` is the time the training thread was blocked: the call itself, including waits for
    memory or the previous commit, and waits in optimizer hooks.
    """

    held_s: float | None = None
    staged_s: float | None = None
    hashed_s: float | None = None
    written_s: float | None = None
    durable_s: float | None = None
    mirrored_s: float | None = None


_thread = threading.local()


@contextmanager
def _calling_back() -> Iterator[None]:
    """Mark this thread as running a caller's function for a commit. The commit continues only after
    the function returns, so the function must not wait for it."""
    _thread.in_callback = True
    try:
        yield
    finally:
        _thread.in_callback = False


@public_methods
class Pending(Generic[T]):
    """A commit in the background. Thread-safe; `await` gives what `wait` returns."""

    def __init__(
        self, step: int | None, on_progress: Callable[[CommitProgress], object] | None = None
    ) -> None:
        self.step = step
        self.state_bytes = 0
        self.started = time.perf_counter()
        self._on_progress = on_progress
        self._reached: dict[Milestone, float] = {}
        self._future: Future[T] = new_future()
        self._future.set_running_or_notify_cancel()
        self._staged = new_event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cancelled = self._publishing = False
        self.help_staging: Callable[[], object] = lambda: None
        """Helps with the copying that is left, if any."""
        self.flush_mirror: Callable[[float | None], bool] | None = None
        """Waits until the mirror has this commit or a newer one, once it is durable."""
        self.tip: CommitId | None = None
        """The parent of the next commit once this one has ended: this one, or its parent if it
        failed."""
        self.asked: list[SessionId] = []
        """The sessions whose commit the log was asked to take for this one. If it has failed,
        nobody knows whether one was made; those of its parent that failed come first."""
        self.seen = False
        """Whether the caller has received the outcome. The next call raises an unseen failure."""
        self.passes = False
        """Whether training goes on although it failed: the next commit takes its place."""
        self.superseded = new_event()
        """Set when a newer commit is to be made, or none any more: do not try again."""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.stage}>"

    @property
    def name(self) -> str:
        return "the commit" if self.step is None else f"the commit of step {self.step}"

    @property
    def age_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started

    @property
    def stage(self) -> str:
        """`copying`, the latest milestone, or the outcome: `done` or `failed`."""
        if self.done():
            return "failed" if self._future.exception() else "done"
        reached = [milestone for milestone in Milestone if milestone in self._reached]
        return reached[-1] if reached else "copying"

    @property
    def timings(self) -> Timings:
        """The milestones so far."""
        return Timings(
            **{f"{milestone}_s": seconds for milestone, seconds in dict(self._reached).items()}
        )

    def staged(self) -> bool:
        """Whether the state has been copied, so that later writes to its tensors do not reach the
        commit."""
        return self._staged.is_set()

    def done(self) -> bool:
        """Whether it has ended: durable, failed, cancelled or skipped."""
        return self._future.done()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until `staged`. Raises `TimeoutError`, or the failure of the commit, unless training
        goes on without it."""
        self._check_here()
        if timeout_s is None:
            self.help_staging()
        if not self._staged.wait(timeout_s):
            raise TimeoutError(f"the commit was not staged within {timeout_s} s; it goes on")
        if self.done() and not self.passes and (error := self.exception()):
            raise error

    def wait(
        self, timeout_s: float | None = None, *, until: Literal["durable", "mirrored"] = "durable"
    ) -> T:
        """Wait for the durable commit and return it; with `until="mirrored"`, until the mirror has
        it as well, or a newer one of its run.

        Raises the commit's failure, `Cancelled`, `Busy` if it was skipped, or `TimeoutError` after
        `timeout_s`; then the commit goes on. Raises `Unavailable` if the mirror does not answer,
        and `InvalidInput` for a store without one.
        """
        since = time.monotonic()
        if until not in ("durable", "mirrored"):
            raise InvalidInput(f"until is {until!r:.80}; wanted 'durable' or 'mirrored'")
        if until == "mirrored" and self.flush_mirror is None:
            raise InvalidInput("this store has no mirror: ckptstore.open(…, mirror=…) adds one")
        if error := self.exception(timeout_s):
            raise error
        if until == "mirrored" and self.flush_mirror:
            left_s = None if timeout_s is None else max(0.0, since + timeout_s - time.monotonic())
            if not self.flush_mirror(left_s):
                if left_s is not None and time.monotonic() >= since + (timeout_s or 0):
                    raise TimeoutError(
                        f"{self.name} is durable, and not mirrored after {timeout_s} s; it goes on"
                    )
                raise Unavailable(
                    f"{self.name} is durable, and the mirror does not answer; the upload is retried"
                )
        return self._future.result()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end; return the failure or None. Raises `TimeoutError` like `wait`."""
        self._check_here()
        try:
            error = self._future.exception(timeout_s)
        except TimeoutError as late:
            raise TimeoutError(
                f"the commit is not durable after {timeout_s} s ({self.stage}); it goes on"
            ) from late
        self.seen = True
        return error

    def then(self, callback: Callable[["Pending[T]"], object]) -> None:
        """Call `callback` with this commit when it ends, or now if it has. The thread that ends the
        commit calls it; exceptions are logged."""
        self._check_here()

        def call(future: Future[T]) -> None:
            try:
                with _calling_back():
                    callback(self)
            except BaseException:  # SystemExit, too: it would end the thread of all commits
                logger.exception("a callback raised at the end of %s", self.name)

        self._future.add_done_callback(call)

    def cancel(self) -> bool:
        """Cancel the commit. False if it has ended or its log entry is being appended already."""
        self._check_here()
        with self._lock:
            if self._publishing or self.done():
                return False
            self._cancelled = True
            self.superseded.set()
            return True

    def __await__(self) -> Generator[None, None, T]:
        import asyncio  # here: 70 ms, which a command does not need

        self._check_here()
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self.seen = self.seen or self.done()

    def _check_here(self) -> None:
        """Raise `InvalidInput` in a forked child, where nobody ends this commit."""
        if self._pid != os.getpid() and not self.done():
            raise InvalidInput(
                f"{self.name} is made by process {self._pid}, which this one was forked from; wait "
                "for it there, or open the store again here and look at its log"
            )

    # -- called by the committer --

    @property
    def cancelled(self) -> bool:
        """Whether its caller gave it up."""
        return self._cancelled

    def check(self) -> None:
        """Raise `Cancelled` if the caller has cancelled the commit."""
        if self._cancelled:
            raise Cancelled(f"{self.name} was cancelled, or the call that began it interrupted")

    def publish(self) -> None:
        """Make it impossible to cancel from here on."""
        with self._lock:
            self.check()
            self._publishing = True

    def copied(self) -> None:
        """Set `staged`, before anybody is told."""
        self._staged.set()

    def reached(self, milestone: Milestone) -> None:
        """Record a milestone and call `on_progress`, whose exceptions are logged and ignored."""
        if milestone is Milestone.STAGED:
            self.copied()
        self._reached[milestone] = seconds = self.age_s
        if self._on_progress:
            try:
                with _calling_back():
                    self._on_progress(
                        CommitProgress(milestone, self.step, seconds, self.state_bytes)
                    )
            except Exception:
                logger.exception("on_progress raised at %s; the commit goes on", milestone)

    def held_longer(self, seconds: float) -> None:
        """Add a wait of the training thread to `held_s`."""
        self._reached[Milestone.HELD] = self._reached.get(Milestone.HELD, 0.0) + seconds

    def succeed(self, result: T) -> None:
        self._future.set_result(result)
        self._staged.set()

    def fail(self, error: BaseException) -> None:
        self.seen = self.seen or isinstance(error, Cancelled | Busy)
        self._future.set_exception(error)
        self._staged.set()

    def supersede(self) -> None:
        """A newer commit is to be made: do not try again."""
        self.superseded.set()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end, without marking the outcome as seen."""
        with suppress(TimeoutError):
            self._future.exception(timeout_s)
        return self.done()

    def failure(self) -> BaseException | None:
        """The failure of a commit that has ended, without marking it as seen."""
        return self._future.exception() if self.done() else None


class WhyNot(NamedTuple):
    """Why a commit cannot begin now. `hangs`: one before it is held up by storage."""

    text: str
    hangs: bool = False


LINGER_S = 60.0
"""So long the thread of commits waits for the next one: to start another holds the caller, who
waits for its first sign of life."""

NOTICE_S = 4.0
"""Implicit waits are reported on stderr each time this many seconds have passed."""


class Background:
    """The commits in flight of one store object, at most `limit` at a time."""

    def __init__(self, limit: int, place: str) -> None:
        self._limit, self._place = limit, place
        self._pid = os.getpid()
        survives_forks(self)
        _everybody.add(self)

    def forked(self) -> None:
        """A child has nothing in flight: the parent completes and reports the commits that it
        began."""
        self._jobs: deque[Callable[[], object]] = deque()
        self._pending: list[Pending[Any]] = []
        self._working = self._idle = self._closed = False
        self._changed = Condition()

    def raise_failure(self, note: str, before: Pending[Any] | None = None, *, newer: bool) -> None:
        """Raise the first failure that the caller has not seen, of commits started before `before`.
        `note` says what became of the call that raises it. A `newer` commit takes the place of
        those whose failure passes."""
        if failed := self._take_failure(before, newer=newer):
            failed.add_note(note)
            raise failed

    def add_failures(self, error: BaseException) -> None:
        """Note the failures that the caller has not seen on `error`, which the caller is about to
        see."""
        while failed := self._take_failure():
            error.add_note(f"before, {failed.__notes__[0]}: {failed}")

    def admit(self, *, wait: bool, max_age_s: float | None = None) -> WhyNot | None:
        """Why no more commit may start now; with `wait`, waits until it may, but no longer
        than until the oldest in flight has `max_age_s`. Raises `InvalidInput` in a forked child,
        which has neither the thread nor the staging memory of its parent."""
        if self._pid != os.getpid():
            raise InvalidInput(
                f"{self._place} was opened by process {self._pid}, which this one was forked from; "
                "open it again here to commit in the background"
            )
        self._have_worked()
        with self._changed:
            busy = self._in_flight()
            for pending in busy:
                pending.superseded.set()
            if len(busy) >= self._limit:
                left = None if max_age_s is None else max(0.0, max_age_s - busy[0].age_s)
                if not wait or not self._changed.wait_for(
                    lambda: len(self._in_flight()) < self._limit, left
                ):
                    if max_age_s is not None and busy[0].age_s >= max_age_s:
                        return WhyNot(
                            f"{busy[0].name} is held up, {busy[0].stage} after "
                            f"{seconds_text(busy[0].age_s)}",
                            hangs=True,
                        )
                    return WhyNot("another commit is in flight")
        return None

    def note(self, pending: Pending[Any]) -> None:
        """Keep the failure of a commit that was not begun until the caller sees it."""
        with self._changed:
            self._pending.append(pending)

    def start(self, pending: Pending[Any], work: Callable[[], object]) -> None:
        """Run `work` after all work started before. It must end `pending` and raise nothing.

        The calling thread runs it if no thread can be started, because of a limit or because the
        interpreter is exiting. If this call is interrupted, `admit` or `drain` starts the thread.
        """
        with self._changed:
            self._jobs.append(work)
            self._pending.append(pending)
        self._have_worked()

    def close(self) -> None:
        """End the thread, which waits for more work; nothing may be in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _have_worked(self) -> None:
        """Wake the thread for the waiting work, or start one. If one runs already, the new one ends
        at once."""
        with self._changed:
            if self._working or not self._jobs:
                return
            if self._idle:
                self._changed.notify_all()
                return
        try:
            _have_exits_watched(os.getpid())
            threading.Thread(target=self._run_aside, name="ckptstore-commits").start()
        except RuntimeError:
            self._run()

    def wait(self) -> bool:
        """Wait until nothing is in flight. Returns False within a function that a commit calls,
        where waiting would never end."""
        if getattr(_thread, "in_callback", False):
            return False
        with self._changed:
            if not self._working and not self._jobs:  # as before most calls
                return True
        self._have_worked()
        while self.tell_if_busy():
            pass
        return True

    def drain(self) -> BaseException | None:
        """Wait until nothing is in flight; return the first failure not yet seen."""
        return self._take_failure() if self.wait() else None

    def tell_if_busy(self) -> bool:
        """Wait up to `NOTICE_S` for commits in flight; report those still running on stderr."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._working and not self._jobs, NOTICE_S):
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
        while failed := self._take_failure():
            print(
                f"ckptstore: a commit to {self._place} failed: {failed}",
                file=sys.stderr,
                flush=True,
            )

    def _take_failure(
        self, before: Pending[Any] | None = None, *, newer: bool = False
    ) -> BaseException | None:
        with self._changed:
            while self._pending and self._pending[0].done() and self._pending[0] is not before:
                pending = self._pending.pop(0)
                if not pending.seen and (error := pending.failure()):
                    pending.seen = True
                    if not (newer and pending.passes):
                        return error
        return None

    def _in_flight(self) -> list[Pending[Any]]:
        return [pending for pending in self._pending if not pending.done()]

    def _run_aside(self) -> None:
        step_aside()
        self._run(LINGER_S)

    def _run(self, linger_s: float = 0.0) -> None:
        with self._changed:
            if self._working or self._idle:
                return
            self._working = True
        while True:
            with self._changed:
                if not self._jobs:
                    self._working, self._idle = False, True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._jobs or self._closed, linger_s)
                    self._idle = False
                    if not self._jobs:
                        return
                    self._working = True
                work = self._jobs.popleft()
            work()
            del work  # frees the state, which must not live until the next commit
            with self._changed:
                self._changed.notify_all()


_everybody: WeakSet[Background] = WeakSet()


def _watch_exit() -> None:
    """Report what the interpreter waits for at exit, and let threads end that only wait."""
    threading.main_thread().join()
    for background in list(_everybody):
        background.close()
    while any(background.tell_if_busy() for background in list(_everybody)):
        pass


@cache
def _have_exits_watched(pid: int) -> None:
    """Start the thread that watches the exit, once per process. It is a daemon, so that the exit
    does not wait for it."""
    threading.Thread(target=_watch_exit, name="ckptstore-exit", daemon=True).start()


@atexit.register
def _tell_failures() -> None:
    for background in list(_everybody):
        background.tell_failures()
