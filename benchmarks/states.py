"""The states that are saved: a GPT with its Adam moments, many tiny tensors, one big tensor; and
how a step changes them.

Contents are uniform random floats from a fixed seed, so that nothing compresses and no two chunks
are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

WIDTH = 1024
LAYERS = 7
VOCABULARY = 32_000
GROUPS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
STRETCHES = 14


@dataclass(frozen=True, slots=True)
class State:
    """One application state, nested as a user would hand it in and flat by path; both hold the same
    tensors."""

    app: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def memories(self) -> list[memoryview]:
        """The raw bytes of every tensor, in order, without a copy."""
        return [tensor.view(-1).view(torch.uint8).numpy().data for tensor in self.tensors.values()]


def nest(tensors: dict[str, torch.Tensor]) -> State:
    """`model/w` becomes `app["model"]["w"]`."""
    app: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *parents, name = path.split("/")
        place = app
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tensor
    return State(app, tensors)


def _random(shapes: dict[str, tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(20)
    return nest(
        {
            path: torch.empty(shape).uniform_(-1, 1, generator=generator)
            for path, shape in shapes.items()
        }
    )


def gpt(scale: float = 1.0) -> State:
    """171 float32 tensors, 1.45 GB: 57 parameters (7 layers of 8, one embedding) and two moments of
    each. `scale` shrinks the width."""
    return _random(
        {f"{group}/{name}": shape for group in GROUPS for name, shape in gpt_shapes(scale).items()}
    )


def gpt_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """The parameters of `gpt()`."""
    width = max(int(WIDTH * scale), 8)
    return dict(_layer_shapes(width)) | {"embedding.weight": (VOCABULARY * width // WIDTH, width)}


def _layer_shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(LAYERS):
        yield f"layers.{layer}.attention.qkv.weight", (3 * width, width)
        yield f"layers.{layer}.attention.out.weight", (width, width)
        yield f"layers.{layer}.mlp.up.weight", (4 * width, width)
        yield f"layers.{layer}.mlp.down.weight", (width, 4 * width)
        for norm in ("norm1", "norm2"):
            yield f"layers.{layer}.{norm}.weight", (width,)
            yield f"layers.{layer}.{norm}.bias", (width,)


def four_mib_tensors() -> list[str]:
    """Paths of `gpt()` whose tensors have 4 MiB."""
    return [f"model/layers.{layer}.attention.out.weight" for layer in range(LAYERS)]


def tiny(scale: float = 1.0) -> State:
    """20,000 tensors of 256 bytes."""
    return _random({f"model/t{i:05}": (64,) for i in range(max(int(20_000 * scale), 10))})


def big(scale: float = 1.0) -> State:
    """One tensor of 1 GB."""
    return _random({"model/weight": (int(250_000_000 * scale * scale),)})


def slabs(scale: float = 1.0) -> State:
    """Sixteen tensors of 16 MiB, or fewer."""
    return _random({f"model/w{i}": (1 << 22,) for i in range(max(int(16 * scale), 1))})


def small() -> State:
    """Eight tensors of 1 KiB: what is left of a commit's time is its fixed cost."""
    return _random({f"model/t{i}": (256,) for i in range(8)})


def blank(state: State) -> State:
    """Tensors of the same shapes in memory that has been touched, to restore into."""
    return nest({path: torch.ones_like(tensor) for path, tensor in state.tensors.items()})


def wipe(state: State) -> None:
    """So that a restore that does nothing is seen."""
    for tensor in state.tensors.values():
        tensor.zero_()


def require_equal(wanted: State, got: State, who: str) -> None:
    """A measurement of a restore that restored something else is worth nothing."""
    wrong = [
        path
        for path, tensor in wanted.tensors.items()
        if not torch.equal(tensor, got.tensors[path])
    ]
    if wrong:
        raise RuntimeError(
            f"{who} did not restore {len(wrong)} of {len(wanted.tensors)} tensors, the first of "
            f"them {wrong[0]}"
        )


def change_all(state: State) -> None:
    """A dense step."""
    for tensor in state.tensors.values():
        tensor.add_(1)


def layer_of(state: State, step: int) -> State:
    """The parameters and moments of the layer that changes in `step`, 10.4 % of `gpt()`."""
    tensors = {
        path: tensor
        for path, tensor in state.tensors.items()
        if f"/layers.{step % LAYERS}." in path
    }
    return State(tensors, tensors)


def change_one_layer(state: State, step: int) -> None:
    """Change all of a layer."""
    for tensor in layer_of(state, step).tensors.values():
        tensor.add_(1)


def change_one_percent(state: State, step: int) -> None:
    """1 % of the bytes, in 14 stretches at random places that know nothing of the chunk grid."""
    random = Random(step)
    tensors = list(state.tensors.values())
    elements = [tensor.numel() for tensor in tensors]
    stretch = max(sum(elements) // 100 // STRETCHES, 1)
    for tensor in random.choices(tensors, weights=elements, k=STRETCHES):
        start = random.randrange(max(tensor.numel() - stretch, 0) + 1)
        tensor.view(-1)[start : start + stretch].add_(1)
