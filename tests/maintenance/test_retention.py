"""Retention: the commits that each policy keeps, with the reasons."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import CommitId, SessionId, StoreId
from ckptstore.errors import InvalidInput
from ckptstore.log.admission import check
from ckptstore.log.entries import Forget
from ckptstore.log.state import CommitRow, State, genesis
from ckptstore.maintenance.retention import (
    KeepBest,
    KeepEverySteps,
    KeepLast,
    KeepPeriods,
    KeepSince,
    KeepWithin,
    Policy,
    plan_policies,
)

HOUR_NS = 3600 * 1_000_000_000
MIDNIGHT_NS = 1_700_006_400 * 1_000_000_000
"""2023-11-15 00:00 UTC, a Wednesday."""


def commit_id(n: int) -> CommitId:
    return CommitId(f"{n:064x}")


def state_of(*rows: CommitRow) -> State:
    """A state with these commits, numbered from 1."""
    state = genesis(StoreId("0" * 32), 1)
    commits, runs = state.commits, state.runs
    for n, row in enumerate(rows, 1):
        commits = commits.insert(commit_id(n), row._replace(n=n, place=n))
        if not row.soft:
            runs = runs.insert(row.run, (*runs.get(row.run, ()), commit_id(n))[-2:])
    return replace(state, n=len(rows), commits=commits, runs=runs)


def row(
    step: int | None = None,
    *,
    run: str = "main",
    hours: float = 0,
    metrics: dict[str, float] | None = None,
    soft: int = 0,
) -> CommitRow:
    time_ns = MIDNIGHT_NS + int(hours * HOUR_NS)
    named = tuple((metrics or {}).items())
    session = SessionId("0" * 24)
    return CommitRow(0, 0, session, "", run, step, time_ns, (), named, (), soft, 0)


def kept_beyond_pins(state: State, policies: Sequence[Policy], run: str | None = None) -> set[int]:
    """The numbers of the commits that a policy keeps; what is only pinned is left out."""
    plan = plan_policies(state, policies, run)
    return {
        d.row.n
        for d in plan.decisions
        if any("newest of its run" not in reason for reason in d.reasons)
    }


LOSSES = state_of(
    *(
        row(step, hours=step, metrics={"loss": loss})
        for step, loss in enumerate([5.0, 1.0, float("nan"), 1.0, 9.0, 3.0])
    )
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLast(1), {6}),
        (KeepLast(100), {1, 2, 3, 4, 5, 6}),
        (KeepEverySteps(2), {1, 3, 5}),
        (KeepBest("loss"), {4}),
        (KeepBest("loss", n=3), {2, 4, 6}),
        (KeepBest("loss", maximize=True), {5}),
        (KeepBest("accuracy"), set()),
        (KeepWithin(2 * 3600), {4, 5, 6}),
        (KeepSince(commit_id(5)), {5, 6}),
        (KeepSince(commit_id(9)), {1, 2, 3, 4, 5, 6}),
        (KeepPeriods("hourly", 2), {5, 6}),
        (KeepPeriods("daily", 2), {6}),
    ],
    ids=str,
)
def test_a_policy_keeps_what_it_says(policy: Policy, kept: set[int]) -> None:
    assert kept_beyond_pins(LOSSES, [policy]) == kept


def test_one_commit_under_a_clock_that_was_ahead_makes_no_other_old() -> None:
    state = state_of(
        row(hours=1),
        row(hours=24 * 4000),
        row(hours=-24 * 4000),
        row(hours=2),
        row(hours=3),
        row(hours=4),
    )
    assert kept_beyond_pins(state, [KeepWithin(3 * 3600)]) == {1, 2, 4, 5, 6}


def test_periods_begin_in_utc_and_skip_those_without_commits() -> None:
    state = state_of(row(hours=-49), row(hours=-1), row(hours=1), row(hours=2), row(hours=24 * 40))
    assert kept_beyond_pins(state, [KeepPeriods("daily", 3)]) == {2, 4, 5}
    assert kept_beyond_pins(state, [KeepPeriods("weekly", 2)]) == {4, 5}
    assert kept_beyond_pins(state, [KeepPeriods("monthly", 2)]) == {4, 5}


def test_of_two_commits_of_one_step_the_newer_is_kept() -> None:
    assert kept_beyond_pins(state_of(row(10), row(10), row(11)), [KeepEverySteps(10)]) == {2}


def test_policies_are_ored_and_every_reason_is_given() -> None:
    plan = plan_policies(LOSSES, [KeepLast(1), KeepBest("loss", n=2)])
    reasons = {d.row.n: d.reasons for d in plan.decisions}
    assert reasons[6] == ("one of the 2 newest of its run", "last 1 of 1")
    assert reasons[4] == ("best 1 of 2 by loss (1)",)
    assert reasons[2] == ("best 2 of 2 by loss (1)",)
    assert {d.row.n for d in plan.forgotten} == {1, 3}
    assert plan.reason == "keep last 1, best 2 by loss"


def test_each_run_is_looked_at_by_itself() -> None:
    state = state_of(
        row(1, run="a"),
        row(2, run="b"),
        row(3, run="a"),
        row(4, run="b"),
        row(5, run="a"),
        row(6, run="b"),
    )
    assert {d.row.n for d in plan_policies(state, [KeepLast(1)]).forgotten} == {1, 2}
    assert {d.row.n for d in plan_policies(state, [KeepLast(1)], "a").forgotten} == {1}


def test_tags_and_the_newest_two_are_kept_whatever_the_policies() -> None:
    state = replace(LOSSES, tags=LOSSES.tags.insert("release", commit_id(3)))
    plan = plan_policies(state, [KeepLast(1)])
    assert {d.row.n: d.reasons[0] for d in plan.kept} == {
        3: "tag release",
        5: "one of the 2 newest of its run",
        6: "one of the 2 newest of its run",
    }


def test_forgotten_commits_are_neither_kept_nor_forgotten_again() -> None:
    state = state_of(row(1, soft=9), row(2), row(3), row(4))
    assert {d.row.n for d in plan_policies(state, [KeepLast(1)]).decisions} == {2, 3, 4}


def test_a_policy_that_keeps_fewer_than_it_says_is_noted_where_something_is_forgotten() -> None:
    rows = [row(step, metrics={"loss": 1.0} if step < 2 else {}) for step in range(6)]
    few = plan_policies(state_of(*rows), [KeepBest("loss", n=3), KeepEverySteps(100)])
    assert few.notes == (
        "the policy 'best 3 by loss' keeps 2 commits of run 'main', which has no more such commits",
    )
    assert few.notes[0] in str(few)
    none = plan_policies(state_of(*rows), [KeepEverySteps(7), KeepBest("accuracy")])
    assert [note.partition(" of run")[0] for note in none.notes] == [
        "the policy 'best 1 by accuracy' keeps no commit",
    ]
    everything = plan_policies(state_of(*rows), [KeepLast(9), KeepBest("loss", n=3)])
    assert (everything.forgotten, everything.notes) == ((), ())


def test_no_policy_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no policy"):
        plan_policies(LOSSES, [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepEverySteps(0),
        lambda: KeepBest(""),
        lambda: KeepWithin(0),
        lambda: KeepPeriods("daily", -1),
        lambda: KeepPeriods("hour", 1),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_would_keep_nothing_is_refused(make: type) -> None:
    with pytest.raises(InvalidInput):
        make()


commits = st.builds(
    row,
    st.none() | st.integers(0, 20),
    run=st.sampled_from("ab"),
    hours=st.floats(0, 1000),
    metrics=st.dictionaries(
        st.sampled_from(["loss", "acc"]), st.floats(allow_infinity=False), max_size=2
    ),
    soft=st.sampled_from([0, 0, 0, 1]),
)
policies = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEverySteps, st.integers(1, 5)),
    st.builds(
        KeepBest,
        st.sampled_from(["loss", "acc"]),
        maximize=st.booleans(),
        n=st.integers(1, 3),
    ),
    st.builds(KeepWithin, st.integers(1, 1_000_000)),
    st.builds(KeepSince, st.builds(commit_id, st.integers(1, 13))),
    st.builds(
        KeepPeriods, st.sampled_from(["hourly", "daily", "weekly", "monthly"]), st.integers(1, 3)
    ),
)


@given(
    st.lists(commits, max_size=12),
    st.lists(policies, min_size=1, max_size=3),
    st.lists(st.integers(1, 12), max_size=2),
)
def test_what_a_plan_forgets_the_log_admits(
    rows: list[CommitRow], chosen: list[Policy], tagged: list[int]
) -> None:
    state = state_of(*rows)
    for n in tagged:
        if n <= len(rows) and not state.commits[commit_id(n)].soft:
            state = replace(state, tags=state.tags.insert(f"t{n}", commit_id(n)))
    plan = plan_policies(state, chosen)
    assert check(state, Forget(tuple(d.commit for d in plan.forgotten), plan.reason)) is None
    more = plan_policies(state, [*chosen, KeepLast(3)])
    assert {d.commit for d in plan.kept} <= {d.commit for d in more.kept}
