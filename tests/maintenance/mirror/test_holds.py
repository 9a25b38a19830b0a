"""The holds of hollow directories guard what one store has for one machine: mirrors get none."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore.maintenance.forget import set_tag
from ckptstore.store import internals_of
from tests.cli.running import call


def checkpoint(root: Path, seed: int) -> Path:
    root.mkdir(parents=True)
    save_file({"w": torch.full((400,), float(seed))}, root / "model.safetensors")
    return root


def held(store: ckptstore.Store) -> dict[str, str]:
    return {tag: commit for tag, commit in store.tags().items() if tag.startswith("held/")}


def test_a_mirror_gets_the_commits_of_hollow_directories_without_their_holds(
    tmp_path: Path,
) -> None:
    here, there, later = tmp_path / "here", tmp_path / "there", tmp_path / "later"
    with ckptstore.open(here) as store:
        first = checkpoint(tmp_path / "out" / "checkpoint-1", 1)
        made = store.adopt(first, step=1, tag="mine", hollow=True)
        assert set(held(store).values()) == {made.id}
        pushed = store.push(there, create=True)
        assert pushed.sent == (made.id,)
        assert [move.tag for move in pushed.plan.tags] == []
        store.mirror(there)
        with ckptstore.open(there) as mirror:
            assert mirror.tags() == {"mine": made.id}
        with ckptstore.open(later) as other:
            other.pull(here)
            assert other.tags() == {"mine": made.id}
        shutil.rmtree(first)
        again = store.adopt(checkpoint(first, 2), step=2, hollow=True)
        assert set(held(store).values()) == {made.id, again.id}
        assert store.push(there).sent == (again.id,)
        assert store.push(there).plan.empty


def test_a_hold_that_an_older_push_brought_stops_no_push(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with ckptstore.open(here) as store:
        root = checkpoint(tmp_path / "out" / "checkpoint-1", 1)
        made = store.adopt(root, step=1, hollow=True)
        (hold,) = held(store)
        store.push(there, create=True)
        with ckptstore.open(there) as mirror:
            internals = internals_of(mirror)
            set_tag(internals.handle, internals.reader, hold, internals.find(made.id)[1])
        shutil.rmtree(root)
        again = store.adopt(checkpoint(root, 2), step=2, hollow=True)
        assert store.push(there).sent == (again.id,)
        with ckptstore.open(there) as mirror:
            assert held(mirror) == {hold: made.id}


def test_a_clone_takes_holds_along_because_it_may_take_the_place_of_its_source(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    with ckptstore.open(here) as store:
        store.adopt(checkpoint(tmp_path / "out" / "checkpoint-1", 1), step=1, hollow=True)
        holds = held(store)
    with ckptstore.clone(here, tmp_path / "clone") as clone:
        assert held(clone) == holds
    assert call("clone", str(here), str(tmp_path / "other")).code == 0
    with ckptstore.open(tmp_path / "other") as clone:
        assert held(clone) == holds
