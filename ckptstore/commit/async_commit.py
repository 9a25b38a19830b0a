"""How does an asynchronous commit run? Admit, flatten and stage it; commit in the background."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

from ckptstore.commit.commit_metadata import CommitMetadata, ParentTracker, parents_of
from ckptstore.commit.commit_queue import Background
from ckptstore.commit.dedup_probe import DedupProbe
from ckptstore.commit.lazy_copy import BorrowedLeaves, LazyCopy, PendingWatch
from ckptstore.commit.pending import Pending, Watch
from ckptstore.core.ids import CommitId
from ckptstore.core.options import Async, CommitProgress, Milestone, Overlap, Staging
from ckptstore.core.text import bytes_text
from ckptstore.errors import Busy, InvalidInput
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, leaves_of
from ckptstore.state.staging import (
    LookedUp,
    StagingPlan,
    leaves_away,
    paths_of,
    plan_staging,
    stage,
    with_leaves,
)
from ckptstore.state.staging_buffers import Buffer, BufferPool, CopyProgress, default_budget
from ckptstore.state.writes import (
    Candidate,
    FrozenWeights,
    StepHooks,
    changed_by_steps,
    optimizers_in,
    versions,
)

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """A caller's options for an asynchronous commit. `overlap` applies while other commits are in
    flight or use the staging memory."""

    overlap: Overlap = "wait"
    staging: Staging = "eager"
    trust_version: bool = False
    dedup_first: bool = False
    allow_pickle: bool = False
    on_progress: Callable[[CommitProgress], object] | None = None

    @classmethod
    def of(cls, given: Async, allow_pickle: bool) -> "AsyncOptions":
        return cls(
            given.overlap,
            given.staging,
            given.trust_version,
            allow_pickle=allow_pickle,
            on_progress=given.on_progress,
        )

    def __post_init__(self) -> None:
        if self.dedup_first and self.staging == "lazy":
            raise InvalidInput(
                "dedup_first reads the whole state within the call, which staging='lazy' is there "
                "to avoid; choose one"
            )


class AsyncResult(NamedTuple, Generic[S]):
    """A finished commit: its id, its chunk ids by leaf, and the caller's result."""

    id: CommitId
    ids: Mapping[int, bytes]
    result: S


@dataclass(frozen=True, slots=True)
class CommitRoute(Generic[S]):
    """The functions that turn a state into a commit.

    `flatten` runs within the call; `make` runs in the background on the staged state, one at a
    time. `begin` calls the copying function, which returns a reason why it cannot start now, or "";
    ranks agree there. `whole` demands that every leaf be staged; otherwise leaves that exceed the
    staging memory are written from the caller's. `elsewhere` means that another process makes the
    commit, and starts when the copy is complete.
    """

    flatten: Callable[[], Mapping[str, FlatState]]
    make: Callable[
        [Mapping[str, FlatState], Buffer, CommitMetadata, Pending[S], Watch], AsyncResult[S]
    ]
    begin: Callable[[Callable[[], str]], str]
    whole: bool
    elsewhere: bool


def by_itself(begin: Callable[[], str]) -> str:
    """`CommitRoute.begin` of a single process."""
    return begin()


COPYING_THREADS = 8
"""More threads do not copy faster: memory bandwidth is the limit."""


