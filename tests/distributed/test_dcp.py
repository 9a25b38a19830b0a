"""`dcp.save` and `dcp.load` on a store over ranks: every layout onto every other, native and back;
a failure is raised on all ranks.
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.distributed.layouts import full, group_of, local, meet, mesh_of, placed, quietly, sharded
from tests.distributed.pool import Pool
from tests.interop.dcp_states import OLD_TORCH

LAYOUTS: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "replicate": (False, (Replicate(),)),
    "rows": (False, (Shard(0),)),
    "columns": (False, (Shard(1),)),
    "mesh": (True, (Shard(0), Shard(1))),
    "hybrid": (True, (Replicate(), Shard(0))),
}
"""The layouts that DCP's own planner can divide."""

if not OLD_TORCH:  # torch 2.6 divides them evenly or not at all
    LAYOUTS["strided"] = (True, (_StridedShard(0, split_factor=2), Shard(0)))


def state(n: int, tensor: torch.Tensor) -> dict[str, Any]:
    """FSDP2 (rows), tensor parallel (columns, mesh), both (strided), HSDP (hybrid), FSDP1 (sharded
    tensors), and what every rank has."""
    found: dict[str, Any] = {
        name: placed(tensor, mesh_of(n, two), placements)
        for name, (two, placements) in LAYOUTS.items()
    }
    found["plain"] = tensor.clone()
    found["sharded"] = sharded(tensor, n)
    return {
        "model": found,
        "small": placed(tensor[:5, :7], mesh_of(n, False), (Shard(0),)),
        "epoch": 3,
    }


def save_layouts(rank: int, path: Path, n: int) -> str | None:
    meet(n)
    if rank >= n:
        return None
    writer = StoreWriter(path, step=n)
    metadata = dcp.save(state(n, full()), storage_writer=writer, process_group=group_of(n))
    assert metadata.storage_meta is not None
    assert (writer.commit == metadata.storage_meta.save_id) == (rank == 0)
    return str(metadata.storage_meta.save_id)


def load_layouts(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    for saved in {1, 2, 4} - {n}:
        found = state(n, torch.zeros_like(full()))
        found["epoch"] = 0
        dcp.load(found, storage_reader=StoreReader(path, saved), process_group=group_of(n))
        wanted = state(n, full())
        for name, value in wanted["model"].items():
            assert torch.equal(local(found["model"][name]), local(value)), (saved, n, name)
        assert torch.equal(local(found["small"]), local(wanted["small"])) and found["epoch"] == 3


def restore_natively(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    with ckptstore.open(path) as store:
        for saved in {1, 2, 4} - {n}:
            found = state(n, torch.zeros_like(full()))
            store.checkout(saved).restore(found, ranks=ckptstore.Ranks(process_group=group_of(n)))
            for name, value in state(n, full())["model"].items():
                assert torch.equal(local(found["model"][name]), local(value)), (saved, n, name)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "store"
    ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)).close()
    for n in (1, 2, 4):
        ids = pool.run(quietly, save_layouts, path, n)
        assert len({each for each in ids if each}) == 1, "every rank learns the commit"
    return path


@pytest.mark.parametrize("n", [2, 4])
def test_every_layout_is_loaded_onto_every_other(pool: Pool, saved: Path, n: int) -> None:
    pool.run(quietly, load_layouts, saved, n)


@pytest.mark.parametrize("n", [1, 4])
def test_what_dcp_saved_is_restored_natively_on_any_number_of_ranks(
    pool: Pool, saved: Path, n: int
) -> None:
    pool.run(quietly, restore_natively, saved, n)


