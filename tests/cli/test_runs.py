"""Which run is meant: one rule for every command, as docs/cli.md says it, and each output names the
run."""

import math
from pathlib import Path

import pytest
import torch

import ckptstore
from tests.cli.running import Result, call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The runs `a` and `b`, of steps 10 to 40, and no `main`. Run `b` is newer, and its model has a
    NaN from step 30 on."""
    place = tmp_path / "store"
    for run, level in (("a", 1.0), ("b", 2.0)):
        with ckptstore.open(place, run=run) as store:
            for step in (10, 20, 30, 40):
                value = math.nan if run == "b" and step >= 30 else level * step
                store.commit({"w": torch.full((4,), value), "step": step}, step=step)
    return place


def on(place: Path, *words: str) -> Result:
    result = call("-s", str(place), *words)
    assert result.code == 0, result
    return result


def test_bisect_looks_in_the_run_trained_last_unless_told(place: Path) -> None:
    assert "the first bad commit is" in (found := on(place, "bisect", "--good", "10", "--nan").out)
    assert "(step 30) of run b; the last good one" in found
    question = ("--leaf", "w", "--above", "50")
    named = on(place, "bisect", "--good", "10", *question, "--run", "a").out
    assert "(step 30) of run a" in named  # a norm of 60


def test_an_average_does_not_hide_the_run_that_was_trained_last(place: Path) -> None:
    made = on(place, "average", "10", "20", "--step", "20").out
    assert "of run averages, from " in made
    assert "(step 10) of run b" in made
    assert "(step 20) of run b" in made
    again = on(place, "average", "10", "20", "--run", "a").out
    assert "(step 20) of run a" in again
    assert "4 commits of run b" in on(place, "history", "w").out
    assert "2 commits of run averages" in on(place, "history", "w", "--run", "averages").out
    assert "(step 30) of run b" in on(place, "bisect", "--good", "10", "--nan").out
    assert on(place, "plot", "tensor", "w", "--json").document["title"] == "norm of w of run b"
    with ckptstore.open(place, run="a") as store:
        assert {row.run for row in store.history("w")} == {"a"}
        assert {row.run for row in store.history("w", run="b")} == {"b"}


def test_a_store_of_averages_alone_has_a_run_too(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", run="sum") as store:
        for step in (1, 2):
            store.commit({"w": torch.ones(3)}, step=step)
        first, second = (info.id for info in store.log())
    on(tmp_path / "store", "average", first, second, "--into", "sum", "--step", "3")
    assert "3 commits of run sum" in on(tmp_path / "store", "history", "w").out


def test_what_is_not_there_is_said_of_the_run_that_was_looked_at(place: Path) -> None:
    missing = call("-s", str(place), "plot", "tensor", "none", "-o", str(place / "x.svg"))
    assert missing.code == 1
    assert "none of 4 commits of run b has a tensor" in missing.err


@pytest.mark.parametrize(
    "words",
    [
        ("export", "10", "NEW/weights.safetensors", "--select", "w"),
        ("tag", "good", "10"),
        ("forget", "10"),
    ],
)
def test_a_step_of_several_runs_is_the_newest_and_is_told(
    place: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "NEW").mkdir()
    done = on(place, *(word.replace("NEW", str(tmp_path / "NEW")) for word in words))
    assert "step 10 is in 2 runs (a, b); the newest is taken, b@10" in done.err
    assert "b" in done.out.split()


def test_policies_look_at_all_runs_or_at_the_one_that_is_named(place: Path) -> None:
    with ckptstore.open(place, run="a") as store:
        keep = ckptstore.KeepLast(2)
        runs = [
            {each.row.run for each in store.forget(keep, dry_run=True, **options).decisions}
            for options in ({}, {"run": "b"}, {"all_runs": True})
        ]
    assert runs == [{"a"}, {"b"}, {"a", "b"}]
    dry = ("forget", "--keep-last", "2", "-n", "--json")
    for options, wanted in (((), {"a", "b"}), (("--run", "b"), {"b"})):
        commits = on(place, *dry, *options).document["commits"]
        assert {each["run"] for each in commits} == wanted
    mistyped = call("-s", str(place), "forget", "--keep-last", "2", "--run", "c")
    assert mistyped.code == 1
    assert "no run 'c'; runs with commits: b, a" in mistyped.err