class AsyncCommits(Generic[S]):
    """The asynchronous commits of one store object."""

    def __init__(
        self,
        parent_tracker: ParentTracker,
        look_up: Callable[[], DedupProbe],
        *,
        max_in_flight: int,
        staging_bytes: int | None,
        shared: bool,
        place: str,
    ) -> None:
        self._shared = shared
        self._parent_tracker, self._look_up, self._staging_bytes = (
            parent_tracker,
            look_up,
            staging_bytes,
        )
        self._background = Background(max_in_flight, place)
        self._copiers = ThreadPool(min(len(os.sched_getaffinity(0)), COPYING_THREADS))
        self._stagers = ThreadPool(1)
        self._calls = threading.Lock()
        self._trust = FrozenWeights()
        self._hooks = StepHooks(self.hold)
        self._lazy: list[LazyCopy] = []

    @cached_property
    def pool(self) -> BufferPool:
        """Staging memory, sized by what is available at its first use."""
        return BufferPool(self._staging_bytes or default_budget(), shared=self._shared)

    def start(
        self,
        app_state: Mapping[str, Any],
        label: CommitMetadata,
        async_options: AsyncOptions,
        route: CommitRoute[S],
    ) -> Pending[S]:
        """Stage `app_state` and commit it in the background."""
        begun: list[_Begun] = []

        def begin() -> str:
            found = self._begin(app_state, async_options, route, taken)
            if isinstance(found, str):
                return found
            begun.append(found)
            return ""

        with self._calls, ExitStack() as taken:
            pending: Pending[S] = Pending(label.step, async_options.on_progress)
            if why_not := route.begin(begin):
                pending.fail(
                    Busy(
                        f"{pending.name} was skipped, as overlap='skip' says: {why_not}; nothing "
                        "was changed"
                    )
                )
                return pending
            job = self._hand_over(pending, begun[0], label, route, taken)
            self._background.start(pending, lambda: self._finish(job))
            self._keep(job, eager=async_options.staging == "eager")
            pending.reached(Milestone.HELD)
        if job.borrowed.leaves:
            pending.wait_staged()
        return pending

    def _keep(self, job: "_Job[S]", *, eager: bool) -> None:
        """Return when the caller may change the state. An interrupted caller might do so earlier,
        so an exception cancels the commit."""
        try:
            if job.lazy and eager:
                job.lazy.hold()
            job.borrowed.wait()
        except BaseException:
            job.pending.cancel()
            raise

    def hold(self) -> None:
        """Return when every pending copy is complete: the state is about to change."""
        for lazy in tuple(self._lazy):
            lazy.hold()

    def settle(self) -> None:
        """Wait until nothing is in flight; raise a failure that the caller has not seen."""
        if failed := self.drain():
            raise failed

    def drain(self) -> BaseException | None:
        """Wait until nothing is in flight; return a failure that the caller has not seen."""
        return self._background.drain()

    def close(self) -> None:
        """Stop the threads; nothing may be in flight."""
        self._hooks.remove()
        self._copiers.close()
        self._stagers.close()

    def _begin(
        self,
        app_state: Mapping[str, Any],
        async_options: AsyncOptions,
        route: CommitRoute[S],
        taken: ExitStack,
    ) -> "_Begun | str":
        """Copy what the call must copy before it returns, or return why it cannot now."""
        if not self._background.admit(wait=async_options.overlap == "wait"):
            return "another commit is in flight"
        state = self._plan(
            app_state, route.flatten(), async_options, taken, elsewhere=route.elsewhere
        )
        if route.whole and state.plan.borrowed:
            raise InvalidInput(
                f"a state of {bytes_text(state.nbytes)} does not fit into "
                f"{bytes_text(self.pool.budget_bytes)} of staging memory, and a commit by another "
                "process or several ranks needs all of it there: open the store with more "
                "staging_bytes"
            )
        arena = self.pool.take(state.plan.nbytes, wait=async_options.overlap == "wait")
        if arena is None:
            return f"{bytes_text(state.plan.nbytes)} of staging memory is not free"
        taken.callback(self.pool.give, arena)
        arrivals = CopyProgress(state.plan.later)
        staged = stage(
            state.plan, state.flats, arena, self._copiers.spread, state.looked_up, arrivals
        )
        return _Begun(state, arena, arrivals, staged)

    def _plan(
        self,
        app_state: Mapping[str, Any],
        flats: Mapping[str, FlatState],
        async_options: AsyncOptions,
        taken: ExitStack,
        *,
        elsewhere: bool,
    ) -> "_State":
        sources, paths = leaves_of(flats), paths_of(flats)
        candidates: list[Candidate] = []
        if async_options.trust_version:
            candidates = self._trust.candidates(app_state, sources, paths)
            for n, known in self._trust.known(candidates).items():
                sources[n] = known
        lazy: frozenset[int] = frozenset()
        away: frozenset[int] = frozenset()
        if async_options.staging == "lazy":
            optimizers = optimizers_in(app_state)
            self._hooks.install(optimizers)
            lazy = changed_by_steps(optimizers, sources)
        elif not elsewhere:
            away = leaves_away(sources)
        flats = with_leaves(flats, sources)
        looked_up: Mapping[int, LookedUp] = {}
        if async_options.dedup_first:
            look_up = self._look_up()
            taken.callback(look_up.open_session().end)
            looked_up = look_up.find(flats, self._copiers)
        plan = plan_staging(sources, self.pool.budget_bytes, lazy | away, looked_up)
        return _State(flats, plan, lazy & plan.places.keys(), looked_up, candidates, paths)

    def _hand_over(
        self,
        pending: Pending[S],
        begun: "_Begun",
        label: CommitMetadata,
        route: CommitRoute[S],
        taken: ExitStack,
    ) -> "_Job[S]":
        state, plan, sources = begun.state, begun.state.plan, leaves_of(begun.state.flats)
        pending.state_bytes = state.nbytes
        borrowed = BorrowedLeaves(plan, [source.nbytes for source in sources])
        lazy = None
        if plan.later:
            looks = partial(versions, sources, state.lazy)
            lazy = LazyCopy(
                pending, plan.later, begun.arena, begun.arrivals, looks, state.paths.__getitem__
            )
            pending.help_staging = lazy.hold
            self._lazy.append(lazy)
            self._stagers.submit(lazy.work)
        elif not plan.borrowed:
            pending.reached(Milestone.STAGED)
        base = self._parent_tracker.then(pending)
        return _Job(pending, begun, taken.pop_all(), base, label, route, borrowed, lazy)

    def _finish(self, job: "_Job[S]") -> None:
        """Complete a commit in the background. Raises nothing."""
        pending, parents = job.pending, parents_of(job.base)
        pending.tip = parents[0] if parents else None
        candidates = job.begun.state.candidates
        failed: BaseException | None = None
        try:
            with job.taken, self._copying(job) as copied:
                if job.route.elsewhere:
                    copied()
                label, watch = (
                    replace(job.label, parents=parents),
                    PendingWatch(pending, job.borrowed, copied),
                )
                made = job.route.make(job.begun.staged, job.begun.arena, label, pending, watch)
            pending.tip = made.id
            self._trust.remember(candidates, made.ids)
        except BaseException as error:
            failed = error
            if candidates:
                self._trust.forget()
        if failed:
            failed.add_note(f"{pending.name}, in the background")
            pending.fail(failed)
        else:
            pending.succeed(made.result)
        job.borrowed.settle()

    @contextmanager
    def _copying(self, job: "_Job[S]") -> Iterator[Callable[[], None]]:
        """Yields a function that waits for the copy and raises its failure. The block ends after
        the copy, since the next commit then reuses the buffer."""
        if not job.lazy:
            yield _nothing_left
            return
        try:
            yield job.lazy.wait
        finally:
            job.lazy.wait_ended()
            self._lazy.remove(job.lazy)
            job.pending.help_staging = _nothing_left


@dataclass(frozen=True, slots=True)
class _State:
    """A flattened state and its staging plan; `lazy` leaves are copied while training goes on."""

    flats: Mapping[str, FlatState]
    plan: StagingPlan
    lazy: frozenset[int]
    looked_up: Mapping[int, LookedUp]
    candidates: list[Candidate]
    paths: list[str]

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in leaves_of(self.flats))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A state copied to `arena`, except for lazy leaves; `staged` are the sources that read it."""

    state: _State
    arena: Buffer
    arrivals: CopyProgress
    staged: Mapping[str, FlatState]


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    """A commit handed to the background. `taken` releases staging memory and sessions at its
    end."""

    pending: Pending[S]
    begun: _Begun
    taken: ExitStack
    base: CommitId | Pending[Any] | None
    label: CommitMetadata
    route: CommitRoute[S]
    borrowed: BorrowedLeaves
    lazy: LazyCopy | None


def _nothing_left() -> None:
    """Does nothing: the state is copied already."""
