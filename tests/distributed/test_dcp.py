"""`dcp.save` and `dcp.load` on a store over ranks: every layout onto every other, native and back;
a failure is raised on all ranks.
"""

import multiprocessing
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.distributed.layouts import full, group_of, meet, mesh_of, placed
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


def sharded(tensor: torch.Tensor, n: int) -> ShardedTensor:
    rank, rows = dist.get_rank(group_of(n)), -(-tensor.shape[0] // n)
    local = tensor[rank * rows : (rank + 1) * rows].clone()
    shard = LocalShard.from_tensor_and_offsets(local, [rank * rows, 0], dist.get_rank())
    return init_from_local_shards([shard], *tensor.shape, process_group=group_of(n))


def local(value: Any) -> torch.Tensor:
    if isinstance(value, ShardedTensor):
        return value.local_shards()[0].tensor
    return value.to_local() if hasattr(value, "to_local") else value


def quietly(rank: int, task: Any, *args: Any) -> Any:
    """Silences DCP's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task(rank, *args)


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
    for saved in (1, 2, 4):
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
        for saved in (1, 2, 4):
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


def save_cached(rank: int, path: Path) -> None:
    for name in (
        "_cached_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_final_save_plan",
    ):
        getattr(DefaultSavePlanner, name).clear()
    meet(4)
    for step in range(4):
        values = {"w": placed(full() + step, mesh_of(4, False), (Shard(0),)), "step": step}
        dcp.save(
            values,
            storage_writer=StoreWriter(path, step=step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
def test_cached_plans_save_under_sessions_of_their_own(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    pool.run(quietly, save_cached, path)
    with ckptstore.open(path) as store:
        for step in range(4):
            snapshot = store.checkout(step)
            assert (
                torch.equal(snapshot.read("model/w"), full() + step)
                and snapshot.read("model/step") == step
            )
        assert store.sessions() == ()
        assert not store.fsck(read_data="100%").findings


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


def save_async(rank: int, path: Path, kind: str, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    values = {"w": placed(full(), mesh_of(n, False), (Shard(0),)), "plain": full()}
    with checkpointing(kind) as options:
        future = dcp.async_save(
            values,
            checkpoint_id=kind,
            storage_writer=StoreWriter(path),
            process_group=group_of(n),
            **options,
        )
        values["w"].to_local().zero_()
        values["plain"].zero_()
        assert future.result().storage_meta.save_id
        failing = dcp.async_save(
            {"x": object()}, storage_writer=StoreWriter(path), process_group=group_of(n), **options
        )
        with pytest.raises(BaseException, match=r"x.*register_value"):
            failing.result()


@contextmanager
def checkpointing(kind: str) -> Iterator[dict[str, Any]]:
    """Options of `async_save`; DCP's process ends with the block."""
    import torch.distributed.checkpoint._async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    multiprocessing.current_process()._config["daemon"] = (
        False  # a daemon, as a rank of the pool is, may have no children
    )
    try:
        yield {"async_checkpointer_type": AsyncCheckpointerType(kind)}
    finally:
        if (process := executor._CHECKPOINT_PROCESS) is not None:
            process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
            process._save_process.join()
            executor._CHECKPOINT_PROCESS = None
        multiprocessing.current_process()._config["daemon"] = True


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 knows no ways to save asynchronously but a thread")
@pytest.mark.parametrize(("kind", "n"), [("thread", 4), ("process", 2)])
def test_async_save_over_ranks(pool: Pool, tmp_path: Path, kind: str, n: int) -> None:
    path = tmp_path / "store"
    pool.run(quietly, save_async, path, kind, n)
    with ckptstore.open(path) as store:
        snapshot = store.checkout(kind)
        assert torch.equal(snapshot.read("model/w"), full()) and torch.equal(
            snapshot.read("model/plain"), full()
        )
        assert len(store.log()) == 1


class _FirstPlanner(DefaultSavePlanner):
    """DCP caches plans by class name."""


class _SecondPlanner(DefaultSavePlanner):
    """For the saves that overlap with those of `_FirstPlanner`."""


def save_overlapping(rank: int, path: Path, rounds: int, *, cached: bool) -> dict[int, str]:
    meet(4)
    groups = [
        dist.new_group(),
        dist.new_group(),
    ]  # with separate collectives
    mesh, writer, commits = mesh_of(4, False), StoreWriter(path), {}
    if cached:
        for name in (
            "_cached_save_plan",
            "_cached_all_plans",
            "_cached_global_plan",
            "_cached_metadata",
            "_cached_final_save_plan",
        ):
            getattr(DefaultSavePlanner, name).clear()
    for first in range(0, 2 * rounds, 2):
        saving = {}
        for step, group, planner in zip(
            (first, first + 1), groups, (_FirstPlanner, _SecondPlanner), strict=True
        ):
            values = {"w": placed(full() + step, mesh, (Shard(0),)), "step": step}
            options = {"planner": planner(enable_plan_caching=True)} if cached else {}
            saving[step] = dcp.async_save(
                values,
                checkpoint_id=str(step),
                storage_writer=writer,
                process_group=group,
                **options,
            )
            values["w"].to_local().zero_()
        for step, each in saving.items():
            commits[step] = str(each.result().storage_meta.save_id)
    for group in groups:
        dist.destroy_process_group(group)
    return commits


def _save_overlapping(rank: int, path: Path, rounds: int) -> dict[int, str]:
    return save_overlapping(rank, path, rounds, cached=False)


def _save_overlapping_cached(rank: int, path: Path, rounds: int) -> dict[int, str]:
    return save_overlapping(rank, path, rounds, cached=True)


def _check_overlapping(pool: Pool, path: Path, task: Any, rounds: int) -> None:
    ckptstore.open(path).close()
    told = pool.run(quietly, task, path, rounds)
    assert all(commits == told[0] for commits in told)
    with ckptstore.open(path) as store:
        assert {info.step: info.id for info in store.log(None)} == told[0]
        for step, commit in told[0].items():
            snapshot = store.checkout(commit)
            assert (
                torch.equal(snapshot.read("model/w"), full() + step)
                and snapshot.read("model/step") == step
            )
        assert store.sessions() == ()
        assert not store.fsck(read_data="100%").findings


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
@pytest.mark.parametrize("task", [_save_overlapping, _save_overlapping_cached])
def test_saves_over_ranks_overlap_through_one_writer(pool: Pool, tmp_path: Path, task: Any) -> None:
    _check_overlapping(pool, tmp_path / "store", task, 3)


@pytest.mark.soak
@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
@pytest.mark.parametrize("task", [_save_overlapping, _save_overlapping_cached])
def test_200_saves_over_ranks_overlap_through_one_writer(
    pool: Pool, tmp_path: Path, task: Any
) -> None:
    _check_overlapping(pool, tmp_path / "store", task, 100)
    print("200 saves of four ranks, two at a time through one writer: every one restored bit-equal")


# -- training --


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 7))


