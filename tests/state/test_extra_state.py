"""A module's extra state is what its own class makes of it: it gets what was committed, whatever a
fresh module has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import InvalidInput


class Scaled(nn.Module):
    """A layer with a history of its own, as TransformerEngine's modules of FP8 have."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _bytes(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.uint8)


STATES: dict[str, Callable[[int], Any]] = {
    "bytes": _bytes,
    "none or bytes": lambda n: _bytes(n) if n else None,
    "dict": lambda n: {"scale": torch.ones(n) * n, "steps": n, "recipe": "x" * n},
    "by index": lambda n: {i: torch.full((i + 1,), float(n)) for i in range(n)},
    "list": lambda n: [torch.ones(i) for i in range(n)],
    "another dtype": lambda n: torch.ones(n, dtype=torch.float16 if n % 2 else torch.float64),
    "another kind": lambda n: {0: 1, 3: [torch.ones(3)], 9: torch.ones(9)}[n],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("select", [None, "model/*"])
@pytest.mark.parametrize(("saved", "fresh"), [(9, 0), (0, 9), (9, 3), (3, 9), (9, 9)])
@pytest.mark.parametrize("kind", STATES)
def test_extra_state_is_what_was_committed(
    kind: str, saved: int, fresh: int, select: str | None, strict: bool, tmp_path: Path
) -> None:
    make = STATES[kind]
    source, target = nn.Sequential(Scaled(make(saved))), nn.Sequential(Scaled(make(fresh)))
    there = target[0].extra
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": source})
        snapshot.restore({"model": target}, strict=strict, select=select)
    assert same(target[0].extra, make(saved))
    assert same(there, make(fresh))  # what the module had before is nobody's to write to
    assert torch.equal(source[0].linear.weight, target[0].linear.weight)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_wrapped_module_takes_its_extra_state(compiles: bool, tmp_path: Path) -> None:
    def wrapped(n: int) -> Any:
        module = nn.Sequential(Scaled(_bytes(n)))
        return torch.compile(module, backend="eager") if compiles else nn.DataParallel(module)

    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": wrapped(9)})
        for target in (wrapped(0), nn.Sequential(Scaled(_bytes(3)))):
            snapshot.restore({"model": target})
            (scaled,) = (each for each in target.modules() if isinstance(each, Scaled))
            assert torch.equal(scaled.extra, _bytes(9))


def test_a_part_of_an_extra_state_leaves_the_rest_of_it(tmp_path: Path) -> None:
    make = STATES["by index"]
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": Scaled(make(2))})
        target = Scaled({0: torch.zeros(1), 1: torch.zeros(2), 7: 7})
        snapshot.restore({"model": target}, select="model/_extra_state/1")
    assert same(target.extra, {0: torch.zeros(1), 1: torch.full((2,), 2.0), 7: 7})


def test_a_parameter_of_that_name_is_a_parameter(tmp_path: Path) -> None:
    def make(n: int) -> nn.Module:
        module = nn.Module()
        module._extra_state = nn.Parameter(torch.ones(n) * n)
        return module

    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": make(3)})
        with pytest.raises(InvalidInput, match="model/_extra_state"):
            snapshot.restore({"model": make(4)})


def test_an_extra_state_that_only_one_side_has_is_refused(tmp_path: Path) -> None:
    plain = nn.Module()
    plain.linear = nn.Linear(2, 2)
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"model": Scaled(_bytes(3))}, step=1)
        with pytest.raises(InvalidInput, match="model/_extra_state: in the commit, not wanted"):
            snapshot.restore({"model": plain})
        snapshot = store.commit({"model": plain}, step=2)
        with pytest.raises(InvalidInput, match="model/_extra_state: wanted by the target"):
            snapshot.restore({"model": Scaled(_bytes(3))})
