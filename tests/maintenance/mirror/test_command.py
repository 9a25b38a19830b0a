"""push, pull and clone on the command line."""

import json
from pathlib import Path

import pytest

import ckptstore
from ckptstore.cli.call import Exit
from tests.cli.running import call, run
from tests.cli.test_imports import imported
from tests.maintenance.stores import check, copy_of, files, flip, make_store


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("mirrored") / "store")


@pytest.fixture
def place(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    return copy_of(template, tmp_path / "store")


def test_push_plans_then_sends_and_says_what(place: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    assert call("push", target).code == Exit.NO_STORE
    planned = call("push", target, "--create", "-n", "--json").document
    assert (planned["dry_run"], planned["sent"], len(planned["plan"]["commits"])) == (True, [], 4)
    done = call("push", target, "--json").document
    assert done["plan"]["commits"] == planned["plan"]["commits"]
    assert done["raw_bytes"] == planned["plan"]["load"]["raw_bytes"]
    assert len(done["sent"]) == 4 and done["stored_bytes"] > 0
    assert "4 commits already there" in call("push", target).out


def test_a_tag_that_would_move_stops_a_push(place: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    call("push", target, "--create")
    call("tag", "first", "main@2")
    stopped = call("push", target)
    assert (stopped.code, "--force" in stopped.err) == (Exit.FAILED, True)
    assert "tag first" in call("push", target, "-n").err
    assert call("push", target, "--force").code == Exit.OK
    assert call("push", target, "--force", "--no-tags").code == Exit.USAGE


def test_pull_takes_what_is_named_and_a_damaged_commit_makes_a_partial_one(
    place: Path, tmp_path: Path
) -> None:
    target = str(tmp_path / "target")
    assert call("init", target, "--chunk-size", "64KiB").code == Exit.OK
    pulled = call(
        "-s", target, "pull", str(place), "main@1", "--ancestors", "--verify", "--json"
    ).document
    assert [row["step"] for row in pulled["plan"]["commits"]] == [0, 1]
    for path in files(place, "packs"):
        flip(path, 10)
    partial = call("-s", target, "pull", str(place))
    assert (partial.code, "was not sent" in partial.err) == (Exit.DAMAGED, True)
    assert not check(Path(target)).damaged


def test_clone_makes_the_store_and_shows_progress_for_programs(place: Path, tmp_path: Path) -> None:
    done = run("clone", str(place), str(tmp_path / "target"), "--json")
    assert done.code == Exit.OK, done.err
    assert [json.loads(line)["phase"] for line in done.err.splitlines()][-1] == "commits"
    with ckptstore.open(place) as store, ckptstore.open(tmp_path / "target") as there:
        assert {c.id for c in there.log()} == {c.id for c in store.log()}


def test_push_imports_no_torch(place: Path, tmp_path: Path) -> None:
    assert (
        imported(f"push {tmp_path / 'target'} --create", place) & {"torch", "s3fs", "pydantic"}
        == set()
    )
