"""How does an asynchronous commit run? Admit, flatten and stage it; commit in the background.

A commit may start before the copy of its state is complete. A lazy copy goes on in the background;
another thread helps once somebody must wait for it. Borrowed leaves are not copied: the caller
waits until they are written.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ckptstore.commit.commit_metadata import (
    CommitMetadata,
    CommitRequest,
    ParentTracker,
    Prepared,
    Tip,
    asked_of,
    commit_of,
    following,
)
from ckptstore.commit.outages import Outages, passes
from ckptstore.commit.pending import Background, Pending, Watch, WhyNot
from ckptstore.commit.plan import ChunkRun, Flats
from ckptstore.commit.transaction import Committed
from ckptstore.core.forks import cached_property, new_event, survives_forks
from ckptstore.core.ids import SessionId
from ckptstore.core.options import Async, Milestone
from ckptstore.core.text import bytes_text, selector
from ckptstore.errors import Busy, Cancelled, Conflict, InvalidInput, Unavailable
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.state.leaf_sources import leaves_of
from ckptstore.state.staging import (
    copy_task,
    leaves_away,
    paths_of,
    plan_staging,
    stage,
)
from ckptstore.state.staging_buffers import Buffer, BufferPool, Copy, CopyProgress, default_budget
from ckptstore.state.writes import (
    Candidate,
    FrozenWeights,
    StepHooks,
    changed_by_steps,
    optimizers_in,
    versions,
)

S = TypeVar("S")


class Together(Protocol):
    """The ranks that stage a commit together (`distributed.collective.Collective`)."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""

    @property
    def turn(self) -> int:
        """The number of the last round, which is equal on all ranks."""

    def agree(self, begin: Callable[[], WhyNot | None], go: Callable[[], object]) -> WhyNot | None:
        """Call `begin` on every rank and return all ranks' answers: why a rank cannot begin
        now; if all can, each calls `go`, which no interrupt ends."""


@dataclass(frozen=True, slots=True)
class CommitRoute(Generic[S]):
    """How a state becomes a commit.

    `flatten` runs within the call; `commit` runs in the background on the staged state, one at a
    time, and returns the caller's result too. `peers` are the ranks that take part, if any; `meet`
    connects them for `commit`, once all of them are to make it. `whole` demands that every leaf be
    staged; otherwise leaves that exceed the staging memory are written from the caller's. With
    `elsewhere`, another process makes the commit, and starts when the copy is complete.
    """

    flatten: Callable[[], Flats]
    commit: Callable[[CommitRequest, Pending[S]], tuple[Committed, S]]
    peers: Together | None
    meet: Callable[[], object]
    whole: bool
    elsewhere: bool
    passes: Callable[[BaseException], bool] = passes
    """Whether training may go on after an error of `commit`."""


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
        helpers: ThreadPool,
    ) -> None:
        self._pending, self._arena, self._arrivals, self._path = pending, arena, arrivals, path
        self._helpers = helpers
        self._versions, self._before = versions, versions()
        self._tasks = shared(enumerate(tasks))
        self._copied, self._ended = new_event(), new_event()
        self.begun = False
        self._error: BaseException | None = None

    def work(self) -> None:
        """Copy until no task is left. Several threads may call it, but not one that Ctrl-C can
        interrupt: nobody else would make the copy that it had begun."""
        self.begun = True
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
        self._helpers.submit(self.work)
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


