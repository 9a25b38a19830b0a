"""Ranks that have seen other numbers of tokens (`trainings`). The first run saves, a later one
loads."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.torchtitan_parts import Training
from tests.trainers.trainings import Tell


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    training = Training(folder)
    if not training.manager.load():
        training.train(1)
        training.progress.ntokens_seen += 1_000 * int(os.environ["RANK"])
        training.train(2)
    training.close()
    return training.progress.state_dict()
