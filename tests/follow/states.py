"""Random states with every kind of leaf, their changes, and what they look like bit by bit."""

import hashlib
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    torch.complex64,
)
SHAPES = ((), (0,), (3, 0), (1,), (7,), (64, 33), (5, 64, 64), (40_001,), (130, 257), (90_000,))


def made(random: Random) -> dict[str, Any]:
    """Nested or flat, with ties, views, empty tensors, scalars and plain values."""
    leaves: dict[str, Any] = {f"t{n}": _tensor(random) for n in range(random.randint(2, 6))}
    names = list(leaves)
    if random.random() < 0.6:
        leaves["tie"] = leaves[random.choice(names)]
    if random.random() < 0.6:
        base = _random(random, torch.bfloat16, (300, 260))
        leaves["base"], leaves["view"] = base, base[10:200]
        leaves["transposed"] = _random(random, torch.float32, (120, 300)).t()
    leaves["n"], leaves["text"] = random.randrange(100), "x" * random.randrange(9)
    if random.random() < 0.4:
        return leaves
    return {"model": leaves, "extra": {"list": [_tensor(random), {"deep": _tensor(random)}]}}


def _tensor(random: Random) -> torch.Tensor:
    return _random(random, random.choice(DTYPES), random.choice(SHAPES))


def _random(random: Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    _fill(random, tensor)
    return tensor


def _fill(random: Random, tensor: torch.Tensor) -> None:
    if tensor.numel():
        data = torch.frombuffer(bytearray(random.randbytes(tensor.nbytes)), dtype=torch.uint8)
        if tensor.dtype == torch.bool:
            data = data & 1
        tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list):
        for value in state:
            yield from tensors_in(value)


def change(random: Random, state: dict[str, Any]) -> None:
    """A few elements of some tensors, all of others, and the plain values."""
    for tensor in tensors_in(state):
        what = random.random()
        if what < 0.2:
            _fill(random, tensor)
        elif what < 0.6 and tensor.dim() and tensor.shape[0]:
            row = random.randrange(tensor.shape[0])
            _fill(random, tensor[row : row + 1])
    for values in (state, state.get("model", {})):
        if "n" in values:
            values["n"] = random.randrange(100)
            values["text"] = "y" * random.randrange(9)


def blank(state: Any) -> Any:
    """A target for the state, with memory of its own for what is not tied."""
    return _blank(state, {})


def _blank(state: Any, known: dict[tuple[int, Any, Any], torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        key = (state.data_ptr(), state.shape, state.dtype)
        if state.numel() == 0:
            return torch.empty_like(state)
        return known.setdefault(key, torch.zeros_like(state))
    if isinstance(state, Mapping):
        return {name: _blank(value, known) for name, value in state.items()}
    if isinstance(state, list):
        return [_blank(value, known) for value in state]
    return type(state)()


def bits(state: Any) -> Any:
    """What compares equal only for the same bits, dtypes, shapes and values."""
    if isinstance(state, torch.Tensor):
        data = state.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(state.dtype), tuple(state.shape), hashlib.blake2b(data).digest())
    if isinstance(state, Mapping):
        return {name: bits(value) for name, value in state.items()}
    if isinstance(state, list):
        return [bits(value) for value in state]
    return state