def trained(module: torch.nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        module(torch.randn(4, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def fsdp2(n: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    module = net()
    fully_shard(module[0], mesh=mesh_of(n, False))  # type: ignore[index]  # a Sequential
    fully_shard(module, mesh=mesh_of(n, False))
    return module


def fsdp1(n: int) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    module = FullyShardedDataParallel(
        net(), process_group=group_of(n), device_id=torch.device("cpu"), use_orig_params=True
    )
    FullyShardedDataParallel.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT)
    return module


def ddp(n: int) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(net(), process_group=group_of(n))


WRAPPERS = {"fsdp1": fsdp1, "fsdp2": fsdp2, "ddp": ddp}


def weights(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


def train_and_save(rank: int, path: Path, n: int, kind: str) -> list[torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    meet(n)
    if rank >= n:
        return []
    module = WRAPPERS[kind](n)
    optimizer = trained(module, 2)
    dcp.save(
        weights(module, optimizer),
        checkpoint_id=f"{kind}-{n}",
        storage_writer=StoreWriter(path),
        process_group=group_of(n),
    )
    if kind == "fsdp1":
        with whole(module):
            return list(module.state_dict().values())
    model, _ = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
    return [value.clone() for value in model.values()]


@contextmanager
def whole(module: torch.nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        yield


def load_and_train(rank: int, path: Path, name: str, n: int, kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    meet(n)
    if rank >= n:
        return
    module = WRAPPERS[kind](n)
    optimizer = trained(module, 1)
    found = weights(module, optimizer)
    dcp.load(found, checkpoint_id=name, storage_reader=StoreReader(path), process_group=group_of(n))
    set_state_dict(
        module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )
    again = weights(module, optimizer)
    dcp.save(
        again,
        checkpoint_id=f"{name}-{kind}-{n}",
        storage_writer=StoreWriter(path),
        process_group=group_of(n),
    )


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_training_moves_between_wrappers_and_numbers_of_ranks(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "store"
    trained_on_4 = pool.run(quietly, train_and_save, path, 4, kind)[0]
    for other in WRAPPERS:
        pool.run(quietly, load_and_train, path, f"{kind}-4", 2, other)
    with ckptstore.open(path) as store:
        state = store.checkout(f"{kind}-4").state_dict()
        assert all(map(torch.equal, state["model"].values(), trained_on_4))
        for other in WRAPPERS:
            again = store.checkout(f"{kind}-4-{other}-2").state_dict()
            for name, value in state["model"].items():
                assert torch.equal(again["model"][name], value), (other, name)
            for name, moments in state["optim"]["state"].items():
                assert all(
                    torch.equal(again["optim"]["state"][name][key], value)
                    for key, value in moments.items()
                ), (other, name)


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
