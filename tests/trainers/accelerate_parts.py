"""A small model, its data and its accelerator, as the tests of Accelerate have them."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Dropout draws random numbers, and the norm has buffers that a forward changes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Progress:
    """Where a training is: an object that a script registers."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def new_accelerator(folder: Path, *, limit: int | None = None, **loading: Any) -> Accelerator:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(folder / "project"),
            automatic_checkpoint_naming=True,
            total_limit=limit,
        ),
        dataloader_config=DataLoaderConfiguration(**{"use_seedable_sampler": True, **loading}),
    )


class Training:
    """All that a training script has, prepared."""

    def __init__(self, accelerator: Accelerator, *, seed: int = 7, width: int = 32) -> None:
        set_seed(seed)
        self.accelerator = accelerator
        net, x = Net(width), torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        # A generator of its own: an iterator that begins draws from the loader's generator, which
        # would otherwise be the one that dropout draws from.
        data = DataLoader(
            TensorDataset(x, x.sum(1, keepdim=True)),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator(),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            net,
            optimizer,
            data,
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9),
        )
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress)

    def learn(self, batch: Any) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.batch += 1
        self.progress.losses.append(loss.item())

    def steps(self, count: int) -> None:
        """Train for so many batches of one epoch."""
        for _, batch in zip(range(count), self.loader, strict=False):
            self.learn(batch)

    def state(self) -> tuple[Any, ...]:
        return (
            self.accelerator.unwrap_model(self.model).state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.progress.state_dict(),
            torch.get_rng_state(),
        )
