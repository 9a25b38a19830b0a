"""The first rank cannot write the model, while the others wait in a barrier of the Trainer's."""

import os
from pathlib import Path
from typing import Any

from ckptstore.interop.transformers import attach
from tests.trainers.trainings import Tell
from tests.trainers.transformers_training import trainer_in


def train(folder: Path, _: Tell) -> Any:
    trainer = trainer_in(folder)
    if os.environ["RANK"] == "0":
        trainer.save_model = _fails
    with attach(trainer, folder / "store"):
        trainer.train()


def _fails(*_: Any, **__: Any) -> None:
    raise OSError("the disk is full")
