"""Train with Lightning's Trainer, go on from the last checkpoint, and load the best one.

    python examples/trainers/train_with_lightning.py

The store and the pointer files are in a temporary folder, so that nothing is left behind.
"""

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore.interop.lightning import AsyncStoreCheckpointIO


class Model(L.LightningModule):  # type: ignore[misc]  # Lightning has no types for mypy here
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(folder: Path) -> None:
    inputs = torch.randn(256, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32)
    for epochs in (5, 10):  # the second training goes on where the first one ended
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=[
                ModelCheckpoint(folder / "out", monitor="val_loss", save_top_k=3, save_last=True)
            ],
            plugins=[AsyncStoreCheckpointIO(folder / "checkpoints")],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(Model(), data, data, ckpt_path="last")
        print(f"trained to step {trainer.global_step}")
    with ckptstore.open(folder / "checkpoints") as store:
        best = store.checkout("best:val_loss")
        print(f"{len(store.log())} commits; the best is of step {best.step}: {best.metrics}")
        model = Model.load_from_checkpoint(best)
        print(f"{sum(p.numel() for p in model.parameters())} weights of the best one loaded")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
