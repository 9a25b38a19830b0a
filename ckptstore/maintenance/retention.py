"""Retention: which commits stay, by which policies, and for which reasons; pure.

One satisfied policy keeps a commit. A plan becomes one log entry (`maintenance.forget`), and
nothing is deleted: a forgotten commit is no longer a root for `gc`.

Policies look at each run separately and never at a clock. "Within 7 days" counts back from the
run's newest commit, and days begin at midnight UTC. So a plan is the same at any time and place,
and a paused run loses nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId
from ckptstore.core.text import BOLD, Column, Table, count_text, near
from ckptstore.errors import InvalidInput
from ckptstore.log.admission import best_commits
from ckptstore.log.state import NEWEST_KEPT, CommitRow, State

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
            Column("run", spare=True),
            Column("time", "time", spare=True),
            Column("because", fit="wrap", least=16),
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
