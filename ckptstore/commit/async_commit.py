"""How does an asynchronous commit run? Admit, flatten and stage it; commit in the background."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

from ckptstore.commit.commit_metadata import (
    CommitMetadata,
    CommitRequest,
    ParentTracker,
    parents_of,
)
from ckptstore.commit.commit_queue import Background, BorrowedLeaves, LazyCopy, PendingWatch
from ckptstore.commit.pending import Pending
from ckptstore.commit.plan import Flats
from ckptstore.commit.transaction import Committed
from ckptstore.core.ids import CommitId
from ckptstore.core.options import Async, Milestone
from ckptstore.core.text import bytes_text
from ckptstore.errors import Busy, InvalidInput
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import leaves_of
from ckptstore.state.staging import (
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


class Together(Protocol):
    """The ranks that stage a commit together (`distributed.collective.Collective`)."""

    def agree(self, begin: Callable[[], str]) -> str:
        """Call `begin` on every rank, which returns why this rank cannot begin now or "", and
        return the reasons of all."""


@dataclass(frozen=True, slots=True)
class CommitRoute(Generic[S]):
    """How a state becomes a commit.

    `flatten` runs within the call; `commit` runs in the background on the staged state, one at a
    time, and returns the caller's result too. `peers` are the ranks that take part, if any. `whole`
    demands that every leaf be staged; otherwise leaves that exceed the staging memory are written
    from the caller's. `elsewhere` means that another process makes the commit, and starts when the
    copy is complete.
    """

    flatten: Callable[[], Flats]
    commit: Callable[[CommitRequest, Pending[S]], tuple[Committed, S]]
    peers: Together | None
    whole: bool
    elsewhere: bool


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
        options: Async,
        route: CommitRoute[S],
    ) -> Pending[S]:
        """Stage `app_state` and commit it in the background."""
        begun: list[_Begun] = []

        def begin() -> str:
            if not self._background.admit(wait=options.overlap == "wait"):
                return "another commit is in flight"
            found = self._stage(app_state, options, route, taken)
            if isinstance(found, str):
                return found
            begun.append(found)
            return ""

        with self._calls, ExitStack() as taken:
            pending: Pending[S] = Pending(label.step, options.on_progress)
            if why_not := route.peers.agree(begin) if route.peers else begin():
                pending.fail(
                    Busy(
                        f"{pending.name} was skipped, as overlap='skip' says: {why_not}; nothing "
                        "was changed"
                    )
                )
                return pending
            job = self._hand_over(pending, begun[0], label, route, taken)
            self._background.start(pending, partial(self._finish, job))
            self._keep(job, eager=options.staging == "eager")
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

    def _stage(
        self,
        app_state: Mapping[str, Any],
        options: Async,
        route: CommitRoute[S],
        taken: ExitStack,
    ) -> "_Begun | str":
        """Copy what the call must copy before it returns, or return why it cannot now."""
        flats = route.flatten()
        sources, paths = leaves_of(flats), paths_of(flats)
        candidates: list[Candidate] = []
        if options.trust_version:
            candidates = self._trust.candidates(app_state, sources, paths)
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
        arena = self.pool.take(plan.nbytes, wait=options.overlap == "wait")
        if arena is None:
            return f"{bytes_text(plan.nbytes)} of staging memory is not free"
        taken.callback(self.pool.give, arena)
        arrivals = CopyProgress(plan.later)
        staged = stage(plan, with_leaves(flats, sources), arena, self._copiers.spread, arrivals)
        looks = partial(versions, sources, lazy & plan.offsets.keys())
        return _Begun(plan, leaf_bytes, paths, candidates, looks, arena, arrivals, staged)

    def _hand_over(
        self,
        pending: Pending[S],
        begun: "_Begun",
        label: CommitMetadata,
        route: CommitRoute[S],
        taken: ExitStack,
    ) -> "_Job[S]":
        plan = begun.plan
        pending.state_bytes = sum(begun.leaf_bytes)
        borrowed = BorrowedLeaves(plan, begun.leaf_bytes)
        lazy = None
        if plan.later:
            lazy = LazyCopy(
                pending,
                plan.later,
                begun.arena,
                begun.arrivals,
                begun.versions,
                begun.paths.__getitem__,
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
        pending, begun, parents = job.pending, job.begun, parents_of(job.base)
        pending.tip = parents[0] if parents else None
        try:
            with job.taken, self._copying(job) as copied:
                if job.route.elsewhere:
                    copied()
                label = replace(job.label, parents=parents)
                watch = PendingWatch(pending, job.borrowed, copied)
                request = CommitRequest(
                    lambda: (label, begun.staged), pending.started, watch, buffer=begun.arena
                )
                committed, result = job.route.commit(request, pending)
            pending.tip = committed.id
            self._trust.remember(begun.candidates, committed.ids)
        except BaseException as error:
            if begun.candidates:
                self._trust.forget()
            error.add_note(f"{pending.name}, in the background")
            pending.fail(error)
        else:
            pending.succeed(result)
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
class _Begun:
    """A state copied to `arena`, except for leaves that are copied while training goes on; `staged`
    are the sources that read it. `versions` gives torch's count of writes to the latter."""

    plan: StagingPlan
    leaf_bytes: list[int]
    paths: list[str]
    candidates: list[Candidate]
    versions: Callable[[], Mapping[int, int]]
    arena: Buffer
    arrivals: CopyProgress
    staged: Flats


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
