"""States for the tests of the DCP interface, and how to compare them."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from tests.support.torch_release import OLD_TORCH

try:
    from torch.distributed.checkpoint import FsspecReader  # type: ignore[attr-defined]
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

__all__ = ["ASYNC", "NO_DIST", "OLD_TORCH", "FsspecReader", "nested", "same", "zeros"]

NO_DIST: dict[str, Any] = {} if OLD_TORCH else {"no_dist": True}
"""Tells DCP that no rank is beside this one. Torch 2.6 looks for itself, and warns."""

ASYNC = pytest.mark.skipif(
    OLD_TORCH, reason="torch 2.6 saves asynchronously only with a process group"
)


def nested() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": OrderedDict(
            w=torch.randn(300, 100), b=torch.randn(100).bfloat16(), empty=torch.empty(0, 3)
        ),
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(300, 100), "step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.1, "params": [0]}],
        },
        "progress": {
            "epoch": 3,
            "name": "run",
            "best": None,
            "pair": (1, 2.5),
            "raw": b"\x00\x01",
            "file": io.BytesIO(b"abc"),
        },
        "loss": 0.25,
    }


def zeros(state: Any) -> Any:
    """The same containers, with other content."""
    if isinstance(state, dict):
        return type(state)((key, zeros(value)) for key, value in state.items())
    if isinstance(state, list):
        return [zeros(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else 0


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, io.BytesIO):
        return isinstance(b, io.BytesIO) and a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)
