"""The way of a commit that its caller does not wait for: admit, flatten, stage; then the usual journey behind the caller's back."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from ckptstore.core.ids import CommitId
from ckptstore.engine.background import Background
from ckptstore.engine.descent import Descent, parents_of
from ckptstore.engine.label import Label
from ckptstore.engine.lazy import LazyCopy
from ckptstore.engine.loan import Loan, PendingWatch
from ckptstore.engine.look_up import LookUp
from ckptstore.engine.pending import Pending
from ckptstore.engine.progress import CommitProgress, Milestone, Watch
from ckptstore.engine.transfer import Threads
from ckptstore.errors import Busy, InvalidInput
from ckptstore.state.arenas import Arena, ArenaPool, default_budget
from ckptstore.state.flat import Flat
from ckptstore.state.flatten import flatten
from ckptstore.state.optimizers import StepHooks, changed_by_steps, optimizers_in, versions
from ckptstore.state.staging import LookedUp, StagingPlan, leaves_of, plan_staging, stage, with_leaves
from ckptstore.state.trust import Candidate, Trust
from ckptstore.text import bytes_text

COPYING_THREADS = 8
"""More do not copy faster: memory is the limit."""

Overlap: TypeAlias = Literal["wait", "skip"]
Staging: TypeAlias = Literal["eager", "lazy"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Wish:
    """How a caller wants an asynchronous commit: `overlap` says what to do while others are in flight or staging memory is taken."""

    overlap: Overlap = "wait"
    staging: Staging = "eager"
    trust_version: bool = False
    dedup_first: bool = False
    allow_pickle: bool = False
    on_progress: Callable[[CommitProgress], object] | None = None

    def __post_init__(self) -> None:
        if self.overlap not in ("wait", "skip"):
            raise InvalidInput(f"overlap is {self.overlap!r}; wanted 'wait' or 'skip'")
        if self.staging not in ("eager", "lazy"):
            raise InvalidInput(f"staging is {self.staging!r}; wanted 'eager' or 'lazy'")
        if self.dedup_first and self.staging == "lazy":
            raise InvalidInput("dedup_first reads the whole state within the call, which staging='lazy' is there to avoid; choose one")


class AsyncCommits(Generic[S]):
    """The asynchronous commits of one store object.

    `commit` makes a commit of a staged state; it is called by one thread at a time.
    """

    def __init__(
        self,
        commit: Callable[[Mapping[str, Flat], Arena, Label, Pending[S], Watch], "Made[S]"],
        descent: Descent,
        look_up: Callable[[], LookUp],
        *,
        max_in_flight: int,
        staging_bytes: int | None,
        shared: bool,
        place: str,
    ) -> None:
        self._shared = shared
        self._commit, self._descent, self._look_up, self._staging_bytes = commit, descent, look_up, staging_bytes
        self._background = Background(max_in_flight, place)
        self._copiers = Threads(min(len(os.sched_getaffinity(0)), COPYING_THREADS))
        self._stagers = Threads(1)
        self._calls = threading.Lock()
        self._trust = Trust()
        self._hooks = StepHooks(self.hold)
        self._lazy: list[LazyCopy] = []

    @cached_property
    def pool(self) -> ArenaPool:
        """Staging memory, made when it is first needed, when it is known how much is available."""
        return ArenaPool(self._staging_bytes or default_budget(), shared=self._shared)

    def start(self, app_state: Mapping[str, Any], label: Label, wish: Wish) -> Pending[S]:
        """Stage `app_state` and let its commit go on in the background."""
        with self._calls, ExitStack() as taken:
            pending: Pending[S] = Pending(label.step, wish.on_progress)
            if not self._background.admit(wait=wish.overlap == "wait"):
                return _skipped(pending, "another commit is in flight")
            state = self._plan(app_state, wish, taken)
            pending.state_bytes = sum(source.nbytes for source in leaves_of(state.flats))
            if self._shared and state.plan.borrowed:
                raise InvalidInput(
                    f"a state of {bytes_text(pending.state_bytes)} does not fit into {bytes_text(self.pool.budget_bytes)} of staging "
                    "memory, and another process sees no more of it: open the store with more staging_bytes, or with executor='thread'"
                )
            arena = self.pool.take(state.plan.nbytes, wait=wish.overlap == "wait")
            if arena is None:
                return _skipped(pending, f"{bytes_text(state.plan.nbytes)} of staging memory are not free")
            taken.callback(self.pool.give, arena)
            job = self._stage(pending, state, arena, label, taken)
            self._background.start(pending, lambda: self._finish(job))
            job.loan.wait()
            pending.reached(Milestone.HELD)
        if state.plan.borrowed:
            pending.wait_staged()
        return pending

    def hold(self) -> None:
        """Return when everything that was handed over has been copied: the state is about to be written to."""
        for lazy in tuple(self._lazy):
            lazy.hold()

    def settle(self) -> None:
        """Wait until nothing is in flight, and raise what failed without anybody having seen it."""
        if failed := self.drain():
            raise failed

    def drain(self) -> BaseException | None:
        """Wait until nothing is in flight; gives a failure that nobody has seen."""
        return self._background.drain()

    def close(self) -> None:
        """Let go of threads; nothing may be in flight."""
        self._hooks.remove()
        self._copiers.close()
        self._stagers.close()

    def _plan(self, app_state: Mapping[str, Any], wish: Wish, taken: ExitStack) -> "_State":
        flats = flatten(app_state, allow_pickle=wish.allow_pickle)
        sources = leaves_of(flats)
        paths = [path for flat in flats.values() for path in flat.schema.paths]
        candidates: list[Candidate] = []
        if wish.trust_version:
            candidates = self._trust.candidates(app_state, sources, paths)
            for n, known in self._trust.known(candidates).items():
                sources[n] = known
        lazy: frozenset[int] = frozenset()
        if wish.staging == "lazy":
            optimizers = optimizers_in(app_state)
            self._hooks.install(optimizers)
            lazy = changed_by_steps(optimizers, sources)
        flats = with_leaves(flats, sources)
        looked_up: Mapping[int, LookedUp] = {}
        if wish.dedup_first:
            look_up = self._look_up()
            taken.callback(look_up.open_session().end)
            looked_up = look_up.find(flats, self._copiers)
        plan = plan_staging(sources, self.pool.budget_bytes, lazy, looked_up)
        return _State(flats, plan, lazy & plan.offsets.keys(), looked_up, candidates, paths)

    def _stage(self, pending: Pending[S], state: "_State", arena: Arena, label: Label, taken: ExitStack) -> "_Job[S]":
        plan, sources = state.plan, leaves_of(state.flats)
        loan = Loan(plan, [source.nbytes for source in sources])
        staged = stage(plan, state.flats, arena, self._copiers.spread, state.looked_up)
        lazy = None
        if plan.later:
            lazy = LazyCopy(pending, plan.later, arena, lambda: versions(sources, state.lazy), state.paths.__getitem__)
            pending.help_staging = lazy.hold
            self._lazy.append(lazy)
            self._stagers.submit(lazy.work)
        elif not plan.borrowed:
            pending.reached(Milestone.STAGED)
        base = self._descent.then(pending)
        return _Job(pending, staged, arena, taken.pop_all(), base, label, loan, lazy, state.candidates)

    def _finish(self, job: "_Job[S]") -> None:
        """The rest of a commit, in the background. Raises nothing."""
        pending, parents = job.pending, parents_of(job.base)
        pending.tip = parents[0] if parents else None
        failed: BaseException | None = None
        try:
            self._await_copy(job)
            made = self._commit(job.staged, job.arena, replace(job.label, parents=parents), pending, PendingWatch(pending, job.loan))
            pending.tip = made.id
            self._trust.remember(job.candidates, made.ids)
        except BaseException as error:
            failed = error
            if job.candidates:
                self._trust.forget()
        finally:
            job.taken.close()
        if failed:
            failed.add_note(f"{pending.name}, in the background")
            pending.fail(failed)
        else:
            pending.succeed(made.result)
        job.loan.settle()

    def _await_copy(self, job: "_Job[S]") -> None:
        if job.lazy:
            try:
                job.lazy.wait()
            finally:
                self._lazy.remove(job.lazy)
                job.pending.help_staging = _nothing_left


@dataclass(frozen=True, slots=True)
class _State:
    """A flattened state and how it will be copied: `lazy` are the leaves that are copied while training goes on."""

    flats: Mapping[str, Flat]
    plan: StagingPlan
    lazy: frozenset[int]
    looked_up: Mapping[int, LookedUp]
    candidates: list[Candidate]
    paths: list[str]


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    """A commit that has been handed over. `taken` is closed when it has ended: staging memory is given back, and sessions end."""

    pending: Pending[S]
    staged: Mapping[str, Flat]
    arena: Arena
    taken: ExitStack
    base: CommitId | Pending[Any] | None
    label: Label
    loan: Loan
    lazy: LazyCopy | None
    candidates: list[Candidate]


class Made(NamedTuple, Generic[S]):
    """A commit that exists: its id, the ids of its chunks by leaf, and what a caller gets for it."""

    id: CommitId
    ids: Mapping[int, bytes]
    result: S


def _nothing_left() -> None:
    """What is left to copy of a state that was copied."""


def _skipped(pending: Pending[S], why: str) -> Pending[S]:
    pending.fail(Busy(f"{pending.name} was skipped, as overlap='skip' says: {why}; nothing was changed"))
    return pending
