"""What the views of the page say is what the store has."""

import math
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.maintenance.retention import KeepBest, KeepLast
from ckptstore.plugins.ui import opened
from ckptstore.plugins.ui.values import run_key
from tests.ui.asking import Browser, browsing


def test_the_store_page_has_the_sums_of_the_catalog(browser: Browser, place: Path) -> None:
    found = browser.view("store.json")
    with ckptstore.open(place) as store:
        infos, usage = store.log(), store.usage()
    assert found["commits"] == len(infos) and found["tags"][0]["name"] == "release-1"
    assert found["stored_bytes"] == usage.stored_bytes
    assert found["logical_bytes"] == usage.logical_bytes == found["growth"]["logical"][-1]
    assert found["growth"]["new"][-1] == sum(info.new_bytes for info in infos)
    assert {run["run"]: run["commits"] for run in found["runs"]} == {
        "baseline": 13,
        "higher-rate": 7,
        "frozen-embedding": 5,
    }
    baseline = next(run for run in found["runs"] if run["run"] == "baseline")
    assert baseline["metric"] == "loss" and len(baseline["spark"]) == 13


def test_a_run_has_a_column_for_each_metric(browser: Browser, place: Path) -> None:
    found = browser.view(f"run/{run_key('baseline')}.json")
    with ckptstore.open(place) as store:
        infos = store.log(run="baseline")[::-1]
    assert found["id"] == [info.id for info in infos]
    assert {metric["name"]: metric["values"] for metric in found["metrics"]} == {
        name: [info.metrics[name] for info in infos] for name in ("loss", "accuracy")
    }
    assert found["tags"][9] == ["release-1"]


def test_the_lineage_joins_runs_at_the_commits_they_branched_from(browser: Browser) -> None:
    found = browser.view("lineage.json")
    names = [run["run"] for run in found["runs"]]
    branches = {
        names[found["run"][i]]: (names[found["run"][parent]], found["step"][parent])
        for i, parents in enumerate(found["parents"])
        for parent in parents
        if found["run"][i] != found["run"][parent]
    }
    assert branches == {
        "higher-rate": ("baseline", 400),
        "frozen-embedding": ("baseline", 800),
    }


def test_a_commit_has_relatives_links_and_lines_that_load_it(browser: Browser) -> None:
    every = browser.view("lineage.json")
    id_ = every["id"][every["step"].index(1300)]
    found = browser.view(f"commit/{id_}.json")
    assert found["links"] == [["tracker", "https://example.org/run/1"]]
    assert found["parents"][0]["step"] == 1200 and found["children"] == []
    assert dict(found["metrics"]).keys() == {"loss", "accuracy"}
    line = found["lines"][1]["text"]
    scope: dict[str, object] = {}
    exec(line, scope)
    assert isinstance(scope["weights"], dict) and "head.weight" in scope["weights"]
    branched = browser.view(f"commit/{every['id'][3]}.json")
    assert {child["run"] for child in branched["children"]} == {"baseline", "higher-rate"}


def test_leaves_are_those_of_the_snapshot(browser: Browser, place: Path) -> None:
    id_ = browser.view("store.json")["recent"][0]["id"]
    found = browser.view(f"leaves/{id_}/0.json")
    with ckptstore.open(place) as store:
        leaves = store.checkout(id_).leaves()
    assert found["total"] == len(leaves) and found["path"] == [leaf.path for leaf in leaves]
    assert found["bytes"] == [leaf.nbytes for leaf in leaves]
    assert found["shape"][0] == list(leaves[0].shape)
    assert browser.view(f"leaves/{id_}/1.json")["path"] == []


def test_sharing_finds_the_frozen_leaf(browser: Browser) -> None:
    every = browser.view("lineage.json")
    run = next(i for i, run in enumerate(every["runs"]) if run["run"] == "frozen-embedding")
    id_ = [id_ for id_, of in zip(every["id"], every["run"], strict=True) if of == run][-1]
    paths = browser.view(f"leaves/{id_}/0.json")["path"]
    found = browser.view(f"sharing/{id_}.json")
    at = paths.index("model/embedding.weight")
    # the five of its run share it with the commit that it branched from
    assert found["commits"][at] == 5
    assert found["since"][found["place"][at]][1] == 800
    other = paths.index("model/layers.0.mlp.up.weight")
    assert (found["commits"][other], found["place"][other]) == (0, 0)
    assert found["stored"][other] == 128 * 32 * 4


def test_a_diff_is_that_of_the_store(browser: Browser, place: Path) -> None:
    b, a = (each["id"] for each in browser.view("store.json")["recent"][:2])
    found = browser.view(f"diff/{a}/{b}.json")
    with ckptstore.open(place) as store:
        wanted = store.diff(a, b)
    assert found["path"] == [change.path for change in wanted.changes]
    assert found["changed"] == [change.changed_bytes for change in wanted.changes]
    assert found["unchanged"] == wanted.unchanged
    far = {path: relative for path, relative, _ in browser.view(f"distances/{a}/{b}.json")}
    assert far.keys() == {path for path in found["path"] if "weight" in path}
    assert all(0 < relative < 0.2 for relative in far.values())


