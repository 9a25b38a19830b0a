"""A small model and its engine, as the tests of DeepSpeed have them."""

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a compiler and minutes

MOMENTS = ("exp_avg", "exp_avg_sq")


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


class Experts(nn.Module):
    """Two experts behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, k=1)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(x)[0])


def new_moe_engine(*, seed: int = 3) -> Any:
    """An engine without ZeRO whose model has experts."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(seed)
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def learn(engine: Any, step: int) -> float:
    """One step on data that the step and the rank decide."""
    draw = torch.Generator().manual_seed(1_000 * step + engine.global_rank)
    x = torch.randn(4, 8, generator=draw)
    loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    return loss.item()


def weights(engine: Any) -> list[Any]:
    """The parameters by name, whole."""
    found = []
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append((name, parameter.detach().clone()))
    return found


def state(engine: Any) -> list[Any]:
    """What a training goes on with: weights, master weights and moments. At stage 3 without the
    padding of the shards, which is memory that nobody has written."""
    stage = engine.zero_optimization_stage()
    found: list[Any] = [engine.module.seen.clone(), engine.lr_scheduler.state_dict()]
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append([name, parameter.detach().clone()])
        if parameter.requires_grad and stage == 3:
            found.append(safe_get_full_fp32_param(parameter))
            found += [safe_get_full_optimizer_state(parameter, each) for each in MOMENTS]
    if stage in (1, 2):
        entries = engine.optimizer.optimizer.state.values()
        found += [[entry[each].clone() for each in MOMENTS] for entry in entries]
        found += [
            each.detach().clone() for each in engine.optimizer.single_partition_of_fp32_groups
        ]
    return found
