"""A small model and its engine, as the tests of DeepSpeed have them."""

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    """A buffer that a forward changes, and a frozen layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.relu(self.frozen(self.first(x))))


def new_engine(stage: int = 1, *, seed: int = 3, width: int = 64, **config: Any) -> Any:
    """An engine of ZeRO `stage`, on all ranks."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(seed)
    net = Net(width)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        model_parameters=trained,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 1_000_000,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    return engine


def learn(engine: Any, step: int) -> float:
    """One step on data that the step and the rank decide."""
    draw = torch.Generator().manual_seed(1_000 * step + engine.global_rank)
    x = torch.randn(4, 8, generator=draw)
    loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    return loss.item()


def state(engine: Any) -> list[Any]:
    """What this rank trains with: weights, its share of the master weights and the moments."""
    optimizer = engine.optimizer
    shares = [
        [value.clone() for value in entry.values() if isinstance(value, torch.Tensor)]
        for entry in optimizer.optimizer.state.values()
    ]
    weights = [
        getattr(each, "ds_tensor", each).detach().clone() for each in engine.module.parameters()
    ]
    return [weights, shares, engine.module.seen.clone(), engine.lr_scheduler.state_dict()]
