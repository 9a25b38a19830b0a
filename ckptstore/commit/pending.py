"""How does a caller follow a commit in flight: query it, wait for it, cancel it?"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptstore.commit.plan import Run
from ckptstore.core.ids import CommitId
from ckptstore.core.options import CommitProgress, Milestone
from ckptstore.errors import Busy, Cancelled


class Watch:
    """Callbacks of a commit, called from any of its threads. These do nothing.

    A callback's exception becomes the commit's.
    """

    def starting(self) -> None:
        """An attempt begins, and reads all sources. Another follows if the store changed."""

    def worked(self, batch: Sequence[Run]) -> None:
        """A batch was hashed and its new chunks written; this attempt does not read it again."""

    def reached(self, milestone: Milestone) -> None:
        """`HASHED`, `WRITTEN` or `DURABLE`."""

    def publishing(self) -> None:
        """The log entry is about to be appended; after that the commit cannot be cancelled."""


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
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()
        self._staged = threading.Event()
        self._lock = threading.Lock()
        self._cancelled = self._publishing = False
        self.help_staging: Callable[[], object] = lambda: None
        """Helps with the copying that is left, if any."""
        self.tip: CommitId | None = None
        """The parent of the next commit once this one has ended: this one, or its parent if it
        failed."""
        self.seen = False
        """Whether the caller has received the outcome. The next call raises an unseen failure."""

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
        """Wait until `staged`. Raises `TimeoutError`, or the failure of the commit."""
        if timeout_s is None:
            self.help_staging()
        if not self._staged.wait(timeout_s):
            raise TimeoutError(f"the commit was not staged within {timeout_s} s; it goes on")
        if self.done() and (error := self.exception()):
            raise error

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the durable commit and return it.

        Raises the commit's failure, `Cancelled`, `Busy` if it was skipped, or `TimeoutError` after
        `timeout_s`; then the commit goes on.
        """
        if error := self.exception(timeout_s):
            raise error
        return self._future.result()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end; return the failure or None. Raises `TimeoutError` like `wait`."""
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
        self._future.add_done_callback(lambda future: callback(self))

    def cancel(self) -> bool:
        """Cancel the commit. False if it has ended or its log entry is being appended already."""
        with self._lock:
            if self._publishing or self.done():
                return False
            self._cancelled = True
            return True

    def __await__(self) -> Generator[None, None, T]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self.seen = self.seen or self.done()

    # -- called by the committer --

    def check(self) -> None:
        """Raise `Cancelled` if the caller has cancelled the commit."""
        if self._cancelled:
            raise Cancelled(f"{self.name} was cancelled")

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
                self._on_progress(CommitProgress(milestone, self.step, seconds, self.state_bytes))
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

    def failure(self) -> BaseException | None:
        """The failure of a commit that has ended, without marking it as seen."""
        return self._future.exception() if self.done() else None
