"""Training runs with everything that a script may hold, and how one is resumed from a store by a
process that knows only its case."""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckptstore
from ckptstore.state.stateful import RNGState, StateDict
from tests.state.describing import digest

STEPS = 20


class Tied(nn.Module):
    """An embedding tied to the head, batch norm, dropout, a buffer that is not saved, and state
    that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.seen = {"batches": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count()
        return self.head(self.body(self.norm(self.embed(x))))  # type: ignore[no-any-return]

    @torch.compiler.disable
    def _count(self) -> None:
        self.seen["batches"] += 1

    def get_extra_state(self) -> Any:
        return dict(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


class WideAdamW(torch.optim.Optimizer):
    """AdamW that keeps fp32 moments and an fp32 copy of parameters of any dtype, as trainings in
    bf16 do."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: Any, lr: float) -> None:
        state, gradient = self.state[parameter], parameter.grad.float()
        if not state:
            state.update(
                step=0,
                master=parameter.float(),
                first=torch.zeros_like(gradient),
                second=torch.zeros_like(gradient),
            )
        state["step"] += 1
        state["first"].lerp_(gradient, 0.1)
        state["second"].lerp_(gradient.square(), 0.01)
        state["master"].mul_(1 - lr * 0.01).addcdiv_(
            state["first"], state["second"].sqrt().add_(1e-8), value=-lr
        )
        parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "AdamW fp32": WideAdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, history_size=3, max_iter=2),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [5, 5, 15, 25], 0.5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 25),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.99**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 15), lr_scheduler.ExponentialLR(o, 0.9)], [15]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 15), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What a run is made of. `resumed_compiled` says it of the run that resumes, if that
    differs."""

    optimizer: str = "AdamW"
    scheduler: str = "none"
    dtype: str = "float32"
    scaler: bool = False
    workers: int | None = None
    compiled: bool = False
    resumed_compiled: bool | None = None


CASES: dict[str, Case] = {
    **{
        name: Case(name, dtype="bfloat16" if name == "AdamW fp32" else "float32")
        for name in OPTIMIZERS
    },
    **{name: Case(scheduler=name) for name in SCHEDULERS if name != "none"},
    "GradScaler": Case("SGD momentum", "MultiStepLR", scaler=True),
    "StatefulDataLoader": Case("AdamW", "OneCycleLR", workers=0),
    "StatefulDataLoader with workers": Case(workers=2),
    "compiled": Case(compiled=True),
    "compiled, resumed plain": Case(compiled=True, resumed_compiled=False),
    "plain, resumed compiled": Case(resumed_compiled=True),
}


class Run:
    """A training run with everything in its application state."""

    def __init__(self, case: Case, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model = Tied().to(getattr(torch, case.dtype))
        groups = [
            {"params": list(model.body.parameters()), "weight_decay": 0.1},
            {"params": [model.embed.weight]},
        ]
        self.model: Any = torch.compile(model, backend="eager") if case.compiled else model
        self.optimizer = OPTIMIZERS[case.optimizer](
            model.parameters() if case.optimizer == "LBFGS" else groups
        )
        self.scheduler = SCHEDULERS[case.scheduler](self.optimizer)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=3, enabled=case.scaler
        )
        self.loader = None if case.workers is None else _loader(case.workers, seed)
        self._batches: Iterator[Any] | None = None
        self.progress = StateDict(step=0, losses=[])
        parts = {
            "scheduler": self.scheduler,
            "loader": self.loader,
            "scaler": self.scaler if case.scaler else None,
        }
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "progress": self.progress,
        }
        self.state |= {key: value for key, value in parts.items() if value is not None} | {
            "rng": RNGState()
        }

    def train(self, steps: int) -> list[Any]:
        """Loss, learning rates and a draw of each generator, for every step."""
        return [self._step() for _ in range(steps)]

    def digest(self) -> str:
        """What the run is now; the loader aside, whose workers may be ahead."""
        modules = [
            dict(module.state_dict())
            for module in (getattr(self.model, "_orig_mod", self.model), self.average)
        ]
        averaged = {name.replace("_orig_mod.", ""): value for name, value in modules[1].items()}
        rest = [
            part.state_dict()
            for part in (self.optimizer, self.scheduler, self.scaler, RNGState())
            if part is not None
        ]
        return digest([modules[0], averaged, *rest, dict(self.progress)])

    def _step(self) -> Any:
        x = torch.randint(7, (6,)) if self.loader is None else self._next()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), x)
            self.scaler.scale(loss).backward()
            return loss

        loss = self._optimize(closure)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        self.average.update_parameters(self.model)
        self.progress["step"] += 1
        self.progress["losses"].append(loss)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return [loss, rates, torch.rand(1).item(), random.random(), np.random.rand()]

    def _optimize(self, closure: Any) -> float:
        if not self.scaler.is_enabled():
            # the closure's tensor
            return self.optimizer.step(closure).item()  # type: ignore[attr-defined,no-any-return]
        loss = closure()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()  # type: ignore[no-any-return]

    def _next(self) -> Any:
        """The next batch, of the next epoch where one ends."""
        for _ in range(2):
            # it is there
            self._batches = self._batches or iter(self.loader)  # type: ignore[arg-type]
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None
        raise AssertionError("an epoch without batches")


def _loader(workers: int, seed: int) -> "StatefulDataLoader[Any]":
    data: Any = [i % 7 for i in range(50)]
    # Each has a generator of its own: an iterator draws a seed from the loader's, and torchdata
    # puts back the sampler's only.
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="'set_vital' is deprecated"
        )  # torchdata 0.11 calls it
        return StatefulDataLoader(
            data,
            batch_size=6,
            sampler=sampler,
            drop_last=True,
            num_workers=workers,
            generator=generator,
        )


def resume(place: str, commit: str, name: str, warm_up: int) -> list[Any]:
    """In a process that knows only `name`: a new run, `warm_up` steps of its own, the commit's
    state, `STEPS` steps; what they gave."""
    case = CASES[name]
    compiled = case.compiled if case.resumed_compiled is None else case.resumed_compiled
    run = Run(
        Case(case.optimizer, case.scheduler, case.dtype, case.scaler, case.workers, compiled),
        seed=warm_up + 2,
    )
    if case.workers is None:
        run.train(warm_up)
    with ckptstore.open(place, read_only=True) as store:
        store.checkout(commit).restore(run.state)
    return [run.train(STEPS), run.digest()]
