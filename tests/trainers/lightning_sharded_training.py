"""Trainings by Lightning with `ModelParallelStrategy` (FSDP2) on gloo ranks, whose checkpoints are
DCP's: in files, and within `redirect`."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.interop.dcp import redirect
from tests.trainers.trainings import Tell, digest


class Model(pl.LightningModule):  # type: ignore[misc]
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2)
            )
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def local(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def trained(place: Path, world: int) -> list[str]:
    """What two trainings end with, of which the second goes on where the first one ended."""
    generator = torch.Generator().manual_seed(3)
    data = DataLoader(TensorDataset(torch.randn(64, 16, generator=generator)), batch_size=8)
    states = []
    for epochs in (1, 2):
        saver = pl.callbacks.ModelCheckpoint(place, filename="{epoch}", save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
            max_epochs=epochs,
            callbacks=[saver],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Model()
        trainer.fit(model, data, ckpt_path="last")
        moments = [local(state) for state in trainer.optimizers[0].state_dict()["state"].values()]
        states.append(digest(trainer.global_step, local(dict(model.state_dict())), moments))
    return states


def train(folder: Path, tell: Tell) -> dict[str, Any]:
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    files = trained(folder / "files", world)
    with redirect(folder / "store"):
        return {"files": files, "store": trained(folder / "out", world)}
