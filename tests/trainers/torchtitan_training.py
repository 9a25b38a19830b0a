"""A transformer, sharded over two ranks, with asynchronous saves (`trainings`). The folder may have
a file that says how many steps it trains."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.trainers.torchtitan_parts import Training, Transformer
from tests.trainers.trainings import Tell

STEPS = 16


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    told = folder / "steps"
    steps = int(told.read_text()) if told.exists() else STEPS
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model: Any = Transformer()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(
        folder, model, rank=rank, ranks=ranks, keep_latest_k=1, last_save_model_only=False
    )
    if training.manager.load():
        tell("resumed", training.progress.step)
    for step in range(training.progress.step + 1, steps + 1):
        training.train(step, save=False)
        if step % 2 == 0:
            tell("saving", step)
        training.manager.save(step, last_step=step == steps)
        if (saving := training.manager.save_future) is not None and step % 2 == 0:
            saving.add_done_callback(lambda saved, at=step: saved.result() or tell("saved", at))
    training.close()
    dist.destroy_process_group()
    return training.digest()
