"""`store.every`: commits when they are due, and once more on a signal."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput
from ckptstore.plugins.schedule.schedule import Rule, best_interval_s
from tests.commit.states import held_commit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


STATE = {"t": torch.zeros(1000)}
YEAR_S = 365 * 24 * 3600


def steps(store: ckptstore.Store) -> list[int | None]:
    with store.committing():
        pass
    return [info.step for info in reversed(store.log())]


def test_a_step_interval_counts_from_step_zero(store: ckptstore.Store) -> None:
    every = store.every(steps=10)
    for step in [*range(7, 32), 58]:
        every(STATE, step=step)
    assert steps(store) == [10, 20, 30, 58]


def test_a_commit_that_is_not_due_returns_none(store: ckptstore.Store) -> None:
    every = store.every(steps=2)
    assert every(STATE, step=1) is None
    pending = every(STATE, step=2, metrics={"loss": 1.0}, tag="good")
    assert pending is not None and pending.wait().tags == ("good",)


@pytest.mark.parametrize(("since_s", "due"), [(9.9, False), (10.0, True), (99.0, True)])
def test_an_interval_in_seconds(since_s: float, due: bool) -> None:
    assert Rule(seconds=10).due(5, 4, since_s, cost_s=1, durable_s=1) is due


def test_auto_measures_first_and_then_keeps_to_the_best_interval(store: ckptstore.Store) -> None:
    every = store.every(
        "auto", mtbf_s=YEAR_S
    )  # an hour's best interval may be over when a busy machine asks
    assert every.interval_s is None
    first = every(STATE, step=1)
    assert first is not None
    first.wait()
    assert every.interval_s is not None and every.interval_s >= (first.timings.durable_s or 0)
    assert every(STATE, step=2) is None


@pytest.mark.parametrize(("since_s", "due"), [(59.0, False), (60.2, True)])
def test_auto_waits_for_the_last_commit_to_be_durable(since_s: float, due: bool) -> None:
    assert Rule(mtbf_s=3600).due(2, 1, since_s, cost_s=0.001, durable_s=60) is due


def test_the_best_interval_is_dalys() -> None:
    assert best_interval_s(1e-9, 3600) == pytest.approx((2 * 1e-9 * 3600) ** 0.5, rel=1e-3)
    assert best_interval_s(5 * 60, 24 * 3600) == pytest.approx(7002.5, rel=1e-3)
    assert best_interval_s(100, 50) == 50
    costs = [best_interval_s(cost, 3600) for cost in (1, 10, 100)]
    assert costs == sorted(costs)


def test_a_signal_commits_once_more_and_stops(store: ckptstore.Store) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with store.every(steps=1000, on_signal=signal.SIGTERM) as every:
        assert every(STATE, step=1) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert not every.stopped
        pending = every(STATE, step=2)
        assert pending is not None and pending.done() and every.stopped
        assert every(STATE, step=1000) is None
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(store) == [2]


@pytest.mark.parametrize("where", ["store", "call"])
def test_the_commit_after_a_signal_waits_where_others_would_be_skipped(
    tmp_path: Path, where: str
) -> None:
    skip = ckptstore.Async(overlap="skip", max_in_flight=1)
    options = {} if where == "store" else {"background": ckptstore.Async(overlap="skip")}
    with (
        ckptstore.open(tmp_path / "store", background=skip if where == "store" else None) as store,
        store.every(steps=1000, on_signal=signal.SIGTERM) as every,
    ):
        first, go_on = held_commit(store, STATE, step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.05, go_on).start()
        every(STATE, step=2, **options)
        assert first.done() and every.stopped
        assert steps(store) == [1, 2]


WRONG: list[dict[str, Any]] = [
    {},
    {"steps": 1, "seconds": 1},
    {"steps": 0},
    {"steps": 1.5},
    {"seconds": -1},
    {"auto": "auto"},
    {"auto": "often"},
]


@pytest.mark.parametrize("wanted", WRONG)
def test_one_rule_is_wanted(store: ckptstore.Store, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        store.every(**wanted)
