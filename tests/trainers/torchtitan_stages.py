"""A model in two parts, each on a rank of its own as with pipeline parallelism, or both on one
(`trainings`). A run loads, trains two steps, and saves."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.trainers.torchtitan_parts import VOCABULARY, Training
from tests.trainers.trainings import Tell, digest


class Stages(nn.ModuleDict):
    """The parts with these numbers."""

    def __init__(self, numbers: range) -> None:
        super().__init__({f"part{n}": nn.Linear(VOCABULARY, VOCABULARY) for n in numbers})

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = nn.functional.one_hot(words, VOCABULARY).float()
        return torch.stack([part(found) for part in self.values()]).sum(0)


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    training = Training(folder, Stages(range(rank, rank + 1) if ranks > 1 else range(2)))
    loaded = training.manager.load()
    before = parts(training)
    training.train(training.progress.step + 2)
    training.close()
    return {"loaded": loaded, "before": before, "after": parts(training)}


def parts(training: Training) -> dict[str, str]:
    """What each part and its optimizer have."""
    optimizer = training.optimizers.state_dict()
    return {
        name: digest(
            dict(part.state_dict()), {key: optimizer[key] for key in optimizer if name in key}
        )
        for name, part in training.model.items()  # type: ignore[operator]
    }