def test_replicas_are_saved_once_and_shards_share_chunks_with_the_whole(saved: Path) -> None:
    with ckptstore.open(saved) as store:
        for n in (1, 2, 4):
            snapshot = store.checkout(n)
            snapshot.verify()
            assert all(
                torch.equal(value, full()) for value in snapshot.state_dict()["model"].values()
            )
            assert torch.equal(snapshot.read("small"), full()[:5, :7])
        nbytes = full().nbytes
        # All tensors are equal, so whole columns and cut cells are one chunk each.
        assert store.checkout(1).new_bytes < 2 * nbytes
        assert not store.fsck(read_data="100%").findings


def save_and_fail(rank: int, path: Path, failing: int) -> str:
    values: dict[str, Any] = {
        "w": torch.full((1000,), float(rank)),
        f"own-{rank}": object() if rank == failing else rank,
    }
    try:
        dcp.save(values, checkpoint_id="x", storage_writer=StoreWriter(path))
    except CheckpointException as error:
        return f"{sorted(error.failures)} {error}"
    return "saved"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_on_one_rank_is_raised_on_all(pool: Pool, tmp_path: Path, failing: int) -> None:
    path = tmp_path / "store"
    told = pool.run(quietly, save_and_fail, path, failing)
    assert all(
        text.startswith(f"[{failing}]") and f"own-{failing}" in text and "register_value" in text
        for text in told
    ), told
    assert set(pool.run(quietly, save_and_fail, path, 99)) == {"saved"}  # and the next save works
    with ckptstore.open(path) as store:
        assert [info.tags for info in store.log()] == [("x",)]
        assert set(store.checkout("x").state_dict()["model"]) == {
            "w",
            "own-0",
            "own-1",
            "own-2",
            "own-3",
        }


def save_alone(rank: int, path: Path, value: float, *, together: bool) -> None:
    meet(4)
    values = {"w": placed(full() + value, mesh_of(4, False), (Shard(0),)), "rank": rank}
    dcp.save(values, storage_writer=StoreWriter(path, step=int(value)), use_collectives=together)


def load_alone(rank: int, path: Path, ref: Any, value: float) -> Any:
    found = {"w": placed(torch.zeros_like(full()), mesh_of(4, False), (Shard(0),)), "rank": -1}
    dcp.load(found, storage_reader=StoreReader(path, ref))
    assert torch.equal(
        found["w"].to_local(), placed(full() + value, mesh_of(4, False), (Shard(0),)).to_local()
    )
    return found["rank"]


def _save_together(rank: int, path: Path, value: float) -> None:
    save_alone(rank, path, value, together=True)


def _save_apart(rank: int, path: Path, value: float) -> None:
    save_alone(rank, path, value, together=False)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 has no use_collectives")
