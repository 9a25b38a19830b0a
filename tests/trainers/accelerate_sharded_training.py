"""Two ranks save and load a model of FSDP2 with Accelerate, which starts FSDP on accelerators only:
the model is sharded by hand."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import new_accelerator
from tests.trainers.trainings import Tell, digest


def train(folder: Path, tell: Tell) -> Any:
    accelerator = new_accelerator(folder)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=0.1))
    accelerator._models.append(net)

    def learn() -> None:
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> str:
        moments = [entry["exp_avg"].full_tensor() for entry in optimizer.state.values()]
        return digest([each.full_tensor() for each in net.parameters()], moments)

    attach(accelerator, folder / "store")
    learn()
    accelerator.save_state(folder / "step_2")
    wanted = state()
    learn()
    changed = state() != wanted
    accelerator.load_state(folder / "step_2")
    same = state() == wanted
    accelerator.end_training()
    return changed and same
