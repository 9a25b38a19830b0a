"""Ranks whose loaders remember their places save once, and go on from there."""

from pathlib import Path
from typing import Any

from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import Training, new_accelerator
from tests.trainers.trainings import Tell


def train(folder: Path, tell: Tell) -> Any:
    training = Training(new_accelerator(folder, use_stateful_dataloader=True))
    attached = attach(training.accelerator, folder / "store")
    resumed = attached.resume()
    training.steps(2)
    training.accelerator.save_state()
    training.accelerator.end_training()
    return resumed