def test_without_collectives_each_rank_has_a_commit_of_its_own(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    pool.run(quietly, _save_together, path, 1.0)
    pool.run(quietly, _save_apart, path, 2.0)
    for ref in ("latest", 2):
        assert pool.run(quietly, load_alone, path, ref, 2.0) == [0, 1, 2, 3]
    assert (
        len(set(pool.run(quietly, load_alone, path, 1, 1.0))) == 1
    )  # DCP saves the objects of one rank only
    with ckptstore.open(path) as store:
        assert set(store.runs()) == {"main", *(f"main/rank-{rank}" for rank in range(4))}


def load_latest_of_two(rank: int, path: Path, refs: list[int]) -> str:
    try:
        dcp.load({"w": torch.zeros(3)}, storage_reader=StoreReader(path, refs[rank]))
    except CheckpointException as error:
        return str(error)
    return "loaded"


def test_ranks_that_find_different_commits_do_not_mix_them(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckptstore.open(path) as store:
        for step in (1, 2):
            store.commit({"w": torch.full((3,), float(step))}, step=step)
    assert all(
        "different commits" in text
        for text in pool.run(quietly, load_latest_of_two, path, [1, 1, 2, 1])
    )
    assert set(pool.run(quietly, load_latest_of_two, path, [2, 2, 2, 2])) == {"loaded"}


def save_with_a_full_disk(rank: int, path: Path) -> str:
    values = {
        f"w{each}": placed(torch.randn(4, 1 << 19), mesh_of(4, False), (Shard(0),))
        for each in range(4)
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        dcp.save(values, storage_writer=StoreWriter(path))
    except CheckpointException as error:
        return f"{sorted(error.failures)} {type(error.failures[2][0]).__name__}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "saved"


def test_a_worker_threads_failure_to_write_is_raised_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    """DCP's own writer, with two threads, publishes metadata with half of the entries."""
    pool.run(quietly, save_layouts, tmp_path / "store", 4)
    told = pool.run(quietly, save_with_a_full_disk, tmp_path / "store")
    assert set(told) <= {"[2] Unavailable", "[2] NoSpace"} and len(told) == 4
    with ckptstore.open(tmp_path / "store") as store:
        assert len(store.log()) == 1


def save_apart_with_rows_on_some(rank: int, path: Path) -> bool:
    meet(4)
    mesh = mesh_of(4, False)
    values = {"w": placed(torch.ones(2, 300), mesh, (Shard(0),)), "rank": rank}
    dcp.save(values, storage_writer=StoreWriter(path, step=1), use_collectives=False)
    found = {"w": placed(torch.zeros(2, 300), mesh, (Shard(0),)), "rank": -1}
    dcp.load(found, storage_reader=StoreReader(path, 1))
    return found["rank"] == rank and torch.equal(local(found["w"]), local(values["w"]))


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 has no use_collectives")
def test_a_rank_without_rows_of_a_tensor_saves_alone_as_the_others_do(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(quietly, save_apart_with_rows_on_some, tmp_path / "store") == [True] * 4


def save_differently(rank: int, path: Path, values: dict[int, Any]) -> str:
    try:
        dcp.save({"s": {"own": values.get(rank)}, "a": 1}, storage_writer=StoreWriter(path))
    except CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("holder", [0, 3])
def test_what_one_rank_has_below_the_item_of_another_is_not_dropped(
    pool: Pool, tmp_path: Path, holder: int
) -> None:
    values = {holder: {"x": torch.ones(3)}}
    for told in pool.run(quietly, save_differently, tmp_path / "store", values):
        assert "s.own" in told and "different names" in told, told


def save_divided_subclasses(rank: int, path: Path) -> str:
    meet(4)
    own = TwoTensor(torch.full((2, 300), float(rank)), torch.full((2, 300), float(rank)))
    values = {"w": DTensor.from_local(own, mesh_of(4, False), (Shard(0),), run_check=False)}
    try:
        dcp.save(values, storage_writer=StoreWriter(path))
    except CheckpointException as error:
        return str(error)
    return "saved"


def test_parts_that_are_no_plain_tensors_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(quietly, save_divided_subclasses, tmp_path / "store"):
        assert "w is a part of a tensor of shape [8, 300], as a TwoTensor" in told, told


def save_and_go_on_alone(rank: int, path: Path) -> tuple[str, ...] | None:
    """Rank 1 commits alone what follows a save of both, of which DCP tells rank 0."""
    meet(2)
    if rank > 1:
        return None
    with ckptstore.open(path) as store:
        ranks = ckptstore.Ranks(process_group=group_of(2))
        first = store.commit({"x": torch.zeros(3)}, step=0, ranks=ranks)
        metadata = dcp.save(
            {"x": torch.ones(3)}, storage_writer=StoreWriter(store), process_group=group_of(2)
        )
        if rank == 0:
            return None
        made = store.commit({"x": torch.ones(3)}, ranks=ckptstore.Ranks(process_group="alone"))
        assert metadata.storage_meta is not None
        return first.id, metadata.storage_meta.save_id, *made.parents


def test_each_rank_goes_on_from_what_the_coordinator_committed(pool: Pool, tmp_path: Path) -> None:
    (told,) = filter(None, pool.run(quietly, save_and_go_on_alone, tmp_path / "store"))
    first, saved, parent = told
    assert first != parent == saved
