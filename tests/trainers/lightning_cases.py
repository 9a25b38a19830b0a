"""What tests of Lightning's plugin share: a small model, and trainers on a store."""

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from ckptstore.interop.lightning import AsyncStoreCheckpointIO, StoreCheckpointIO

ROOT = Path(__file__).parents[2]
KINDS = [StoreCheckpointIO, AsyncStoreCheckpointIO]


class Model(BoringModel):  # type: ignore[misc]
    def __init__(self, width: int = 2, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(32, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"])
        self.log("score", -float(abs(self.current_epoch - 1)))
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1 / (1 + self.global_step))


class Begins(pl.Callback):  # type: ignore[misc]
    """Notes the step at which a training begins."""

    steps: ClassVar[list[int]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps[:] = [trainer.global_step]


def trainer(tmp_path: Path, plugin: Any, **options: Any) -> Any:
    given = {
        "accelerator": "cpu",
        "max_epochs": 4,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "plugins": [plugin] if plugin else [],
    }
    return pl.Trainer(**(given | options))


def saver(tmp_path: Path, **options: Any) -> Any:
    given = {"dirpath": tmp_path / "ckpt", "filename": "{epoch}", "save_last": True}
    return ModelCheckpoint(**(given | options))


def fitted(tmp_path: Path, plugin: Any, callback: Any, **options: Any) -> Any:
    run = trainer(tmp_path, plugin, callbacks=[callback], **options)
    run.fit(Model(), BoringDataModule())
    return run


def files(tmp_path: Path) -> list[str]:
    """The checkpoints in the directory, beside which nothing lies but one list of commits that are
    to be forgotten."""
    found = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    hidden = [name for name in found if name.startswith(".")]
    assert len(hidden) <= 1 and all(name.endswith(".leaving") for name in hidden), hidden
    return [name for name in found if name not in hidden]


class Odd:
    value = 3
