"""A restore allocates no tensor that the target already has: torch's own allocator is asked, and
every tensor for its address."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ckptstore
from tests.state.drawing import composite

WIDTH = 256
TENSOR_BYTES = WIDTH * WIDTH * 4


def allocated_bytes(scenario: Callable[[], Any]) -> int:
    """What torch's CPU allocator has handed out while `scenario` ran, to this thread, which makes
    all tensors."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        scenario()
    return sum(max(event.self_cpu_memory_usage, 0) for event in recorded.events())


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_of(list(value.state.values()))
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for child in value:
            yield from tensors_of(child)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def trained(**options: Any) -> Callable[[], Any]:
    """A module and an optimizer that has made a step."""

    def make() -> Any:
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), **options)
        module(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        return {"model": module, "optimizer": optimizer}

    return make


def containers() -> Any:
    weight = torch.randn(WIDTH, WIDTH)
    return {
        "d": {
            "w": weight,
            "tied": weight,
            "column": torch.randn(WIDTH, WIDTH).t(),
            "l": [torch.randn(WIDTH), (torch.randn(2, WIDTH), 1)],
        }
    }


TARGETS: dict[str, Callable[[], Any]] = {
    "module": lambda: {"model": model()},
    "compiled module": lambda: {"model": torch.compile(model(), backend="eager")},
    "AdamW": trained(foreach=False),
    "AdamW foreach": trained(foreach=True),
    "AdamW fused": trained(fused=True),
    "containers": containers,
    "parameters": lambda: {
        "p": nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH, WIDTH))}),
        "q": [nn.Parameter(torch.randn(WIDTH, WIDTH))],
    },
    "composites": lambda: {
        "s": {
            name: composite(name, seed=1)
            for name in ("COO", "CSR", "qint8", "quint8 per channel", "jagged", "subclass")
        }
    },
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_restore_allocates_no_tensor_that_is_there(kind: str, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        snap = store.commit(TARGETS[kind]())
        target = TARGETS[kind]()
        there = [
            (id(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0)
            for tensor in tensors_of(target)
        ]
        assert allocated_bytes(lambda: snap.restore(target)) < TENSOR_BYTES // 8
        assert [
            (id(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0)
            for tensor in tensors_of(target)
        ] == there


def test_the_allocator_is_asked() -> None:
    """The yardstick itself."""
    assert allocated_bytes(lambda: torch.empty(1 << 20, dtype=torch.bfloat16)) >= 2 << 20
    assert allocated_bytes(lambda: torch.ones(1 << 20).to(torch.bfloat16)) >= 6 << 20
    assert allocated_bytes(lambda: None) == 0