class PendingWatch(Watch):
    """Reports progress to a pending commit, and stops the commit once its caller cancels it.

    `borrowed` counts the bytes of leaves written from the caller's own memory; the caller waits
    until they are written. `lazy` is the copy that goes on after the call, if any.
    """

    def __init__(
        self, pending: Pending[Any], borrowed: Mapping[int, int], lazy: LazyCopy | None
    ) -> None:
        self.borrowed, self.lazy = borrowed, lazy
        self._pending, self._attempts = pending, 0
        self._left = sum(borrowed.values())
        self._lock = threading.Lock()
        self._settled = new_event()
        if not self._left:
            self._settled.set()

    def worked(self, batch: Sequence[ChunkRun]) -> None:
        if done := sum(run.raw_bytes for run in batch if run.part.leaf in self.borrowed):
            with self._lock:
                self._left -= done
                complete = not self._left
            if complete:
                self._pending.reached(Milestone.STAGED)
                self.settle()
        self._pending.check()

    def reached(self, milestone: Milestone) -> None:
        self.wait_copied()
        self._pending.reached(milestone)

    def publishing(self, session: SessionId) -> None:
        self._pending.publish()

    def starting(self) -> None:
        self._pending.check()
        self._attempts += 1
        if self._attempts > 1 and self.borrowed:
            raise Conflict(
                f"the commit would have to start again, and {len(self.borrowed)} leaves that did "
                "not fit into the staging memory may have changed since; repeat the commit, or "
                "open the store with more staging_bytes"
            )

    def wait_copied(self) -> None:
        """Wait until the state is copied and that is reported; raise the copy's failure."""
        if self.lazy:
            self.lazy.wait()

    def settle(self) -> None:
        """End the caller's wait."""
        self._settled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the borrowed leaves are written, or the commit has ended."""
        return self._settled.wait(timeout_s)


COPYING_THREADS = 8
"""More threads do not copy faster: memory bandwidth is the limit."""


class AsyncCommits(Generic[S]):
    """The asynchronous commits of one store object."""

    def __init__(
        self,
        parent_tracker: ParentTracker,
        *,
        max_in_flight: int,
        staging_bytes: int | None,
        shared: bool,
        place: str,
    ) -> None:
        self._parent_tracker, self._staging_bytes, self._shared = (
            parent_tracker,
            staging_bytes,
            shared,
        )
        self._background = Background(max_in_flight, place)
        self.outages = Outages(place)
        survives_forks(self)
        self._copiers = ThreadPool(min(len(os.sched_getaffinity(0)), COPYING_THREADS))
        self._stagers = ThreadPool(1)
        self._trust = FrozenWeights()
        self._hooks = StepHooks(self.hold)

    def forked(self) -> None:
        """A child has no copying threads. Its own writes do not reach the parent's state, so it
        waits for no copy."""
        self._calls = threading.Lock()
        self._lazy: list[LazyCopy] = []

    @cached_property
    def pool(self) -> BufferPool:
        """Staging memory, sized by what is available at its first use."""
        return BufferPool(self._staging_bytes or default_budget(), shared=self._shared)

    def start(
        self,
        app_state: Mapping[str, Any],
        label: CommitMetadata,
        options: Async,
        route: CommitRoute[S],
    ) -> Pending[S]:
        """Stage `app_state` and commit it in the background.

        Raises the failure of an earlier commit that the caller has not seen. With peers, it is
        raised before this commit begins, since all ranks must learn of it. Otherwise this commit is
        started first, so that one failure does not cost two commits. With `on_error="warn"`, only a
        failure that does not pass is raised, or that nothing was durable for too long.
        """
        max_age_s = options.max_wait_s if options.goes_on else None
        limit = options.max_unsaved_steps if options.goes_on else None
        self.outages.asked(label.step)
        loud = route.peers is None or route.peers.leads
        self.outages.level = logging.WARNING if loud else logging.INFO
        begun, given = list[_Begun](), list[_Job[S]]()
        with self._calls:
            pending: Pending[S] = Pending(label.step, options.on_progress)
            taken, claim, before = ExitStack(), threading.Lock(), self._parent_tracker.tip()

            def begin() -> WhyNot | None:
                busy = self._background.admit(wait=options.overlap == "wait", max_age_s=max_age_s)
                if route.peers:  # before any of them is skipped, so that all ranks raise
                    self._raise_overdue(limit)
                if busy:
                    return busy
                if route.peers:
                    self._background.raise_failure(
                        "raised by the next commit, which did not begin: repeat it", newer=True
                    )
                found = self._stage(pending, app_state, label, options, route, taken)
                if isinstance(found, WhyNot):
                    return found
                begun.append(found)
                return None

            def go() -> None:
                route.meet()
                turn = route.peers.turn if route.peers else 0
                numbered = replace(label, turn=turn)
                given.append(_Job(pending, begun[0], taken, claim, numbered, route, options))
                self._give(given[0])

            try:
                why_not = route.peers.agree(begin, go) if route.peers else begin()
                if why_not:
                    taken.close()
                else:
                    if not route.peers:
                        go()
                    self._let_go(given[0])
            except BaseException:
                # An interrupted caller might change the state too early. With peers, a commit that
                # was given to its thread fails there, in a round, on all of them.
                pending.cancel()
                goes_on = route.peers and given
                if not goes_on and claim.acquire(blocking=False):  # its thread will not begin it
                    self._parent_tracker.withdraw(pending, before)
                    taken.close()
                    pending.fail(Cancelled(f"{pending.name} was interrupted before it began"))
                raise
            if why_not:
                self._skip(pending, why_not, None if route.peers else limit)
                return pending
            pending.reached(Milestone.HELD)
        if begun[0].watch.borrowed and not options.goes_on:
            pending.wait_staged()
        if not route.peers:  # which have raised in `begin`: now, one of them might raise alone
            self._raise_overdue(limit)
            self._background.raise_failure(
                f"raised by the next commit_async: {pending.name} goes on all the same, and "
                "`close` waits for it",
                pending,
                newer=True,
            )
        return pending

    def _give(self, job: "_Job[S]") -> None:
        """Hand the commit to the thread of commits."""
        pending, watch = job.pending, job.begun.watch
        if watch.lazy:
            self._begin_copy(pending, watch.lazy, job.taken)
        elif not watch.borrowed:
            pending.reached(Milestone.STAGED)
        job = replace(job, base=self._parent_tracker.then(pending))
        self._background.start(pending, partial(self._finish, job))

    def _let_go(self, job: "_Job[S]") -> None:
        """Return when the caller may change the state: if that takes too long, without the commit,
        which publishes nothing, whatever it reads from then on."""
        pending, options, watch = job.pending, job.options, job.begun.watch
        if watch.lazy and options.staging == "eager":
            watch.lazy.hold()
        if not watch.wait(options.max_wait_s if options.goes_on else None) and pending.cancel():
            held_up = Unavailable(
                f"{pending.name}, of a state larger than the staging memory, is held up"
            )
            self.outages.missed(pending.name, held_up, tell=True)

    def _skip(self, pending: Pending[Any], why: WhyNot, limit: int | None) -> None:
        """Do without a commit that did not begin: another one is in flight, or hangs. Raises if
        nothing was durable for too long."""
        if not why.hangs:
            said = f"{pending.name} was skipped, as overlap='skip' says: {why.text}"
            pending.fail(Busy(f"{said}; nothing was changed"))
            return
        error = Unavailable(f"{pending.name} was skipped: {why.text}")
        pending.passes = True
        self.outages.missed(pending.name, error, tell=True)
        pending.fail(error)
        self._background.note(pending)
        self._raise_overdue(limit)

    def _raise_overdue(self, limit: int | None) -> None:
        if overdue := self.outages.overdue(limit):
            raise overdue

    def hold(self) -> None:
        """Wait until every pending copy is complete. Called before the state changes."""
        for lazy in tuple(self._lazy):
            lazy.hold()

    def wait(self) -> None:
        """Wait until nothing is in flight, except in a function that a commit calls, which would
        wait for itself."""
        self._background.wait()

    def settle(self) -> None:
        """`wait`, then raise a failure that the caller has not seen."""
        if self._background.wait():
            self._background.raise_failure(
                "raised by the next call, which did nothing else: repeat it", newer=False
            )

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        """If the block raises, add failures that the caller has not seen as notes to its error."""
        try:
            yield
        except BaseException as error:
            self._background.add_failures(error)
            raise

    def raise_failure(self, note: str) -> None:
        """Raise a failure that the caller of a newer commit has not seen, with `note`."""
        self._background.raise_failure(note, newer=True)

    def drain(self) -> BaseException | None:
        """Wait until nothing is in flight; return a failure that the caller has not seen."""
        return self._background.drain()

    def close(self) -> None:
        """Stop the threads; nothing may be in flight."""
        self._hooks.remove()
        self._background.close()
        self._copiers.close()
        self._stagers.close()

    def _stage(
        self,
        pending: Pending[S],
        app_state: Mapping[str, Any],
        label: CommitMetadata,
        options: Async,
        route: CommitRoute[S],
        taken: ExitStack,
    ) -> "_Begun | WhyNot":
        """Copy the leaves that must be copied within the call, or return why this is impossible
        now."""
        flats = route.flatten()
        sources, paths = leaves_of(flats), paths_of(flats)
        candidates: list[Candidate] = []
        if options.trust_version:
            is_cast = selector([glob for glob, _ in label.cast] or (lambda path: False))
            candidates = [
                candidate
                for candidate in self._trust.candidates(app_state, sources, paths)
                if not is_cast(candidate.path)  # its chunks are not those of the weight
            ]
            for n, known in self._trust.known(candidates).items():
                sources[n] = known
        lazy: frozenset[int] = frozenset()
        away: frozenset[int] = frozenset()
        if options.staging == "lazy":
            optimizers = optimizers_in(app_state)
            self._hooks.install(optimizers)
            lazy = changed_by_steps(optimizers, sources)
        elif not route.elsewhere:
            away = leaves_away(sources)
        leaf_bytes = [source.nbytes for source in sources]
        plan = plan_staging(sources, self.pool.budget_bytes, lazy | away)
        if route.whole and plan.borrowed:
            raise InvalidInput(
                f"a state of {bytes_text(sum(leaf_bytes))} does not fit into "
                f"{bytes_text(self.pool.budget_bytes)} of staging memory, and a commit by another "
                "process or several ranks needs all of it there: open the store with more "
                "staging_bytes"
            )
        arenas = list[Buffer]()

        def give() -> None:
            for each in arenas:
                self.pool.give(each)

        taken.callback(give)  # first: this call may be interrupted once it has one
        wait, timeout_s = options.overlap == "wait", options.max_wait_s if options.goes_on else None
        arena = self.pool.take(plan.nbytes, wait=wait, timeout_s=timeout_s, into=arenas)
        if arena is None:
            why = f"{bytes_text(plan.nbytes)} of staging memory is not free"
            return WhyNot(f"{why}, an earlier commit is held up" if wait else why, hangs=wait)
        arrivals = CopyProgress(plan.later)
        staged = stage(plan, flats, sources, arena, self._copiers.spread, arrivals)
        pending.state_bytes = sum(leaf_bytes)
        lazy_copy = None
        if plan.later:
            looks = partial(versions, sources, lazy & plan.offsets.keys())
            lazy_copy = LazyCopy(
                pending, plan.later, arena, arrivals, looks, paths.__getitem__, self._copiers
            )
        watch = PendingWatch(pending, {n: leaf_bytes[n] for n in plan.borrowed}, lazy_copy)
        return _Begun(candidates, arena, staged, watch)

    def _begin_copy(self, pending: Pending[S], lazy: LazyCopy, taken: ExitStack) -> None:
        """Start the background copy. `taken`, which holds the buffer, is released after it."""

        def ended() -> None:
            is_held = lazy in self._lazy
            if not is_held:  # this call failed: is there a copy?
                self._stagers.submit(_nothing_left).result()  # behind it: there is one thread
            if is_held or lazy.begun:
                lazy.wait_ended()
            if is_held:
                self._lazy.remove(lazy)
            pending.help_staging = _nothing_left

        taken.callback(ended)
        self._stagers.submit(lazy.work)
        self._lazy.append(lazy)
        pending.help_staging = lazy.hold

    def _finish(self, job: "_Job[S]") -> None:
        """Complete a commit in the background. Raises nothing."""
        if not job.claim.acquire(blocking=False):
            return  # its caller was interrupted, and has released all
        pending, begun, base = job.pending, job.begun, job.base
        pending.tip = commit_of(base)
        try:
            with job.taken:
                if job.route.elsewhere:
                    begun.watch.wait_copied()
                committed, result = self._made(job)
            pending.tip = committed.id
            pending.asked.clear()
            self._trust.remember(begun.candidates, committed.ids)
        except BaseException as error:
            if begun.candidates:
                self._trust.forget()
            error.add_note(f"{pending.name}, in the background")
            pending.passes = job.options.goes_on and job.route.passes(error)
            if not pending.cancelled:
                called_off = isinstance(error, Cancelled)  # by another rank
                self.outages.missed(pending.name, error, tell=pending.passes or called_off)
            pending.asked[:0] = asked_of(base)
            pending.fail(error)
        else:
            pending.succeed(result)
        begun.watch.settle()

    def _made(self, job: "_Job[S]") -> tuple[Committed, S]:
        """Commit; with `on_error="warn"`, again and again until a newer commit is to be made. Ranks
        do not try again: they would have to agree on it."""
        pending, options = job.pending, job.options
        tries = options.goes_on and job.route.peers is None and not job.begun.watch.borrowed
        pause_s, over = options.retry_s / 32, None
        while True:
            try:
                return job.route.commit(job.request(following(job.base, job.label)), pending)
            except BaseException as error:
                if not (tries and passes(error)):
                    raise
                over = over or time.monotonic() + options.retry_s
                self.outages.failing(pending.name, error, tell=True)
                left = over - time.monotonic()
                if left <= 0 or pending.superseded.wait(min(pause_s, left)):
                    pending.check()
                    raise
                pause_s *= 2


@dataclass(frozen=True, slots=True)
class _Begun:
    """A state copied to `arena`, except for leaves that are borrowed or copied later; `staged` are
    the sources that read it."""

    candidates: list[Candidate]
    arena: Buffer
    staged: Flats
    watch: PendingWatch


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    """A commit handed to the background. `taken` releases staging memory and sessions at its end:
    whoever acquires `claim` closes it, the thread of commits or an interrupted caller."""

    pending: Pending[S]
    begun: _Begun
    taken: ExitStack
    claim: threading.Lock
    label: CommitMetadata
    route: CommitRoute[S]
    options: Async
    base: Tip = None

    def request(self, label: CommitMetadata) -> CommitRequest:
        """What is to be committed."""
        pending, begun = self.pending, self.begun
        return CommitRequest(
            Prepared(label, begun.staged),
            pending.started,
            begun.watch,
            buffer=begun.arena,
            asked=pending.asked,
        )


def _nothing_left() -> None:
    """Does nothing: the state is copied already."""
