"""Each rank reads its part of a data set by torchdata's loader with workers, commits in the middle
of the epoch, and goes on (`trainings`)."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckptstore
from tests.trainers.trainings import Tell

SAMPLES = 96
BATCHES = 3
"""So many are read before the commit."""


def loader_of(sampler: type[DistributedSampler[Any]] = StatefulDistributedSampler) -> Any:
    data = list(range(SAMPLES))
    order = sampler(data, shuffle=True, seed=5)  # type: ignore[arg-type]
    return StatefulDataLoader(
        data, batch_size=2, sampler=order, num_workers=2, generator=torch.Generator()
    )


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    told: dict[str, Any] = {"rank": int(os.environ["RANK"]), "seen": []}
    loader = loader_of()
    state = {"loader": loader, "model": model, "epoch": {"at": 0}}
    with ckptstore.open(folder / "store") as store:
        if not store.log():
            batches = iter(loader)
            told["seen"] = [n for _ in range(BATCHES) for n in next(batches).tolist()]
            state["epoch"]["at"] = 7
            store.commit(state, step=1)
        else:
            before = model.weight.detach().clone()
            try:
                store.resume(state)
            except ckptstore.InvalidInput as error:
                told["refused"] = str(error)
                told["unchanged"] = torch.equal(model.weight, before)
                store.resume(state, without=["loader"])
            told["epoch"] = state["epoch"]["at"]
            told["seen"] = [n for batch in loader for n in batch.tolist()]
    dist.destroy_process_group()
    return told
