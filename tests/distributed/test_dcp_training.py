"""Training through DCP moves between FSDP1, FSDP2 and DistributedDataParallel, and numbers of
ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.distributed.layouts import group_of, meet, mesh_of, quietly
from tests.distributed.pool import Pool
from tests.support.torch_release import FSDP2


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


@FSDP2
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
