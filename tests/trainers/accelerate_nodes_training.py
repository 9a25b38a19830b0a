"""Ranks with disks of their own, of which the first has the pointer and a hook that changes
weights. Returns what a rank has of these weights after loads by directory, by tag and of the
newest."""

from pathlib import Path
from typing import Any

import torch

from ckptstore import Ranks
from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import Training, new_accelerator
from tests.trainers.trainings import Tell

NAME = "layers.0.bias"


def train(folder: Path, tell: Tell) -> Any:
    training = Training(new_accelerator(folder))
    accelerator = training.accelerator
    accelerator.project_configuration.automatic_checkpoint_naming = False
    attach(accelerator, folder / "store", ranks=Ranks(timeout_s=120))
    disk = folder / f"disk-{accelerator.process_index}"

    def change(models: list[Any], weights: list[Any], directory: str) -> None:
        if accelerator.is_main_process:
            name = next(each for each in weights[0] if each.endswith(NAME))
            weights[0][name] = torch.full_like(weights[0][name], 3.0)

    accelerator.register_save_state_pre_hook(change)
    accelerator.save_state(disk / "step_1", tag="good")
    bias = dict(accelerator.unwrap_model(training.model).named_parameters())[NAME]
    found = []
    for place in (disk / "step_1", "good", None):
        with torch.no_grad():
            bias.fill_(accelerator.process_index)
        accelerator.load_state(place)
        found.append(bias.mean().item())
    accelerator.end_training()
    return found
