"""Likely mistakes with other libraries' interfaces: nothing is lost, and the error says what
to do.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter, store_to_dcp
from ckptstore.interop.torchsnapshot import Snapshot, StateDict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def take(path: Path, x: int = 1) -> Snapshot:
    return Snapshot.take(str(path), {"s": StateDict(x=x)})


# -- folders with missing files --


def test_a_store_that_lost_its_configuration_is_not_buried_under_a_second_one(
    tmp_path: Path,
) -> None:
    take(tmp_path / "runs" / "a").commit  # noqa: B018  # it can be read
    (tmp_path / "runs" / "ckptstore.json").unlink()
    for path in (tmp_path / "runs" / "b", tmp_path / "runs" / "deep" / "b"):
        with pytest.raises(
            ckptstore.Corrupt, match=r"runs has a log and no ckptstore\.json.*runs repair"
        ):
            take(path, 2)
        with pytest.raises(ckptstore.Corrupt, match=r"runs repair"):
            Snapshot(str(path)).get_manifest()
    assert (
        not (tmp_path / "runs" / ".ckptstore").exists() and not (tmp_path / "runs" / "b").exists()
    )


def test_a_store_beside_other_things_that_lost_its_configuration_is_not_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.log").touch()
    take(tmp_path / "a")
    (tmp_path / ".ckptstore" / "ckptstore.json").unlink()
    with pytest.raises(ckptstore.Corrupt, match=r"\.ckptstore repair"):
        take(tmp_path / "b", 2)


# -- pointers that were moved --


def test_a_pointer_that_was_copied_away_from_its_store_says_so(tmp_path: Path) -> None:
    take(tmp_path / "runs" / "a")
    (tmp_path / "else").mkdir()
    shutil.copy(tmp_path / "runs" / "a", tmp_path / "else" / "a")
    for read in (lambda path: Snapshot(path).read_object("0/s/x"), ckptstore.open_pointer):
        with pytest.raises(
            ckptstore.NotFound,
            match=r"else/a points to commit .* in .*else: no store.*copied or moved.*write_pointer",
        ):
            read(str(tmp_path / "else" / "a"))
    shutil.copytree(tmp_path / "runs", tmp_path / "copied")
    shutil.rmtree(tmp_path / "runs")
    assert Snapshot(str(tmp_path / "copied" / "a")).read_object("0/s/x") == 1, (
        "a store is copied with its pointers"
    )


@pytest.mark.parametrize("kept", [0, 30])
def test_a_pointer_that_was_cut_off_says_where_its_commit_is(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "runs" / "a"
    take(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        ckptstore.InvalidInput, match="if it was one, remove it: its commit is in `ckptstore log`"
    ):
        Snapshot(str(path)).get_manifest()
    path.unlink()
    assert Snapshot(str(path)).read_object("0/s/x") == 1


def test_a_pointer_in_place_of_a_store_is_named(tmp_path: Path, place: Path) -> None:
    dcp.save({"n": 1}, checkpoint_id=tmp_path / "best", storage_writer=StoreWriter(place))
    with pytest.raises(
        CheckpointException,
        match=r"that is a pointer to commit .* of the store .*store; open that store",
    ):
        dcp.load({"n": 0}, storage_reader=StoreReader(tmp_path / "best"))
    with pytest.raises(ckptstore.NotFound, match="that is a pointer to commit"):
        ckptstore.open(tmp_path / "best", create=False)
    found = {"n": 0}
    dcp.load(found, storage_reader=StoreReader(place, tmp_path / "best"))
    assert found == {"n": 1}


# -- other libraries' files --


def test_a_directory_of_dcp_in_place_of_a_store_is_named(tmp_path: Path, place: Path) -> None:
    dcp.save({"n": 1}, checkpoint_id=tmp_path / "old")
    with pytest.raises(
        CheckpointException,
        match=r"torch\.distributed\.checkpoint wrote that directory.*import .*old",
    ):
        dcp.load({"n": 0}, storage_reader=StoreReader(tmp_path / "old"))
    ckptstore.open(place).close()
    with pytest.raises(
        CheckpointException, match="what other libraries wrote comes into one by `ckptstore import`"
    ):
        dcp.load({"n": 0}, checkpoint_id=tmp_path / "old", storage_reader=StoreReader(place))
    for save in (StoreWriter(tmp_path / "old"), StoreWriter(place)):
        with pytest.raises(
            CheckpointException,
            match=r"choose an empty or a new directory|give another checkpoint_id",
        ):
            dcp.save({"n": 2}, checkpoint_id=tmp_path / "old", storage_writer=save)
    found = {"n": 0}
    dcp.load(found, checkpoint_id=tmp_path / "old")
    assert found == {"n": 1}, "the old checkpoint is as it was"


def test_a_file_is_not_replaced_by_a_directory_of_dcp(tmp_path: Path, place: Path) -> None:
    (tmp_path / "notes").write_text("precious")
    with ckptstore.open(place) as store:
        snapshot = store.commit({"n": 1})
        with pytest.raises(ckptstore.Conflict, match="is a file already; choose another path"):
            store_to_dcp(snapshot, tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "precious"


# -- arguments --


def test_one_glob_in_place_of_a_list_is_refused(tmp_path: Path) -> None:
    """Each of its characters would be a glob, and `*` alone means everything."""
    for pending in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(
            RuntimeError, match=r"wanted a list of globs: replicated=\['model/\*\*'\]"
        ):
            pending(str(tmp_path / "runs" / "a"), {"s": StateDict(x=1)}, replicated="model/**")  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_told_with_what_there_is(tmp_path: Path) -> None:
    take(tmp_path / "a")
    with pytest.raises(ckptstore.InvalidInput, match="wanted by the target") as caught:
        Snapshot(str(tmp_path / "a")).restore({"t": StateDict(x=1)})
    assert caught.value.__notes__ == [
        "the snapshot has the keys s; select=, rename= and dtype= are for snapshot.commit.restore"
    ]
    with pytest.raises(TypeError, match="wanted a dict of stateful objects"):
        # as a script without types has it
        Snapshot.take(str(tmp_path / "b"), [StateDict()])  # type: ignore[arg-type]


def test_a_key_that_is_not_there_is_told_with_those_that_are(place: Path) -> None:
    module = torch.nn.Linear(2, 2)
    dcp.save({"model": module.state_dict()}, storage_writer=StoreWriter(place))
    found: dict[str, Any] = dict(module.state_dict())
    with pytest.raises(CheckpointException, match=r"has no key 'modle'; it has model"):
        dcp.load(found, storage_reader=StoreReader(place, key="modle"))
