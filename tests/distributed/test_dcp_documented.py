"""DCP's documentation and tests of several ranks: failures in any stage, loads into another kind of
tensor, and modules that are tensor parallel, hybrid or both.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.distributed.layouts import full, local, meet, mesh_of, placed, quietly, sharded
from tests.distributed.pool import Pool
from tests.distributed.test_dcp_training import net, trained
from tests.interop.dcp_states import same
from tests.support.torch_release import FSDP2

# -- failures --

SAVING = {
    "set_up_planner": 1,
    "create_local_plan": 3,
    "create_global_plan": 0,
    "finish_plan": 2,
    "resolve_data": 3,
}
LOADING = {
    "set_up_planner": 2,
    "create_local_plan": 1,
    "create_global_plan": 0,
    "finish_plan": 3,
    "resolve_tensor": 1,
}
"""The rank on which a planner fails, by stage."""


def failing(base: Any, where: str, fails: bool) -> Any:
    @functools.wraps(getattr(base, where))
    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError(f"failed in {where}")

    return type("Failing", (base,), {where: fail} if fails else {})()


def fail_in_every_stage(rank: int, path: Path) -> list[str]:
    meet(4)
    rows = lambda value: {"w": placed(full() + value, mesh_of(4, False), (Shard(0),)), "n": value}  # noqa: E731
    dcp.save(rows(1), storage_writer=StoreWriter(path))
    told = []
    for where, who in SAVING.items():
        with pytest.raises(
            CheckpointException, match=f"ArithmeticError: failed in {where}"
        ) as saving:
            dcp.save(
                rows(2),
                storage_writer=StoreWriter(path),
                planner=failing(DefaultSavePlanner, where, rank == who),
            )
        told.append(f"{where} {sorted(saving.value.failures)}")
    for where, who in LOADING.items():
        with pytest.raises(
            CheckpointException, match=f"ArithmeticError: failed in {where}"
        ) as loading:
            dcp.load(
                rows(0),
                storage_reader=StoreReader(path),
                planner=failing(DefaultLoadPlanner, where, rank == who),
            )
        told.append(f"{where} {sorted(loading.value.failures)}")
    found = rows(0)
    dcp.load(found, storage_reader=StoreReader(path))
    assert torch.equal(found["w"].to_local(), rows(1)["w"].to_local()) and found["n"] == 1
    dcp.save(rows(3), storage_writer=StoreWriter(path))
    return told


def test_a_planner_that_fails_on_one_rank_in_any_stage_is_raised_on_all(
    pool: Pool, tmp_path: Path
) -> None:
    wanted = [f"{where} [{who}]" for stages in (SAVING, LOADING) for where, who in stages.items()]
    assert pool.run(quietly, fail_in_every_stage, tmp_path / "store") == [wanted] * 4
    with ckptstore.open(tmp_path / "store") as store:
        assert [store.checkout(info.id).read("model/n") for info in store.log()] == [3, 1]
        assert not store.fsck(read_data="100%").damaged


# -- one kind of tensor loaded as another --


def grid(tensor: torch.Tensor) -> ShardedTensor:
    """A block of two by two for each of four ranks, as shards that are counted one by one instead
    of a chunk spec.
    """
    rank = dist.get_rank()
    rows, columns = (tensor.shape[0] + 1) // 2, (tensor.shape[1] + 1) // 2
    offsets = [rank // 2 * rows, rank % 2 * columns]
    part = tensor[offsets[0] : offsets[0] + rows, offsets[1] : offsets[1] + columns].clone()
    return init_from_local_shards(
        [LocalShard.from_tensor_and_offsets(part, offsets, rank)], *tensor.shape
    )


KINDS = {
    "rows": lambda tensor: sharded(tensor, 4),
    "grid": grid,
    "dtensor": lambda tensor: placed(tensor, mesh_of(4, False), (Shard(1),)),
    "plain": lambda tensor: tensor.clone(),
}


def switch(rank: int, path: Path) -> None:
    meet(4)
    dcp.save(
        {name: make(full() + i) for i, (name, make) in enumerate(KINDS.items())},
        storage_writer=StoreWriter(path),
    )
    for make in KINDS.values():
        found = {name: make(torch.zeros_like(full())) for name in KINDS}
        dcp.load(found, storage_reader=StoreReader(path))
        for i, name in enumerate(KINDS):
            assert torch.equal(local(found[name]), local(make(full() + i))), name


def test_sharded_tensors_dtensors_and_plain_ones_are_loaded_as_each_other(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(quietly, switch, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert all(
            torch.equal(store.checkout().read(f"model/{name}"), full() + i)
            for i, name in enumerate(KINDS)
        )


# -- tensor parallel, hybrid, and both --

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def tensor_parallel(mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(net(), mesh["tp"], PLAN)


def both(mesh: DeviceMesh) -> torch.nn.Module:
    module = tensor_parallel(mesh)
    fully_shard(module, mesh=mesh["dp"])
    return module


def hybrid(mesh: DeviceMesh) -> torch.nn.Module:
    module = net()
    fully_shard(module, mesh=mesh)
    return module


MODULES = {"tensor parallel": tensor_parallel, "both": both, "hybrid": hybrid}


def move(rank: int, path: Path) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    whole = {}
    for kind, make in MODULES.items():
        module = make(mesh)
        optimizer = trained(module, 2)
        dcp.save(
            state_of(module, optimizer),
            checkpoint_id=kind.replace(" ", "-"),
            storage_writer=StoreWriter(path),
        )
        whole[kind] = state_of(module, optimizer, StateDictOptions(full_state_dict=True))
    makers = list(MODULES.values())
    for (saved, wanted), make in zip(whole.items(), makers[1:] + makers[:1], strict=True):
        module = make(mesh)
        optimizer = trained(module, 1)
        found = state_of(module, optimizer)
        dcp.load(found, checkpoint_id=saved.replace(" ", "-"), storage_reader=StoreReader(path))
        set_state_dict(
            module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
        )
        assert same(state_of(module, optimizer, StateDictOptions(full_state_dict=True)), wanted), (
            saved
        )


def state_of(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    model, optim = get_state_dict(module, optimizer, options=options)
    return {"model": dict(model), "optim": optim}


@FSDP2
def test_training_moves_between_tensor_parallel_hybrid_and_both(pool: Pool, tmp_path: Path) -> None:
    pool.run(quietly, move, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert store.checkout("both").state_dict()["model"]["0.weight"].shape == (50, 30)
