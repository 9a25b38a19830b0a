"""Pipeline stages, each sharded over its own mesh, with its own optimizer: one state for any number
of stages.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ckptstore
from tests.distributed.pool import Pool

LAYERS = 4


class Stage(nn.Module):
    """Some of the layers, under their names in the whole model. The first and the last stage have
    the tied embedding.
    """

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(40, 40) for i in range(first, stop)})
        if first == 0 or stop == LAYERS:
            self.embed = nn.Embedding(70, 40)


@cache
def mesh_of_stage(ranks: tuple[int, ...]) -> DeviceMesh:
    """Every rank of the pool must call this."""
    return DeviceMesh("cpu", list(ranks))


def sharded(rank: int, stages: int, value: float) -> tuple[Stage, torch.optim.Optimizer]:
    """This rank's stage of several with four ranks, all elements equal to `value`."""
    each = 4 // stages
    meshes = [mesh_of_stage(tuple(range(i * each, (i + 1) * each))) for i in range(stages)]
    number = rank // each
    stage = Stage(number * LAYERS // stages, (number + 1) * LAYERS // stages)
    for parameter in stage.parameters():
        nn.init.constant_(parameter, value)
    fully_shard(stage, mesh=meshes[number])
    return stage, torch.optim.AdamW(stage.parameters(), lr=0.01)


def step(stage: Stage, optimizer: torch.optim.Optimizer) -> None:
    """A step whose gradients depend on the parameters' names."""
    for name, parameter in stage.named_parameters():
        parameter.grad = torch.full_like(parameter, sum(map(ord, name)) % 7 + 1.0)
    optimizer.step()


def contents(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """One element of each parameter and each moment."""
    found = {}
    for name, parameter in stage.named_parameters():
        found[name] = parameter.full_tensor().flatten()[0].item()
        found |= {
            f"{name}/{key}": value.full_tensor().flatten()[0].item()
            for key, value in moments(optimizer, parameter).items()
        }
    return found


def moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: value for key, value in optimizer.state[parameter].items() if key != "step"}


def commit_stages(rank: int, path: Path, stages: int) -> dict[str, float]:
    stage, optimizer = sharded(rank, stages, 1.0)
    step(stage, optimizer)
    with ckptstore.open(path) as store:
        store.commit({"model": stage, "optimizer": optimizer}, step=stages)
    return contents(stage, optimizer)


def restore_stages(rank: int, path: Path, committed: int, stages: int) -> dict[str, float]:
    stage, optimizer = sharded(rank, stages, 0.0)
    with ckptstore.open(path) as store:
        # A stage takes its part of the whole.
        store.checkout(committed).restore({"model": stage, "optimizer": optimizer}, strict=False)
        store.commit({"model": stage, "optimizer": optimizer}, step=10 * committed + stages)
    assert all(
        optimizer.state[parameter]["exp_avg"].device_mesh == parameter.device_mesh
        for parameter in stage.parameters()
    )
    return contents(stage, optimizer)


def test_stages_become_fewer_and_more(pool: Pool, tmp_path: Path) -> None:
    wanted: dict[str, float] = {}
    for found in pool.run(commit_stages, tmp_path / "store", 2):
        wanted |= found
    assert {"layers.0.weight/exp_avg", "layers.3.bias/exp_avg_sq", "embed.weight"} < set(wanted)
    for committed, stages in ((2, 1), (21, 4)):
        results = pool.run(restore_stages, tmp_path / "store", committed, stages)
        assert set().union(*results) == set(wanted)
        assert all(wanted[name] == value for found in results for name, value in found.items())


def commit_by_number(rank: int, path: Path) -> None:
    """Optimizer moments of two stages under one number are refused, although they are equal."""
    stage, optimizer = sharded(rank, 2, 1.0)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with ckptstore.open(path) as store:
        with pytest.raises(
            ckptstore.Conflict,
            match=r"state/0/exp_avg is named by a number .* ranks \[0, 1\] and ranks \[2, 3\]",
        ):
            store.commit({"optimizer": optimizer})
        assert store.log() == []
        store.commit({"model": stage, "optimizer": optimizer})


def test_a_number_that_means_other_parameters_elsewhere_is_refused(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(commit_by_number, tmp_path / "store")
