"""Two pipeline stages whose optimizers have their groups in different orders: the options of a
parameter are those that it had, on any rank, or the restore is refused."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckptstore
from ckptstore.errors import InvalidInput
from tests.distributed.pool import Pool
from tests.distributed.test_pipeline_stages import mesh_of_stage

RATES = {"weight": 0.5, "bias": 0.25}
ORDERS = (("weight", "bias"), ("bias", "weight"))


def staged(
    rank: int, stage: int, rates: dict[str, float], order: tuple[str, ...] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layer number `stage` on two ranks, with a group of weights and one of biases."""
    meshes = [mesh_of_stage((0, 1)), mesh_of_stage((2, 3))]
    model = nn.Sequential(OrderedDict({str(stage): nn.Linear(4, 4)}))
    fully_shard(model, mesh=meshes[rank // 2])
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[f"{stage}.{kind}"]], "lr": rates[kind]} for kind in order or ORDERS[stage]
    ]
    return model, torch.optim.AdamW(groups)


def commit(rank: int, path: Path) -> None:
    model, optimizer = staged(rank, rank // 2, RATES)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with ckptstore.open(path) as store:
        store.commit({"model": model, "optimizer": optimizer}, step=1)


def restore(rank: int, path: Path, crossed: bool, strict: bool) -> list[float]:
    """The rates of weight and bias after a restore; crossed: of the stage that was elsewhere."""
    stage = rank // 2 if not crossed else 1 - rank // 2
    model, optimizer = staged(rank, stage, {"weight": 7.0, "bias": 8.0}, ("weight", "bias"))
    with ckptstore.open(path) as store:
        store.checkout(1).restore(
            {"model": model, "optimizer": optimizer},
            strict=strict,
            select=lambda path: f"/{stage}." in path or "/param_groups/" in path,
        )
    return [group["lr"] for group in optimizer.param_groups]


def restore_crossed(rank: int, path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"groups differ: ranks had other options"):
        restore(rank, path, crossed=True, strict=True)


def test_options_stay_with_their_parameters_where_ranks_order_groups_differently(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    pool.run(commit, path)
    assert pool.run(restore, path, False, True) == [[0.5, 0.25]] * 4
    pool.run(restore_crossed, path)
    assert pool.run(restore, path, True, False) == [[7.0, 8.0]] * 4

    # One process takes both stages.
    model = nn.ModuleDict({str(stage): nn.Linear(4, 4) for stage in (0, 1)})
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [named[f"{stage}.{kind}"] for stage in (0, 1)], "lr": rate}
            for kind, rate in {"weight": 7.0, "bias": 8.0}.items()
        ]
    )
    state = {"model": model, "optimizer": optimizer}
    with ckptstore.open(path) as store:
        with pytest.raises(InvalidInput, match=r"groups differ"):
            store.checkout(1).restore(state)
        store.checkout(1).restore(state, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 8.0]
    assert len(optimizer.state) == 4
