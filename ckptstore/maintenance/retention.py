"""Which commits stay: retention policies, forgetting, undeleting, and tags.

One satisfied policy keeps a commit, with the reason. Deciding is pure; a decision becomes one log
entry, and nothing is deleted. A forgotten commit is no longer a root for `gc`. Until a gc has
purged it, `undelete` restores it completely. A tagged commit cannot be forgotten.

Policies look at each run separately and never at a clock. "Within 7 days" counts back from the
run's newest commit, and days begin at midnight UTC. So a plan is the same at any time and place,
and a paused run loses nothing.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId, check_tag
from ckptstore.core.model import CommitInfo
from ckptstore.core.text import BOLD, Column, Table, count_text, near
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.log.admission import Code, best_commits, check
from ckptstore.log.entries import Forget, Tag, Undelete
from ckptstore.log.log import Refused
from ckptstore.log.state import NEWEST_KEPT, CommitRow, Resolved, State
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader
from ckptstore.storage.reserve import room

logger = logging.getLogger("ckptstore")

ATTEMPTS = 5
_CHANGED_MEANWHILE = frozenset(
    {Code.TAGGED, Code.NEWEST, Code.BEST, Code.FORGOTTEN, Code.NO_SUCH_COMMIT}
)

Period: TypeAlias = Literal["hourly", "daily", "weekly", "monthly"]

_FORMATS: Mapping[Period, str] = {
    "hourly": "%Y-%m-%d %H:00",
    "daily": "%Y-%m-%d",
    "weekly": "%G-W%V",
    "monthly": "%Y-%m",
}
_NS = 1_000_000_000


class Candidate(NamedTuple):
    """A candidate for forgetting."""

    commit: CommitId
    row: CommitRow


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `n` commits of each run."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("keep-last", self.n)

    def __str__(self) -> str:
        return f"last {self.n}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        for i, candidate in enumerate(newest_first[: self.n], 1):
            yield candidate.commit, f"last {i} of {self.n}"


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """The newest commit of each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_one("keep-every-steps", self.steps)

    def __str__(self) -> str:
        return f"every {self.steps} steps"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        seen = set()
        for commit, row in newest_first:
            if row.step is not None and row.step % self.steps == 0 and row.step not in seen:
                seen.add(row.step)
                yield commit, f"every {self.steps} steps"


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The `n` commits of each run with the smallest value of `metric`, or the largest; the
    newest among equals."""

    metric: str
    maximize: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        _at_least_one("keep-best", self.n)
        if not self.metric:
            raise InvalidInput(
                "keep-best names no metric; wanted one such as val_loss, or accuracy:max"
            )

    def __str__(self) -> str:
        return f"best {self.n} by {self.metric}{':max' if self.maximize else ''}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        sign = -1 if self.maximize else 1
        values = [
            (sign * value, -row.n, commit)
            for commit, row in newest_first
            for name, value in row.metrics
            if name == self.metric and not math.isnan(value)
        ]
        for i, (value, _, commit) in enumerate(sorted(values)[: self.n], 1):
            yield commit, f"best {i} of {self.n} by {self.metric} ({sign * value:g})"


@dataclass(frozen=True, slots=True)
class KeepWithin:
    """The commits of at most `seconds` before the newest of their run, by the committers' clocks.

    The newest is the last one committed, whatever its clock said: one fast clock would age all
    other commits.
    """

    seconds: int

    def __post_init__(self) -> None:
        _at_least_one("keep-within", self.seconds)

    def __str__(self) -> str:
        return f"within {_span(self.seconds)} of the newest"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        for commit, row in newest_first:
            if row.time_ns >= newest_first[0].row.time_ns - self.seconds * _NS:
                yield commit, str(self)


@dataclass(frozen=True, slots=True)
class KeepPeriods:
    """The newest commit of each of the last `n` hours, days, weeks or months that have commits."""

    period: Period
    n: int

    def __post_init__(self) -> None:
        _at_least_one(f"keep-{self.period}", self.n)

    def __str__(self) -> str:
        return f"{self.n} {self.period}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        newest: dict[str, CommitId] = {}
        for commit, row in sorted(
            newest_first, key=lambda c: (c.row.time_ns, c.row.n), reverse=True
        ):
            newest.setdefault(
                datetime.fromtimestamp(row.time_ns // _NS, UTC).strftime(_FORMATS[self.period]),
                commit,
            )
        for when, commit in sorted(newest.items(), reverse=True)[: self.n]:
            yield commit, f"{self.period} {when}"


Policy: TypeAlias = KeepLast | KeepEverySteps | KeepBest | KeepWithin | KeepPeriods


class Decision(NamedTuple):
    """The decision about one commit: kept for these reasons, or forgotten if there are none."""

    commit: CommitId
    row: CommitRow
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ForgetPlan:
    """The plan of a `forget` at log position `n`; `decisions` are newest first, `reason` goes
    into the log. `notes` name the policies that keep fewer commits than they say."""

    n: int
    decisions: tuple[Decision, ...]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.reasons)

    @property
    def forgotten(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if not decision.reasons)

    @property
    def halved(self) -> dict[str, tuple[int, int]]:
        """The runs that lose more than half of the commits that were decided about: how many of
        how many."""
        total = Counter(decision.row.run for decision in self.decisions)
        lost = Counter(decision.row.run for decision in self.forgotten)
        return {run: (n, total[run]) for run, n in sorted(lost.items()) if 2 * n > total[run]}

    def __repr__(self) -> str:
        return f"<forget: {self.summary}>"

    def __str__(self) -> str:
        return "\n".join((str(self.table()), self.summary, *self.notes))

    def table(self) -> Table:
        """One row per commit, with the reasons to keep it."""
        columns = (
            Column("", style=BOLD),
            Column("commit", "id"),
            Column("step", "step"),
            Column("run"),
            Column("time", "time"),
            Column("because", fit="wrap"),
        )
        rows = [
            ("keep" if why else "forget", commit, row.step, row.run, row.time_ns, why)
            for commit, row, why in self.decisions
        ]
        return Table(columns, rows)

    @property
    def summary(self) -> str:
        """The numbers of commits."""
        return f"{count_text(len(self.forgotten), 'commit')} to forget, {len(self.kept):,} to keep"


def plan_policies(state: State, policies: Sequence[Policy], run: str | None = None) -> ForgetPlan:
    """Decide about all commits of `run`, or of every run. Raises `InvalidInput` without a
    policy: that would forget nearly everything."""
    if not policies:
        raise InvalidInput(
            "forget was given no policy and no commit; say what to keep, such as --keep-last 5, or "
            "which commits to forget"
        )
    runs: dict[str, list[Candidate]] = defaultdict(list)
    for commit, row in state.commits.items():
        if not row.soft and run in (None, row.run):
            runs[row.run].append(Candidate(commit, row))
    reasons: dict[CommitId, list[str]] = defaultdict(list)
    notes: list[str] = []
    for commit, why in _pins(state):
        reasons[commit].append(why)
    for name, candidates in sorted(runs.items()):
        candidates.sort(key=lambda c: c.row.n, reverse=True)
        kept = [tuple(policy.keeps(candidates)) for policy in policies]
        for commit, why in chain.from_iterable(kept):
            reasons[commit].append(why)
        if any(c.commit not in reasons for c in candidates):
            notes += _shortfalls(name, policies, map(len, kept))
    rows = sorted(
        (c for candidates in runs.values() for c in candidates), key=lambda c: c.row.n, reverse=True
    )
    decisions = tuple(Decision(commit, row, tuple(reasons.get(commit, ()))) for commit, row in rows)
    reason = "keep " + ", ".join(map(str, policies))
    return ForgetPlan(state.n, decisions, reason, tuple(notes))


def _shortfalls(run: str, policies: Sequence[Policy], kept: Iterable[int]) -> Iterator[str]:
    """The policies that keep fewer commits of `run` than they say."""
    for policy, count in zip(policies, kept, strict=True):
        if count < (policy.n if isinstance(policy, KeepBest) else 1):
            few = count_text(count, "commit") if count else "no commit"
            yield (
                f"the policy '{policy}' keeps {few} of run {run!r}, which has no more such commits"
            )


def check_metrics(state: State, policies: Sequence[Policy]) -> None:
    """Raise `InvalidInput` for a policy about a metric that no commit of the store has."""
    names = {name for row in state.commits.values() for name, _ in row.metrics}
    for policy in policies:
        if isinstance(policy, KeepBest) and policy.metric not in names:
            there = f"there are {', '.join(sorted(names)[:10])}" if names else "none has metrics"
            raise InvalidInput(
                f"no commit has the metric {policy.metric!r}"
                f"{near(policy.metric, names) or f'; {there}'}; nothing was forgotten"
            )


def plan_commits(state: State, commits: Iterable[CommitId], reason: str) -> ForgetPlan:
    """Forget exactly these commits; `log.admission.check` decides whether that is allowed."""
    rows = sorted({(state.commits[c].n, c) for c in commits}, reverse=True)
    return ForgetPlan(state.n, tuple(Decision(c, state.commits[c], ()) for _, c in rows), reason)


def _pins(state: State) -> Iterator[tuple[CommitId, str]]:
    """The commits that `log.admission.check` refuses to forget."""
    for name, commit in sorted(state.tags.items()):
        yield commit, f"tag {name}"
    for commits in state.runs.values():
        for commit in commits:
            yield commit, f"one of the {NEWEST_KEPT} newest of its run"
    for commit in sorted(best_commits(state)):
        yield commit, "best by the store's settings"


def _at_least_one(name: str, n: int) -> None:
    if n < 1:
        raise InvalidInput(f"{name} is {n}; wanted at least 1")


def _span(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def forget_by_policy(
    handle: StoreHandle,
    policies: Sequence[Policy],
    *,
    run: str | None = None,
    dry_run: bool = False,
) -> ForgetPlan:
    """Forget what no policy keeps, in `run` or in all runs. Returns the executed plan, or with
    `dry_run` the plan alone.

    Raises `InvalidInput` without any policy, and for a metric that no commit of the store has,
    unless there is nothing to forget. Logs the notes of an executed plan.
    """
    for _ in range(ATTEMPTS):
        state = handle.log.replay()
        plan = plan_policies(state, policies, run)
        if plan.forgotten:
            check_metrics(state, policies)
        if dry_run or not plan.forgotten:
            return plan
        try:
            _append(handle, plan)
        except Refused as error:
            if error.refusal.code not in _CHANGED_MEANWHILE:
                raise
            last = error
            continue
        for note in plan.notes:
            logger.warning("%s", note)
        return plan
    raise Conflict(
        f"others changed the store {ATTEMPTS} times while forget looked; repeat it"
    ) from last


def forget_commits(
    handle: StoreHandle, commits: Iterable[CommitId], *, reason: str = "", dry_run: bool = False
) -> ForgetPlan:
    """Forget exactly these commits. Raises `Conflict` if one of them is pinned or forgotten
    already, `NotFound` if it is unknown."""
    state = handle.log.replay()
    wanted = tuple(commits)
    if unknown := [c for c in wanted if c not in state.commits]:
        raise _no_such_commit(unknown)
    plan = plan_commits(state, wanted, reason)
    if refusal := check(state, _body(plan)):
        raise Conflict(refusal.why)
    if not dry_run:
        _append(handle, plan)
    return plan


def undelete(handle: StoreHandle, reader: Reader, commits: Sequence[CommitId]) -> None:
    """Make forgotten commits roots again, and their packs live.

    Raises `NotFound` for a commit that a gc has purged, `Conflict` for one that is not forgotten.
    """
    for _ in range(ATTEMPTS):
        state = handle.log.replay()
        if purged := [c for c in commits if c not in state.commits]:
            raise _no_such_commit(purged)
        reused = frozenset().union(
            *(reader.packs_of(reader.document(state.commits[c].session, c)) for c in commits)
        )
        try:
            with room(handle.storage):
                handle.log.append(Undelete(tuple(commits), reused))
        except Refused as error:
            if error.refusal.code is not Code.PACKS_GONE:
                raise Conflict(error.refusal.why) from error
            last = error
            handle.objects.sync(handle.log.state, thorough=True)
            continue
        return
    raise Conflict(
        f"gc kept moving the chunks of these commits ({ATTEMPTS} times); repeat undelete"
    ) from last


def _append(handle: StoreHandle, plan: ForgetPlan) -> None:
    with room(handle.storage):
        handle.log.append(_body(plan))


def _body(plan: ForgetPlan) -> Forget:
    return Forget(tuple(decision.commit for decision in plan.forgotten), plan.reason)


def _no_such_commit(commits: Sequence[CommitId]) -> NotFound:
    few = ", ".join(commit[:12] for commit in commits[:4])
    return NotFound(
        f"no commit {few}: never made here, or deleted by gc; `ckptstore log` lists "
        "the commits of the store"
    )


def set_tag(handle: StoreHandle, reader: Reader, name: str, info: CommitInfo | Resolved) -> None:
    """Set tag `name` to the commit and renew its packs; retries if a gc moved them meanwhile.

    Raises `Conflict` if the commit was forgotten meanwhile.
    """
    handle.check_writable()
    check_tag(name)
    document = reader.document(info.session, info.id)
    for attempt in range(ATTEMPTS):
        try:
            handle.log.append(Tag(name, info.id, reader.packs_of(document)))
            break
        except Refused as error:
            if not error.refusal.again or attempt == ATTEMPTS - 1:
                raise
            handle.objects.sync(handle.log.replay(), thorough=True)
    handle.follow()


def remove_tag(handle: StoreHandle, name: str) -> None:
    """Remove a tag; the commit stays. Raises `NotFound` for an unknown tag."""
    handle.check_writable()
    if name not in {tag.name for tag in handle.queries().tags()}:
        raise NotFound(f"no tag {name!r}; `ckptstore tag` lists them")
    handle.log.append(Tag(name, None, frozenset()))
    handle.follow()
