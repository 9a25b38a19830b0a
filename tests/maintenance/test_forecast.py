"""What a forecast says is what a forget and a gc free."""

import json
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.maintenance.retention import KeepEverySteps, KeepLast, Policy
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.test_thin import GLOB, make, state


def needed_bytes(store: Store) -> int:
    found = store.usage()
    return found.stored_bytes - found.unreferenced_bytes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two runs, of which the second has the states of the first, and others."""
    make(tmp_path)
    with ckptstore.open(tmp_path, run="other") as store:
        for step in range(4, 9):
            store.commit(state(step), step=step)
    return tmp_path


@pytest.mark.parametrize(
    ("policies", "slack"),
    [
        ([KeepLast(2)], 0),
        ([KeepLast(3), KeepEverySteps(4)], 0),
        ([KeepLast(2).thin(GLOB)], 10_000),
        ([KeepLast(3), KeepLast(2).thin("optimizer/state/*")], 10_000),
    ],
    ids=str,
)
def test_a_forecast_is_what_forgetting_frees(
    place: Path, policies: list[Policy], slack: int
) -> None:
    with ckptstore.open(place) as store:
        before = needed_bytes(store)
        found = store.forecast(policies, all_runs=True)
        plan = store.forget(policies, all_runs=True)
        freed = before - needed_bytes(store)
        assert found.needed_bytes == before
        assert freed <= found.freed_bytes <= freed + slack
        assert found.freed_bytes > 10_000
        counts = [(r.run, r.kept, r.thinned, r.forgotten) for r in found.runs]
        assert sum(r[2] for r in counts) == len(plan.thinned)
        assert sum(r[3] for r in counts) == len(plan.forgotten)
        assert [r[0] for r in counts] == ["main", "other"]


def test_a_run_frees_alone_what_no_other_run_needs(place: Path) -> None:
    with ckptstore.open(place) as store:
        both = store.forecast(KeepLast(2), all_runs=True)
        alone = store.forecast(KeepLast(2))
        assert both.runs[0].freed_bytes == alone.freed_bytes == alone.runs[0].freed_bytes
        before = needed_bytes(store)
        store.forget(KeepLast(2))
        assert before - needed_bytes(store) == alone.freed_bytes


def test_what_is_thinned_already_frees_nothing_more(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.forget(KeepLast(2).thin(GLOB), all_runs=True)
        assert store.forecast(KeepLast(2).thin(GLOB), all_runs=True).freed_bytes == 0
        with pytest.raises(InvalidInput, match="no policy"):
            store.forecast([])


def test_the_command_says_what_would_be_freed_and_changes_nothing(place: Path) -> None:
    what = ("-s", str(place), "stats", "--what-if", "--keep-last", "2", "--thin", GLOB)
    page, document = call(*what).out, json.loads(call(*what, "--json").out)
    assert [run["thinned"] for run in document["runs"]] == [4, 3]
    assert document["freed_bytes"] > 0
    assert "would free" in page
    with ckptstore.open(place) as store:
        assert not store.forgotten(all_runs=True)
        assert (
            document["freed_bytes"]
            == store.forecast(KeepLast(2).thin(GLOB), all_runs=True).freed_bytes
        )


@pytest.mark.parametrize("words", [("--what-if",), ("--keep-last", "2"), ("--compact",)])
def test_what_if_and_policies_go_together(place: Path, words: tuple[str, ...]) -> None:
    done = call("-s", str(place), "stats", *words)
    assert done.code == 2
    assert "--what-if" in done.err


@pytest.mark.soak
def test_a_thousand_commits_are_forecast_in_a_second(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path) as store:
        for step in range(1000):
            store.commit(state(step), step=step)
        started = time.perf_counter()
        found = store.forecast(KeepLast(5).thin(GLOB))
        took_s = time.perf_counter() - started
    print(f"{took_s:.2f} s")
    assert found.runs[0].thinned == 995
    assert took_s < 5  # 1 s on an idle machine
