"""A commit that has not ended yet, as its caller sees it: ask, wait, call off.

How far a commit has come: milestones, and who is told of them.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from ckptstore.commit.plan import Run
from ckptstore.core.ids import CommitId
from ckptstore.errors import Busy, Cancelled


class Milestone(StrEnum):
    """What happens to a commit, in order: the caller goes on; the state is copied; its chunks have
    ids; packs are closed; it exists."""

    HELD = "held"
    STAGED = "staged"
    HASHED = "hashed"
    WRITTEN = "written"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """A milestone of the commit of `step`, reached so many seconds after the call; `state_bytes` is
    the state's size."""

    milestone: Milestone
    step: int | None
    seconds: float
    state_bytes: int


class Watch:
    """What a commit calls on its way, from any of its threads; this one lets it go its way. What a
    method raises, the commit raises."""

    def starting(self) -> None:
        """An attempt begins, the first or, because others changed the store meanwhile, another one:
        all sources are read (again)."""

    def worked(self, batch: Sequence[Run]) -> None:
        """A batch was hashed and what is new of it written: its sources will not be asked for these
        bytes again in this attempt."""

    def reached(self, milestone: Milestone) -> None:
        """`HASHED`, `WRITTEN` or `DURABLE`."""

    def publishing(self) -> None:
        """The log entry is about to be appended: from here on the commit can no longer be called
        off."""


UNWATCHED = Watch()


logger = logging.getLogger("ckptstore")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timings:
    """When each milestone was reached, in seconds from the call; None before it is.

    `held_s` is how long the training thread was kept: the call, waiting for room or for the commit
    before, and waits in optimizer hooks.
    """

    held_s: float | None = None
    staged_s: float | None = None
    hashed_s: float | None = None
    written_s: float | None = None
    durable_s: float | None = None


class Pending(Generic[T]):
    """A commit that goes on in the background. Threads may share it; `await` gives what `wait`
    returns."""

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
        """Takes part in the copying that is left, if any."""
        self.tip: CommitId | None = None
        """What the next commit descends from once this one has ended: this one, or, if it was not
        made, its parent."""
        self.seen = False
        """Whether the caller has been given the outcome. A failure that nobody has seen is raised
        by the next call."""

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
        """`copying`, the milestone that was reached last, or how it ended: `done`, `failed`."""
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
        """Whether the state has been copied: whatever is written to its tensors from now on, the
        commit does not see."""
        return self._staged.is_set()

    def done(self) -> bool:
        """Whether it has ended: durable, failed, called off or skipped."""
        return self._future.done()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until `staged`; raises `TimeoutError`, and what the commit failed with if it failed
        before."""
        if timeout_s is None:
            self.help_staging()
        if not self._staged.wait(timeout_s):
            raise TimeoutError(f"the commit was not staged within {timeout_s} s; it goes on")
        if self.done() and (error := self.exception()):
            raise error

    def wait(self, timeout_s: float | None = None) -> T:
        """The commit, once it is durable. Raises what it failed with, `Cancelled`, `Busy` if it was
        skipped, or `TimeoutError` if it has not ended within `timeout_s`: then it goes on."""
        if error := self.exception(timeout_s):
            raise error
        return self._future.result()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What it failed with, or None, once it has ended; raises `TimeoutError` like `wait`."""
        try:
            error = self._future.exception(timeout_s)
        except TimeoutError as late:
            raise TimeoutError(
                f"the commit is not durable after {timeout_s} s ({self.stage}); it goes on"
            ) from late
        self.seen = True
        return error

    def then(self, callback: Callable[["Pending[T]"], object]) -> None:
        """Have `callback` called with this once it has ended, at once if it has, by whatever thread
        ends it. What it raises is logged."""
        self._future.add_done_callback(lambda future: callback(self))

    def cancel(self) -> bool:
        """Call the commit off. True if it will not be made; False if it has ended or its log entry
        is on its way already."""
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

    # -- the engine's side --

    def check(self) -> None:
        """Raise `Cancelled` if the caller has called the commit off."""
        if self._cancelled:
            raise Cancelled(f"{self.name} was called off")

    def publish(self) -> None:
        """From here on it cannot be called off."""
        with self._lock:
            self.check()
            self._publishing = True

    def copied(self) -> None:
        """From here on it is `staged`, whoever has yet to be told."""
        self._staged.set()

    def reached(self, milestone: Milestone) -> None:
        """Note a milestone and tell the callback; one that raises is logged, and the commit goes
        on."""
        if milestone is Milestone.STAGED:
            self.copied()
        self._reached[milestone] = seconds = self.age_s
        if self._on_progress:
            try:
                self._on_progress(CommitProgress(milestone, self.step, seconds, self.state_bytes))
            except Exception:
                logger.exception("on_progress raised at %s; the commit goes on", milestone)

    def held_longer(self, seconds: float) -> None:
        """The training thread was kept again, by so much."""
        self._reached[Milestone.HELD] = self._reached.get(Milestone.HELD, 0.0) + seconds

    def succeed(self, result: T) -> None:
        self._future.set_result(result)
        self._staged.set()

    def fail(self, error: BaseException) -> None:
        self.seen = self.seen or isinstance(error, Cancelled | Busy)
        self._future.set_exception(error)
        self._staged.set()

    def failure(self) -> BaseException | None:
        """What it failed with if it has ended so, without the caller seeing it by that."""
        return self._future.exception() if self.done() else None
