"""A `checkpoint_id` that is a path is a directory, like DCP's own checkpoints: scripts find,
prepare and remove it.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import ckptstore
from ckptstore import Conflict, InvalidInput, NotFound
from ckptstore.interop.dcp import StoreReader, StoreWriter
from ckptstore.interop.torchsnapshot import Snapshot
from ckptstore.objects.pointer_files import Pointer, read_pointer, write_pointer
from tests.interop.dcp_states import OLD_TORCH

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)


def save(place: Path, path: Path | str, value: float = 1.0, **options: Any) -> StoreWriter:
    writer = StoreWriter(place, **options)
    dcp.save({"a": torch.full((3,), value)}, checkpoint_id=path, storage_writer=writer)
    return writer


def load(place: Path, path: Path | str) -> float:
    found = {"a": torch.zeros(3)}
    dcp.load(found, checkpoint_id=path, storage_reader=StoreReader(place))
    return float(found["a"][0])


def test_a_script_that_looks_for_metadata_in_directories_of_steps_finds_them(
    place: Path, tmp_path: Path
) -> None:
    for step in (5, 10):
        save(place, tmp_path / f"step-{step}", float(step))
    steps = [
        int(name.removeprefix("step-"))
        for name in os.listdir(tmp_path)
        if (tmp_path / name / ".metadata").is_file()
    ]
    assert sorted(steps) == [5, 10], "the rule by which trainers find what to resume from"
    assert load(place, tmp_path / f"step-{max(steps)}") == 10


def test_a_directory_that_was_made_beforehand_is_used_and_what_others_put_there_stays(
    place: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    save(place, path)
    (path / "trainer.json").write_text("{}")
    save(place, str(path), 2.0)
    assert load(place, str(path)) == 2.0
    assert sorted(os.listdir(path)) == [".metadata", "trainer.json"]


def test_a_directory_that_is_removed_takes_its_name_with_it_and_the_commit_can_be_forgotten(
    place: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / f"step-{step}" for step in range(3)]
    for value, path in enumerate(paths):
        dcp.save(
            {"a": torch.full((100_000,), float(value))},
            checkpoint_id=path,
            storage_writer=StoreWriter(place),
        )
    shutil.rmtree(paths[0])
    with pytest.raises(CheckpointException, match="no pointer file at"):
        load(place, paths[0])
    with ckptstore.open(place) as store:
        # As docs/migrating.md has it, which leaves the two newest commits.
        kept = {store.checkout(path).id for path in tmp_path.glob("step-*")}
        store.forget([info.id for info in store.log()[2:] if info.id not in kept])
        assert [info.id for info in store.log()] == [
            read_pointer(path).id for path in (paths[2], paths[1])
        ]
        store.gc(max_unused=0.0, grace_s=0)
        assert store.sessions() == ()
        assert torch.equal(store.checkout(paths[1]).read("model/a"), torch.ones(100_000))
    save(place, paths[0], 7.0)
    assert load(place, paths[0]) == 7.0


def test_the_directory_is_taken_wherever_a_path_of_a_commit_is(place: Path, tmp_path: Path) -> None:
    commit = save(place, tmp_path / "best").commit
    with ckptstore.open(place) as store:
        assert store.checkout(tmp_path / "best").id == commit
        assert store.checkout(f"{tmp_path}/best/").id == commit
    with ckptstore.open_pointer(tmp_path / "best") as snap:
        assert snap.id == commit
    with pytest.raises(NotFound, match="that is a pointer to commit"):
        ckptstore.open(tmp_path / "best", create=False)
    assert Snapshot(str(tmp_path / "best")).commit.id == commit
    os.rename(tmp_path / "best", tmp_path / "kept")
    assert load(place, tmp_path / "kept") == 1.0


def test_only_a_pointer_is_ever_replaced(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "stock")
    there = (tmp_path / "stock" / ".metadata").read_bytes()
    for name in ("file", "stock", "store"):
        with pytest.raises(CheckpointException, match="give another checkpoint_id"):
            save(place, tmp_path / name)
    assert (tmp_path / "stock" / ".metadata").read_bytes() == there
    assert place == tmp_path / "store" and not (place / ".metadata").exists()


def test_a_pointer_file_of_an_earlier_version_stays_one(place: Path, tmp_path: Path) -> None:
    commit = save(place, "9", 9.0).commit
    assert commit is not None
    write_pointer(tmp_path / "old", Pointer(str(place), commit))
    assert load(place, tmp_path / "old") == 9.0
    save(place, tmp_path / "old", 3.0)
    assert (tmp_path / "old").is_file() and load(place, tmp_path / "old") == 3.0


def test_a_pointer_is_written_anew_in_its_directory(place: Path, tmp_path: Path) -> None:
    save(place, tmp_path / "best")
    save(place, "4", 4.0)
    with ckptstore.open(place) as store:
        ckptstore.write_pointer(tmp_path / "best", store, 4)
        (tmp_path / "folder").mkdir()
        with pytest.raises(Conflict, match="no pointer file"):
            ckptstore.write_pointer(tmp_path / "folder", store)
    assert load(place, tmp_path / "best") == 4.0


def test_what_imports_checkpoints_says_what_a_pointer_is(place: Path, tmp_path: Path) -> None:
    from ckptstore.interop.dcp import dcp_to_store

    save(place, tmp_path / "best")
    with ckptstore.open(place) as store, pytest.raises(InvalidInput, match="points to commit"):
        dcp_to_store(tmp_path / "best", store)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 has no use_collectives")
def test_ranks_that_save_alone_share_the_directory(place: Path, tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.ones(3)},
        checkpoint_id=tmp_path / "alone",
        storage_writer=StoreWriter(place),
        use_collectives=False,
    )
    assert os.listdir(tmp_path / "alone") == ["__0.metadata"]
    assert load(place, tmp_path / "alone") == 1.0


@pytest.mark.parametrize("name", ["a directory", "a tag", "7"])
def test_a_writer_that_may_not_overwrite_refuses_a_name_that_is_taken(
    place: Path, tmp_path: Path, name: str
) -> None:
    checkpoint_id = {"a directory": str(tmp_path / "step"), "a tag": "good"}.get(name, name)
    save(place, checkpoint_id, 1.0, overwrite=False)
    with pytest.raises(CheckpointException, match=r"Checkpoint already exists.*overwrite=False"):
        save(place, checkpoint_id, 2.0, overwrite=False)
    assert load(place, checkpoint_id) == 1.0
    save(place, checkpoint_id, 3.0)
    assert load(place, checkpoint_id) == 3.0


def test_a_save_and_a_load_have_ids(place: Path) -> None:
    writer, reader = StoreWriter(place), StoreReader(place)
    metadata = dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    assert (
        metadata.storage_meta is not None
        and writer.save_id == metadata.storage_meta.save_id == writer.commit
    )
    read = reader.read_metadata().storage_meta
    assert (
        read is not None
        and (read.save_id, read.load_id) == (writer.save_id, reader.load_id)
        and reader.load_id
    )
    reader.close()
