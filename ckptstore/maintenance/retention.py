"""Retention: which commits stay, by which policies, and for which reasons; pure.

One satisfied policy keeps a commit. A plan becomes one log entry (`maintenance.forget`), and
nothing is deleted: a forgotten commit is no longer a root for `gc`.

Policies look at each run separately and never at a clock. "Within 7 days" counts back from the
run's newest commit, and days begin at midnight UTC. So a plan is the same at any time and place,
and a paused run loses nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId
from ckptstore.core.numbers import check_number
from ckptstore.core.public_calls import checked_fields
from ckptstore.core.text import BOLD, Column, Table, count_text, near, selector
from ckptstore.errors import InvalidInput
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


class _Keeps:
    """What all policies can do."""

    __slots__ = ()

    def thin(self, *globs: str) -> "Thin":
        """Of the commits that this policy does not keep, drop the leaves that match `globs`."""
        return Thin(self, globs)  # type: ignore[arg-type]  # every subclass is one


@dataclass(frozen=True, slots=True)
class KeepLast(_Keeps):
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
class KeepEverySteps(_Keeps):
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


@checked_fields
@dataclass(frozen=True, slots=True)
class KeepBest(_Keeps):
    """The `n` commits of each run with the smallest value of `metric`, or the largest; the
    newest among equals."""

    metric: str
    maximize: bool = field(default=False, kw_only=True)
    n: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _at_least_one("keep-best", self.n)
        if not (isinstance(self.metric, str) and self.metric):
            raise InvalidInput(
                "keep-best names no metric; wanted one such as val_loss, or accuracy:max"
            )

    def __str__(self) -> str:
        return f"best {self.n} by {self.metric}{':max' if self.maximize else ''}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        sign = -1 if self.maximize else 1
        values = [
            (sign * value, -row.place, commit)
            for commit, row in newest_first
            for name, value in row.metrics
            if name == self.metric and not math.isnan(value)
        ]
        for i, (value, _, commit) in enumerate(sorted(values)[: self.n], 1):
            yield commit, f"best {i} of {self.n} by {self.metric} ({sign * value:g})"


@dataclass(frozen=True, slots=True)
class KeepWithin(_Keeps):
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
class KeepPeriods(_Keeps):
    """The newest commit of each of the last `n` hours, days, weeks or months that have commits."""

    period: Period
    n: int

    def __post_init__(self) -> None:
        if self.period not in _FORMATS:
            raise InvalidInput(f"period is {self.period!r}; wanted one of {', '.join(_FORMATS)}")
        _at_least_one(f"keep-{self.period}", self.n)

    def __str__(self) -> str:
        return f"{self.n} {self.period}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        newest: dict[str, CommitId] = {}
        for commit, row in sorted(
            newest_first, key=lambda c: (c.row.time_ns, c.row.place), reverse=True
        ):
            newest.setdefault(
                datetime.fromtimestamp(row.time_ns // _NS, UTC).strftime(_FORMATS[self.period]),
                commit,
            )
        for when, commit in sorted(newest.items(), reverse=True)[: self.n]:
            yield commit, f"{self.period} {when}"


@dataclass(frozen=True, slots=True)
class KeepSince(_Keeps):
    """`commit`, and all of its run that were committed after it; all commits, if it is not there.

    So a policy can be applied behind a training that goes on: what came since is not yet its own.
    """

    commit: CommitId

    def __str__(self) -> str:
        return f"since {self.commit[:12]}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        for commit, _ in newest_first:
            yield commit, str(self)
            if commit == self.commit:
                return


Keep: TypeAlias = KeepLast | KeepEverySteps | KeepBest | KeepWithin | KeepPeriods | KeepSince


@dataclass(frozen=True, slots=True)
class Thin:
    """Commits that `whole` does not keep lose the leaves that match `globs`. It forgets nothing.

    Where several policies thin by one glob, a commit that one of them keeps stays whole.
    """

    whole: Keep
    globs: tuple[str, ...]

    def __post_init__(self) -> None:
        selector(self.globs)

    def __str__(self) -> str:
        return f"{self.whole} with {', '.join(self.globs)}"

    def keeps(self, newest_first: Sequence[Candidate]) -> Iterator[tuple[CommitId, str]]:
        return self.whole.keeps(newest_first)


Policy: TypeAlias = Keep | Thin

Matching: TypeAlias = Callable[[CommitId, Sequence[str]], tuple[str, ...]]
"""Those of some globs that match a leaf which a commit still has."""


class Decision(NamedTuple):
    """The decision about one commit: kept for these reasons, or forgotten if there are none. One
    that is kept loses the leaves that match `thin`."""

    commit: CommitId
    row: CommitRow
    reasons: tuple[str, ...]
    thin: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """Keep, thin or forget."""
        return ("thin" if self.thin else "keep") if self.reasons else "forget"


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
    def thinned(self) -> tuple[Decision, ...]:
        """The commits that lose leaves, and stay."""
        return tuple(decision for decision in self.decisions if decision.thin)

    @property
    def question(self) -> str:
        """What a person is asked before it is carried out."""
        forget = f"forget {count_text(len(self.forgotten), 'commit')}"
        thin = f"thin {count_text(len(self.thinned), 'commit')}"
        does = (forget, self.forgotten), (thin, self.thinned)
        return f"{' and '.join(text for text, any_of_it in does if any_of_it)}?"

    @property
    def done(self) -> str:
        """What a person is told after it was carried out."""
        thinned = f", thinned {len(self.thinned):,}" if self.thinned else ""
        return f"forgot {count_text(len(self.forgotten), 'commit')}{thinned}"

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
            Column("run", fit="wrap", spare=True, least=16),
            Column("time", "time", spare=True),
            Column("because", fit="wrap", least=16),
        )
        rows = [
            (each.word, each.commit, each.row.step, each.row.run, each.row.time_ns, each.reasons)
            for each in self.decisions
        ]
        return Table(columns, rows)

    @property
    def summary(self) -> str:
        """The numbers of commits."""
        thin = f", {len(self.thinned):,} to thin" if self.thinned else ""
        whole = len(self.kept) - len(self.thinned)
        return f"{count_text(len(self.forgotten), 'commit')} to forget{thin}, {whole:,} to keep"


NOTHING_PINNED: Mapping[CommitId, str] = MappingProxyType({})


def plan_policies(
    state: State,
    policies: Sequence[Policy],
    run: str | None = None,
    matching: Matching = lambda commit, globs: tuple(globs),
    pinned: Mapping[CommitId, str] = NOTHING_PINNED,
) -> ForgetPlan:
    """Decide about all commits of `run`, or of every run; `matching` says what can be thinned.
    Commits in `pinned` stay whole, for the reason there.
    Raises `InvalidInput` without a policy: that would forget nearly everything."""
    if not policies:
        raise InvalidInput(
            "forget was given no policy and no commit; say what to keep, such as --keep-last 5, "
            "which commits to forget, or --all for a whole run"
        )
    runs: dict[str, list[Candidate]] = defaultdict(list)
    for commit, row in state.commits.items():
        if not row.soft and run in (None, row.run):
            runs[row.run].append(Candidate(commit, row))
    reasons: dict[CommitId, list[str]] = defaultdict(list)
    notes: list[str] = []
    for commit, why in (*_pins(state), *pinned.items()):
        reasons[commit].append(why)
    stay = frozenset(reasons)
    globs = dict.fromkeys(glob for policy in policies for glob in _globs(policy))
    whole: dict[str, set[CommitId]] = {glob: set(stay) for glob in globs}
    forgets = any(not isinstance(policy, Thin) for policy in policies)
    for name, candidates in sorted(runs.items()):
        candidates.sort(key=lambda c: c.row.place, reverse=True)
        kept = [(policy, tuple(policy.keeps(candidates))) for policy in policies]
        for policy, found in kept:
            for commit, why in found:
                reasons[commit].append(why)
            for glob in _globs(policy):
                whole[glob].update(commit for commit, _ in found)
        if any(c.commit not in reasons for c in candidates):
            notes += _shortfalls(name, ((policy, len(found)) for policy, found in kept))
    rows = sorted(
        (c for candidates in runs.values() for c in candidates),
        key=lambda c: c.row.place,
        reverse=True,
    )
    decisions = []
    for commit, row in rows:
        lost = tuple(glob for glob in globs if commit not in whole[glob])
        if lost and (commit in reasons or not forgets):
            reasons[commit].append(f"without {', '.join(lost)}")
            decisions.append(Decision(commit, row, tuple(reasons[commit]), matching(commit, lost)))
        else:
            decisions.append(Decision(commit, row, tuple(reasons.get(commit, ()))))
    reason = "keep " + ", ".join(map(str, policies))
    return ForgetPlan(state.n, tuple(decisions), reason, tuple(notes))


def _globs(policy: Policy) -> tuple[str, ...]:
    return policy.globs if isinstance(policy, Thin) else ()


def _shortfalls(run: str, kept: Iterable[tuple[Policy, int]]) -> Iterator[str]:
    """The policies that keep fewer commits of `run` than they say."""
    for policy, count in kept:
        keep = policy.whole if isinstance(policy, Thin) else policy
        if count < (keep.n if isinstance(keep, KeepBest) else 1):
            few = count_text(count, "commit") if count else "no commit"
            yield (
                f"the policy '{policy}' keeps {few} of run {run!r}, which has no more such commits"
            )


def check_metrics(state: State, policies: Sequence[Policy], run: str | None = None) -> None:
    """Raise `InvalidInput` for a policy about a metric that no commit of `run`, or of all, has as a
    number: it would keep none."""
    rows = [row for row in state.commits.values() if not row.soft and run in (None, row.run)]
    values = [metric for row in rows for metric in row.metrics]
    names = {name for name, value in values if not math.isnan(value)}
    no_numbers = {name for name, _ in values} - names
    for policy in (each.whole if isinstance(each, Thin) else each for each in policies):
        if not isinstance(policy, KeepBest) or policy.metric in names:
            continue
        if policy.metric in no_numbers:
            raise InvalidInput(
                f"the metric {policy.metric!r} is NaN in every commit that has it, so none is the "
                "best; nothing was forgotten"
            )
        there = f"there are {', '.join(sorted(names)[:10])}" if names else "none has metrics"
        raise InvalidInput(
            f"no commit has the metric {policy.metric!r}"
            f"{near(policy.metric, names) or f'; {there}'}; nothing was forgotten"
        )


def plan_commits(state: State, commits: Iterable[CommitId], reason: str) -> ForgetPlan:
    """Forget exactly these commits. `log.admission.check` decides whether that is allowed."""
    rows = sorted({(state.commits[c].age, c) for c in commits}, reverse=True)
    return ForgetPlan(state.n, tuple(Decision(c, state.commits[c], ()) for _, c in rows), reason)


def _pins(state: State) -> Iterator[tuple[CommitId, str]]:
    """The commits that no policy forgets: those with a tag, and the newest of each run."""
    for name, commit in sorted(state.tags.items()):
        yield commit, f"tag {name}"
    for commits in state.runs.values():
        for commit in commits:
            yield commit, f"one of the {NEWEST_KEPT} newest of its run"


def _at_least_one(name: str, n: Any) -> None:
    check_number(name, n, "at least 1", least=1, whole=True)


def _span(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
