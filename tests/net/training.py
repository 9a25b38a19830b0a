"""Random trainings, and what each of their tensors holds, by name."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from random import Random
from typing import Any

import torch

CHUNK_BYTES = 1 << 16
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0, 3),
    (1, 4),
    (4, 1),
    (7,),
    (130, 130),
    (1 << 14,),
    (2, 1 << 14),
    ((1 << 14) + 17,),
    (300, 250),
)
"""The last one has several chunks in single and in half precision, none of which is a multiple of a
page."""
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16)
FIXED = (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float16, torch.float64)
BLOCK = 1 << 10

Tensors = dict[str, torch.Tensor]


class Training:
    """A module whose parameters are known by name in whatever order, an optimizer of two groups,
    an average that shares some of the weights, masters of those of 16 bits, views of one base, and
    plain values."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.blocks = [torch.rand(BLOCK) + 0.5 for _ in range(8)]
        self.parameters = {
            f"p{n}": (random.choice(SHAPES), random.choice(DTYPES), random.random() < 0.3)
            for n in range(random.randint(3, 6))
        }
        self.buffers = {
            f"b{n}": (random.choice(SHAPES), random.choice(FIXED))
            for n in range(random.randint(0, 3))
        }
        names = sorted(self.parameters)
        self.tied = random.choice(names) if random.random() < 0.6 else None
        self.shared = random.sample(names, random.randint(0, 2))
        self.state = self.build()
        self.train()

    def build(self, reorder: bool = True) -> dict[str, Any]:
        """Objects of this training with zeros in them."""
        module, names = torch.nn.Module(), list(self.parameters)
        if reorder:
            self.random.shuffle(names)
        for name in names:
            shape, dtype, frozen = self.parameters[name]
            weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=not frozen)
            module.register_parameter(name, weight)
        if self.tied:
            module.register_parameter("tie", getattr(module, self.tied))
        for name, (shape, kind) in self.buffers.items():
            module.register_buffer(name, torch.zeros(shape).to(kind))
        moving = [name for name in names if not self.parameters[name][2]]
        first = [getattr(module, name) for name in moving if int(name[1:]) % 2]
        second = [getattr(module, name) for name in moving if not int(name[1:]) % 2]
        state: dict[str, Any] = {"model": module}
        if moving:
            groups = [{"params": first, "lr": 0.5}, {"params": second, "lr": 0.25}]
            state["optimizer"] = torch.optim.AdamW([group for group in groups if group["params"]])
        state["masters"] = {
            name: torch.zeros(shape)
            for name, (shape, dtype, _) in self.parameters.items()
            if dtype == torch.bfloat16
        }
        base = torch.zeros(64, 32)
        state["ema"] = {name: getattr(module, name).detach() for name in self.shared}
        state["views"] = {"base": base, "rows": base[8:16], "turned": base.t()}
        state["plain"] = {"text": "", "n": 0, "x": 0.0, "list": [0, 0], "none": None}
        return state

    def cast(self, state: dict[str, Any]) -> dict[str, torch.dtype] | None:
        """A cast of all, of moments, of weights, or of one weight under each of its names: what is
        tied is cast under all names. None if what is drawn has no floats of some dimension."""
        one = self.random.choice(sorted(self.parameters))
        names = [one, *(["tie"] if one == self.tied else [])]
        shares = [f"ema/{name}" for name in self.shared]
        globs = self.random.choice(
            [
                [] if self.buffers else ["**"],
                ["optimizer/**"],
                ["model/p*", *(["model/tie"] if self.tied else []), *shares],
                [f"model/{name}" for name in names] + [f"ema/{one}"] * (one in self.shared),
            ]
        )
        tensors = tensors_of(state)
        dims = {
            glob: any(tensor.dim() for name, tensor in tensors.items() if fnmatchcase(name, glob))
            for glob in globs
        }
        return dict.fromkeys(globs, torch.bfloat16) if globs and all(dims.values()) else None

    def divided_cast(self) -> dict[str, torch.dtype]:
        """A cast of some, but not all, of the leaves that share the memory of one weight or of the
        views."""
        groups = [["views/base", "views/rows", "views/turned"]]
        for name, (shape, dtype, _) in self.parameters.items():
            names = [f"model/{name}"]
            names += ["model/tie"] * (name == self.tied) + [f"ema/{name}"] * (name in self.shared)
            if len(names) > 1 and shape and 0 not in shape and dtype == torch.float32:
                groups.append(names)
        group = self.random.choice(groups)
        some = self.random.sample(group, self.random.randint(1, len(group) - 1))
        return dict.fromkeys(some, torch.bfloat16)

    def order(self, state: dict[str, Any]) -> list[str]:
        """The names of the optimizer's parameters, as it numbers them."""
        if "optimizer" not in state:
            return []
        names = {weight: name for name, weight in state["model"].named_parameters()}
        groups = state["optimizer"].param_groups
        return [names[weight] for group in groups for weight in group["params"]]

    def reorder(self) -> None:
        """The same training, its parameters registered in another order."""
        again, values = self.build(), tensors_of(self.state)
        if "optimizer" in again:
            start(again["optimizer"])
        for name, tensor in tensors_of(again).items():
            tensor.copy_(values[name])
        again["plain"] = self.state["plain"]
        self.state = again

    def train(self) -> None:
        """Write other values: some tensors change, some get what another place had before."""
        if optimizer := self.state.get("optimizer"):
            start(optimizer)
        for name, tensor in tensors_of(self.state).items():
            frozen = name.split("/")[1] in {n for n, spec in self.parameters.items() if spec[2]}
            if self.random.random() < (0.1 if frozen else 0.6) and tensor.is_contiguous():
                self.fill(tensor)
        for name, masters in self.state["masters"].items():
            if self.random.random() < 0.7:
                weights = getattr(self.state["model"], name).detach()
                weights.copy_(masters)
                if weights.numel() > 64 and self.random.random() < 0.3:
                    self.touch(weights)  # some are not what the masters round to
        number = self.random.randint(0, 1 << 40)
        self.state["plain"] = {
            "text": f"{number}",
            "n": number,
            "x": number / 3,
            "list": [number, -number],
            "none": None,
        }

    def fill(self, tensor: torch.Tensor) -> None:
        """All of a tensor, or some of its rows, often the first ones: then the chunks behind them
        stay where an earlier commit wrote them; or a few elements, so that chunks become patches of
        what they replace."""
        if tensor.numel() > 64 and self.random.random() < 0.4:
            self.touch(tensor)
            return
        if tensor.dim() and tensor.shape[0] > 1 and self.random.random() < 0.4:
            start = self.random.choice((0, self.random.randrange(tensor.shape[0])))
            tensor = tensor[start : self.random.randint(start + 1, tensor.shape[0])]
        count = -(-tensor.numel() // BLOCK)
        if count:
            drawn = torch.cat([self.random.choice(self.blocks) for _ in range(count)])
            if self.random.random() < 0.4:
                drawn = drawn * self.random.uniform(0.9, 1.1)
            with torch.no_grad():
                tensor.copy_(drawn[: tensor.numel()].reshape(tensor.shape))

    def nudge(self) -> None:
        """A step that changes a few elements of each tensor, as training in low precision does."""
        for tensor in tensors_of(self.state).values():
            if tensor.is_contiguous() and tensor.numel() > 64:
                self.touch(tensor)

    def touch(self, tensor: torch.Tensor) -> None:
        """Other values in a few elements, next to each other or anywhere."""
        count, total = self.random.randint(1, max(tensor.numel() // 24, 1)), tensor.numel()
        first = self.random.randrange(total - count + 1)
        at = range(first, first + count)
        if self.random.random() < 0.7:
            at = self.random.sample(range(total), count)
        values = torch.tensor([self.random.uniform(0.5, 1.5) for _ in at])
        with torch.no_grad():
            tensor.view(-1)[torch.tensor(at)] = values.to(tensor.dtype)


def start(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its moments."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight not in optimizer.state:
                optimizer.state[weight] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(weight.detach()),
                    "exp_avg_sq": torch.zeros_like(weight.detach()),
                }


def tensors_of(state: dict[str, Any]) -> Tensors:
    """Each tensor of a training, by key and name; moments by the name of their parameter."""
    found: Tensors = {}
    module = state.get("model")
    if module is not None:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        found |= {f"model/{name}": tensor.detach() for name, tensor in named}
        if "optimizer" in state:
            moments = state["optimizer"].state
            for name, weight in module.named_parameters():
                for moment, tensor in moments.get(weight, {}).items():
                    found[f"optimizer/{name}/{moment}"] = tensor
    for key in ("ema", "masters", "views"):
        found |= {f"{key}/{name}": tensor for name, tensor in state.get(key, {}).items()}
    return found


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_by_name(got: Tensors, wanted: Tensors, names: Iterable[str], where: str) -> None:
    for name in names:
        assert same(got[name], wanted[name]), (
            f"{where}: {name} {got[name].dtype}{list(got[name].shape)} is not what was committed"
        )