def test_retention_says_what_a_dry_run_says(browser: Browser, place: Path) -> None:
    asked = "keep-last=2&keep-best=loss&keep-best=3"
    found = browser.view(f"retention/{run_key('baseline')}.json?{asked}")
    with ckptstore.open(place, run="baseline") as store:
        plan = store.forget([KeepLast(2), KeepBest("loss", n=3)], dry_run=True)
    assert found["summary"] == plan.summary
    assert found["commits"] == [[each.commit, list(each.reasons)] for each in plan.decisions]
    assert found["freed_bytes"] > 0


@pytest.mark.parametrize(
    "asked",
    [
        *("", "keep-last=-1", "keep-last=x", "keep-last=0", "keep-last=2&keep-last=3"),
        *("keep-best=nothing", "keep-best=loss&keep-best=x", "keep-within=7"),
        *("all=1", "thin=model", "last=1"),
    ],
)
def test_a_policy_that_cannot_be_understood_is_refused(browser: Browser, asked: str) -> None:
    answer = browser.ask(f"/data/0/retention/{run_key('baseline')}.json?{asked}")
    assert answer.status_code == 400 and answer.json()["kind"] == "InvalidInput"


def test_health_and_space_agree_with_the_store(browser: Browser, place: Path) -> None:
    health, space = browser.view("health.json"), browser.view("space.json")
    assert health["sessions"] == [] and health["free_bytes"] > 0 and not health["damaged_packs"]
    with ckptstore.open(place) as store:
        assert space["unreferenced_bytes"] == store.usage().unreferenced_bytes
    own = [commit["exclusive_bytes"] for commit in space["heaviest"]]
    assert own == sorted(own, reverse=True) and own[0] > 0


def test_what_others_commit_appears(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store, browsing(tmp_path / "s") as browser:
        assert browser.view("store.json")["recent"] == []
        before = browser.view("position.json")["n"]
        made = store.commit({"x": torch.ones(3)}, step=1, metrics={"loss": math.nan})
        assert browser.view("position.json")["n"] == before + 1
        found = browser.view("store.json")
        assert found["recent"][0]["id"] == made.id and found["runs"][0]["spark"] == ["NaN"]


def test_several_stores_have_numbers(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "other") as store:
        store.commit({"x": 1}, step=1)
    with browsing(place, tmp_path / "other") as browser:
        site = browser.ask("/data/site.json").json()
        assert [store["number"] for store in site["stores"]] == [0, 1]
        assert browser.view("store.json", store=1)["commits"] == 1
        assert browser.ask("/data/2/store.json").status_code == 404


def test_a_damaged_commit_is_told_and_the_page_goes_on(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        id_ = store.commit({"x": torch.ones(300)}, step=1).id
    for document in (tmp_path / "s" / "commits").rglob("*"):
        if document.is_file():
            document.write_bytes(b"damage")
    with browsing(tmp_path / "s") as browser:
        assert browser.view("store.json")["commits"] == 1
        assert "cannot be read" in browser.view(f"commit/{id_}.json")["problems"][0]
        answer = browser.ask(f"/data/0/leaves/{id_}/0.json")
        assert answer.status_code == 500 and answer.json()["kind"] == "Corrupt"


def test_a_thinned_commit_says_what_it_lacks(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with ckptstore.open(place) as store:
        for step in range(4):
            weight = torch.full((30_000,), float(step))
            store.commit({"model": {"w": weight}, "optimizer": {"m": weight + 1}}, step=step)
        store.forget(KeepLast(2).thin("optimizer/**"))
        id_ = store.checkout(0).id
    with browsing(place) as browser:
        assert browser.view(f"commit/{id_}.json")["thinned"] == ["optimizer/**"]
        stored = browser.view(f"sharing/{id_}.json")["stored"]
        assert stored[0] > 0 and stored[1] == 0
        gone = browser.view(f"leaf/{id_}/1.json")
        assert (gone["path"], gone["gone"], gone["numbers"]) == ("optimizer/m", True, False)
        moved = browser.view(f"moves/{id_}/0.json")
        assert [row[1] for row in moved["rows"]] == [0, 1, 2, 3]


def test_a_tensor_has_its_history_over_the_run(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with ckptstore.open(place) as store:
        for step in range(45):
            state = {"a*[1]": torch.full((4,), float(step // 2)), "other": torch.ones(2)}
            store.commit({"model": state}, step=step)
        rows = [row for row in store.history() if row.leaf == "model/a*[1]"]
        id_ = store.checkout(7).id
    with browsing(place) as browser:
        moved = browser.view(f"moves/{id_}/0.json")
    assert [row[:2] for row in moved["rows"]] == [[row.commit, row.step] for row in rows]
    assert [row[2] for row in moved["rows"]] == [row.norm for row in rows]
    assert [row[3] for row in moved["rows"]] == [row.drift for row in rows]
    assert moved["rows"][44][4] == rows[44].drift_first == 44
    assert moved["total"] == 45


def test_a_tensor_of_a_run_that_is_older_than_what_the_page_knows_has_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "COMMITS_SHOWN", 1)
    for run in ("old", "new"):
        with ckptstore.open(tmp_path / "s", run=run) as store:
            store.commit({"w": torch.ones(3)}, step=1)
    with browsing(tmp_path / "s") as browser, ckptstore.open(tmp_path / "s") as store:
        old = store.checkout("old@1").id
        assert browser.view(f"moves/{old}/0.json") == {"rows": [], "total": 0}
