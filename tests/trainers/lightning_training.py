"""A training by Lightning's Trainer, which `trainings` kills: a checkpoint per epoch, the best two
and the last, by the plugin that `settings.json` names. Each epoch's random numbers are its own."""

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.interop.lightning import AsyncStoreCheckpointIO, StoreCheckpointIO
from tests.trainers.trainings import Tell, digest

EPOCHS, BATCHES = 40, 4
PLUGINS = {"sync": StoreCheckpointIO, "async": AsyncStoreCheckpointIO}
DEFAULTS: dict[str, Any] = {"plugin": "async", "package": "lightning.pytorch", "epochs": EPOCHS}


def telling(kind: type[StoreCheckpointIO], tell: Tell) -> Any:
    """A plugin that tells of its saves."""

    class Telling(kind):  # type: ignore[misc, valid-type]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            tell("saving", checkpoint["global_step"])
            super().save_checkpoint(checkpoint, path, storage_options)

        def _publish(self, place: str, snapshot: Any) -> None:
            super()._publish(place, snapshot)
            if os.path.basename(place) == "last.ckpt":
                tell("saved", snapshot.step)

    return Telling


def made(pl: Any, tell: Tell) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(32, 600), torch.nn.Dropout(0.2), torch.nn.Linear(600, 2)
            )
            self.losses: list[float] = []

        def on_train_start(self) -> None:
            if self.trainer.ckpt_path:
                tell("resumed", self.trainer.global_step)

        def on_train_epoch_start(self) -> None:
            torch.manual_seed(1_000 * self.current_epoch + self.global_rank)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.layers(batch[0]).pow(2).mean()
            self.losses.append(loss.item())
            self.log("left", -float(self.global_step))  # each epoch is the best
            time.sleep(0.02)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["losses"] = list(self.losses)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.losses = checkpoint["losses"]

    return Model()


def train(folder: Path, tell: Tell) -> dict[str, Any]:
    path = folder / "settings.json"
    settings = DEFAULTS | (json.loads(path.read_text()) if path.exists() else {})
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    torch.set_num_threads(1)
    pl = importlib.import_module(settings["package"])
    world = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(8 * BATCHES * world, 32, generator=generator))
    model = made(pl, tell)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=settings["epochs"],
        plugins=[telling(PLUGINS[settings["plugin"]], tell)(folder / "store")],
        callbacks=[
            pl.callbacks.ModelCheckpoint(
                dirpath=folder / "checkpoints",
                filename="{epoch}",
                monitor="left",
                save_top_k=2,
                save_last=True,
                save_on_train_epoch_end=True,
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8, generator=generator), ckpt_path="last")
    optimizer = trainer.optimizers[0].state_dict()
    ours = model.losses if trainer.is_global_zero else []
    return {
        "state": digest(
            dict(model.state_dict()),
            optimizer,
            trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        ),
        "losses": digest(ours),
        "steps": trainer.global_step,
    }
