"""`parted` finds where two trainings part, `bisect` the commit that brought what is wrong, and
`average` commits a sum."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.analysis import bisect, distance, parting
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.maintenance.retention import KeepLast
from tests.cli import running
from tests.cli.running import call

STEPS = range(10, 101, 10)
NAN_AT, SLIP_AT = 60, 70


def train(place: Path, run: str, *, slip: bool = False, nan: bool = False) -> None:
    """A training of ten commits, of which each has one update: with `slip`, its learning rate is
    wrong from one step on, with `nan`, a weight becomes NaN."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ckptstore.open(place, run=run) as store:
        for step in STEPS:
            if slip and step == SLIP_AT:
                optimizer.param_groups[0]["lr"] = 2e-2
            if nan and step == NAN_AT:
                model[2].weight.data[0, 3] = math.nan
            loss = (model(torch.randn(32, 8)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            store.commit({"model": model, "clock": {"wall": step + slip}}, step=step)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "store"
    train(place, "right")
    train(place, "again")
    train(place, "slip", slip=True)
    train(place, "nan", nan=True)
    return place


def test_two_runs_part_at_the_first_step_whose_leaves_differ(place: Path) -> None:
    with ckptstore.open(place) as store:
        found = parting(store, "right", "slip", select="model/*")
        assert found.equal_steps == (10, 20, 30, 40, 50, 60)
        assert found.a and found.b
        assert (found.a.run, found.a.step, found.b.run, found.b.step) == ("right", 70, "slip", 70)
        assert [change.path for change in found.difference.changes] == [
            "model/0.weight",
            "model/0.bias",
            "model/2.weight",
            "model/2.bias",
        ]
        a, b = store.checkout("right@70"), store.checkout("slip@70")
        far = distance(a, b, "model/0.weight")
        mine, other = (snapshot.read("model/0.weight").double() for snapshot in (a, b))
        assert far
        assert far.largest == float((mine - other).abs().max())
        assert far.relative == pytest.approx(float((mine - other).norm() / mine.norm()))
        assert distance(a, b, "clock/wall") is None


def test_what_may_differ_is_left_out_by_a_glob(place: Path) -> None:
    with ckptstore.open(place) as store:
        whole = parting(store, "right", "slip")
        assert (whole.equal_steps, whole.a and whole.a.step) == ((), 10)
        same = parting(store, "right", "again")
        assert (same.equal_steps, same.a, same.b) == (tuple(STEPS), None, None)


def test_leaves_that_were_thinned_away_are_no_difference(tmp_path: Path) -> None:
    for run, parts_at in (("whole", 99), ("thinned", 4)):
        with ckptstore.open(tmp_path, run=run) as store:
            for step in range(1, 6):
                later = step >= parts_at
                model = {"w": torch.full((9,), step + later * 1.0)}
                moments = {"m": torch.ones(9) * step, "v": torch.ones(9) * step, "t": step}
                store.commit({"model": model, "optimizer": moments}, step=step)
    with ckptstore.open(tmp_path, run="thinned") as store:
        store.forget(KeepLast(3).thin("optimizer/*"))
        found = parting(store, "whole", "thinned")
        assert (found.equal_steps, found.a and found.a.step) == ((1, 2, 3), 4)
        assert [change.path for change in found.difference.changes] == ["model/w"]
        assert [(each.run, each.steps, each.nearest_step) for each in found.thinned] == [
            ("thinned", (1, 2), 3)
        ]
        assert set(found.thinned[0].paths) == {"optimizer/m", "optimizer/v", "optimizer/t"}
        assert parting(store, "whole", "thinned", select="model/*").thinned == ()
        both = store.diff("thinned@1", "thinned@2")
        assert (both.unchanged, len(both.changes), len(both.thinned)) == (0, 1, 3)
        found = parting(store, "thinned", "thinned")
        assert (found.a, [each.steps for each in found.thinned]) == (None, [(1, 2)])
    result = call("parted", "whole", "thinned", "-s", str(tmp_path))
    assert "equal at 3 steps, 1 to 3, and differ from step 4 on" in result.out
    assert (
        "not comparable at 2 steps, 1 to 2: optimizer/m and 2 others, thinned away in run thinned; "
        "the nearest commit that has it is"
    ) in result.out
    assert " (step 3)" in result.out and "- " not in result.out
    document = call("parted", "whole", "thinned", "-s", str(tmp_path), "--json").document
    assert document["thinned"][0]["steps"] == [1, 2]
    said = call("diff", "whole@1", "thinned@1", "-s", str(tmp_path)).out
    assert "1 leaves are the same, 3 thinned away and not compared" in said


def test_runs_that_cannot_be_compared_are_refused(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store:
        with pytest.raises(NotFound, match="run nobody has no commits with a step; the runs are"):
            parting(store, "right", "nobody")
        with pytest.raises(NotFound, match="model/no"):
            distance(store.checkout("right@10"), store.checkout("right@20"), "model/no")
    with ckptstore.open(tmp_path / "store", run="a") as store:
        store.commit({"x": 1}, step=1)
    with ckptstore.open(tmp_path / "store", run="b") as store:
        store.commit({"x": 1}, step=2)
        with pytest.raises(NotFound, match="no step in common: 1 and 2"):
            parting(store, "a", "b")


def test_a_distance_that_is_no_number_says_so(tmp_path: Path) -> None:
    x = torch.ones(3)
    with ckptstore.open(tmp_path / "store") as store:
        a = store.commit({"x": x}, step=1)
        b = store.commit({"x": torch.tensor([1.0, math.nan, 2.0])}, step=2)
        c = store.commit({"x": torch.zeros(3)}, step=3)
        far = distance(a, b, "x")
        assert far and math.isnan(far.largest) and math.isnan(far.relative)
        away = distance(c, a, "x")
        assert away and (away.largest, away.relative) == (1.0, math.inf)


def test_the_first_bad_commit_is_found_in_few_looks(place: Path) -> None:
    with ckptstore.open(place, run="nan") as store:
        seen: list[int | None] = []

        def is_bad(snapshot: ckptstore.Snapshot) -> bool:
            seen.append(snapshot.step)
            return bool(snapshot.read("model/2.weight").isnan().any())

        found = bisect(store, 10, 100, is_bad)
        assert store.checkout(found.first_bad).step == NAN_AT
        assert store.checkout(found.last_good).step == NAN_AT - 10
        assert found.looked_at == len(seen) <= 4
        with pytest.raises(InvalidInput, match="is no ancestor of"):
            bisect(store, 100, 10, is_bad)
        with pytest.raises(InvalidInput, match="as good and as bad"):
            bisect(store, 100, 100, is_bad)


def test_history_names_the_first_commit_with_a_nan(place: Path) -> None:
    words = ("history", "--run", "nan", "-s", str(place))
    result = call(*words, "--nan", "--json")
    assert result.code == 0
    found = {row["leaf"]: row["step"] for row in result.document["rows"]}
    assert found == dict.fromkeys(
        ["model/0.weight", "model/0.bias", "model/2.weight", "model/2.bias"], 60
    )
    assert call("history", "--run", "right", "-s", str(place), "--nan").out == (
        "no NaN and no infinity in 10 commits of run right\n"
    )


def test_history_lists_tensors_of_chosen_commits(place: Path) -> None:
    words = ("history", "0.weight", "--run", "slip", "-s", str(place))
    *lines, last = call(*words, "-n", "2").out.splitlines()
    assert last == "2 commits of run slip"
    assert [line.split()[0] for line in lines] == ["STEP", "90", "100"]
    assert lines[0].split()[-3:] == ["DRIFT", "FROM", "FIRST"]
    rows = call(*words, "--ref", "100", "--ref", "10", "--json").document["rows"]
    assert [row["step"] for row in rows] == [100, 10]
    assert rows[0]["drift"] is None
    assert rows[1]["drift"] == rows[1]["drift_first"] > 0
    refused = call("history", "nothing", "-s", str(place))
    assert refused.code == 1
    assert "has a tensor of numbers that matches" in refused.err


def test_a_line_with_forgotten_and_purged_commits_is_bisected_over_what_is_left(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(12):
            store.commit({"x": torch.full((4,), float(step))}, step=step)
        store.forget([3, 4])
        store.gc(grace_s=0)
        store.forget([6, 7])
        seen: list[int | None] = []

        def is_bad(snapshot: ckptstore.Snapshot) -> bool:
            seen.append(snapshot.step)
            return snapshot.step is not None and snapshot.step >= 5

        found = bisect(store, 0, "latest", is_bad)
        ends = [store.checkout(each).step for each in (found.last_good, found.first_bad)]
        assert ends == [2, 5]
        assert not {3, 4, 6, 7} & set(seen)


def test_parted_lists_and_measures_the_leaves(place: Path) -> None:
    words = ("parted", "right", "slip", "-s", str(place))
    page = call(*words, "--select", "model/*", "-n", "2")
    assert page.code == 0
    assert "right and slip are equal at 6 steps, 10 to 60, and differ from step 70 on" in page.out
    assert "model/0.weight" in page.out and "model/2.weight" not in page.out
    assert "and 2 leaves more" in page.out
    document = call(*words, "--select", "model/*", "-n", "2", "--json").document
    assert (document["step"], document["equal_steps"][-1]) == (70, 60)
    assert document["changes"][0]["relative"] > 0 and document["changes"][3]["relative"] is None
    same = call("parted", "right", "again", "-s", str(place))
    assert same.out.strip() == "right and again are equal at 10 steps, 10 to 100"


def test_bisect_finds_a_nan_a_norm_and_what_a_command_says(place: Path, tmp_path: Path) -> None:
    words = ("bisect", "--good", "nan@10", "--bad", "nan@100", "-s", str(place))
    found = call(*words, "--nan")
    assert found.code == 0
    assert f"(step {NAN_AT}) of run nan; the last good one" in found.out
    norm = call(*words, "--leaf", "model/2.weight", "--above", "100", "--json").document
    show = f"{sys.executable} -m ckptstore show $CKPTSTORE_REF --fast"
    command = f"{show} | grep -q '^step  *[1-5]0$'"
    verdicts = tmp_path / "verdicts.json"
    asked = call(*words, "--command", command, "--verdicts", str(verdicts), "--json").document
    assert len(json.loads(verdicts.read_text())) == asked["looked_at"] > 0
    again = call(*words, "--command", "exit 125", "--verdicts", str(verdicts), "--json").document
    assert again["looked_at"] == 0
    with ckptstore.open(place) as store:
        steps = [store.checkout(found["first_bad"]).step for found in (norm, again)]
    assert steps == [NAN_AT, NAN_AT]


def test_what_a_command_prints_is_not_in_the_document_of_bisect(place: Path) -> None:
    words = ("bisect", "--good", "nan@10", "--bad", "nan@100", "-s", str(place))
    found = running.run(*words, "--command", "echo score; exit 1", "--json")
    assert found.document["last_good"]
    assert "score" in found.err
    assert "score" in running.run(*words, "--command", "echo score; exit 1").out


def test_bisect_refuses_what_is_no_question(place: Path, tmp_path: Path) -> None:
    words = ("bisect", "--good", "nan@10", "--bad", "nan@100", "-s", str(place))
    assert "give one of --command, --nan, --leaf" in call(*words).err
    assert "--leaf and --above go together" in call(*words, "--leaf", "x").err
    assert "--good REF is missing" in call("bisect", "--nan", "-s", str(place)).err
    for command in ("exit 125", "no-such-command", "kill -9 $$"):
        assert "which is no verdict" in call(*words, "--command", command).err
    nowhere = str(tmp_path / "nowhere" / "verdicts")
    assert "cannot take the verdicts" in call(*words, "--nan", "--verdicts", nowhere).err
    (tmp_path / "other").write_text("[1]")
    assert "has no verdicts" in call(*words, "--nan", "--verdicts", str(tmp_path / "other")).err


def test_bisect_gives_no_verdict_by_the_norm_of_tensors_that_are_not_there(
    place: Path, tmp_path: Path
) -> None:
    words = ("bisect", "--good", "nan@10", "--bad", "nan@100", "-s", str(place))
    for leaf in ("modle/*", "clock/*"):
        found = call(*words, "--leaf", leaf, "--above", "1")
        assert found.code == 1
        assert f"has no tensor of floats that matches '{leaf}', so no verdict" in found.err
    thinned = tmp_path / "thinned"
    with ckptstore.open(thinned) as store:
        for step in range(6):
            store.commit({"model": torch.ones(9), "optimizer": torch.ones(99)}, step=step)
        store.forget(KeepLast(2).thin("optimizer"))
    ends = ("bisect", "--good", "0", "--bad", "5", "-s", str(thinned))
    assert "no longer has optimizer" in call(*ends, "--leaf", "*", "--above", "1").err
    assert call(*ends, "--leaf", "model", "--above", "1").code == 0


def test_average_commits_a_sum_and_names_its_parents(place: Path) -> None:
    words = ("average", "right@80", "right@90", "right@100", "-s", str(place), "--into", "soup")
    page = call(*words, "-o", "mean")
    assert page.code == 0, page.err
    assert "of run soup, from " in page.out
    ways = {
        "--weights": "1,1,2",
        "--ema": "0.5",
        "--factors": "1,0.5,-0.5",
    }
    for option, value in ways.items():
        made = call(*words, option, value, "-o", option[2:], "--json").document
        assert len(made["parents"]) == 3
    arc = call("average", "right@90", "right@100", "--slerp", "0.5", "-o", "arc", *words[4:])
    assert arc.code == 0, arc.err
    with ckptstore.open(place) as store:
        parts = [store.checkout(f"right@{step}").read("model/0.weight") for step in (80, 90, 100)]
        x, y, z = parts
        wanted = {
            "mean": (x + y + z) / 3,
            "weights": (x + y + 2 * z) / 4,
            "ema": 0.25 * x + 0.25 * y + 0.5 * z,
            "factors": x + 0.5 * (y - z),
        }
        for tag, tensor in wanted.items():
            torch.testing.assert_close(store.checkout(tag).read("model/0.weight"), tensor)


def test_average_refuses_what_makes_no_sum(place: Path) -> None:
    words = ("average", "right@90", "right@100", "-s", str(place))
    assert "wanted numbers with commas between them" in call(*words, "--weights", "1;2").err
    assert "wanted a number; see" in call(*words, "--slerp", "0,1").err
    assert "got 3 factors for 2 commits" in call(*words, "--factors", "1,2,3").err
    assert "wanted two or more" in call("average", "right@90", "-s", str(place)).err
    assert "wanted two or more" in call("average", "-s", str(place)).err
