"""Tensors of a target that overlap each other or themselves take what was committed from such
tensors, and refuse contents of which some would be lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


Make = Callable[[], dict[str, torch.Tensor]]


def beside() -> dict[str, torch.Tensor]:
    base = torch.randn(1000)
    return {"a": base[:600], "b": base[400:]}


def fused() -> dict[str, torch.Tensor]:
    base = torch.randn(300, 10)
    return {"all": base, "first": base[:100], "second": base[100:200]}


def bytes_and_floats() -> dict[str, torch.Tensor]:
    base = torch.randn(400)
    return {"a": base, "b": base.view(torch.uint8)[800:]}


def itself() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(600).as_strided((500, 3), (1, 1))}


def in_turns() -> dict[str, torch.Tensor]:
    base = torch.randn(300, 4)
    return {"a": base[:, :2], "b": base[:, 2:]}


class Buffers(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


OVERLAPPING = [beside, fused, bytes_and_floats, itself]
KINDS: list[Callable[[dict[str, torch.Tensor]], Any]] = [dict, Buffers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [*OVERLAPPING, in_turns])
def test_what_was_committed_from_such_memory_comes_back_in_it(
    store: Store, make: Make, kind: Callable[[dict[str, torch.Tensor]], Any]
) -> None:
    wanted, there = make(), make()
    store.commit({"x": kind(wanted)}).restore({"x": kind(there)})
    for name, tensor in wanted.items():
        assert torch.equal(there[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", OVERLAPPING)
def test_contents_that_would_overwrite_each_other_are_refused_before_anything_changes(
    store: Store, make: Make, kind: Callable[[dict[str, torch.Tensor]], Any]
) -> None:
    there = make()
    before = {name: tensor.clone() for name, tensor in there.items()}
    other = {name: tensor.clone().fill_(n) for n, (name, tensor) in enumerate(before.items())}
    if make is itself:
        other = {"a": torch.arange(1500.0).view(500, 3)}
    snap = store.commit({"x": kind(other)})
    for strict in (True, False):
        with pytest.raises(InvalidInput, match=r"x/\w+: the commit has values of its own"):
            snap.restore({"x": kind(there)}, strict=strict)
    for name, tensor in before.items():
        assert torch.equal(there[name], tensor)
    apart = {name: tensor.clone() for name, tensor in before.items()}
    snap.restore({"x": kind(apart)})
    assert all(torch.equal(apart[name], tensor) for name, tensor in other.items())


def test_contents_that_differ_only_where_nothing_is_shared_fit(store: Store) -> None:
    wanted, base = torch.randn(300, 4), torch.zeros(300, 4)
    there = {"a": base[:, :2], "b": base[:, 2:]}
    store.commit({"x": {"a": wanted[:, :2].clone(), "b": wanted[:, 2:].clone()}}).restore(
        {"x": there}
    )
    assert torch.equal(base, wanted)


def test_memory_that_is_shared_across_keys_is_tried_out_too(store: Store) -> None:
    base = torch.zeros(1000)
    snap = store.commit({"x": {"w": torch.ones(600)}, "y": {"w": torch.zeros(600)}})
    with pytest.raises(InvalidInput, match="values of its own"):
        snap.restore({"x": {"w": base[:600]}, "y": {"w": base[400:]}})
    assert not base.any()
    snap.restore({"x": {"w": base[:600]}})
    assert base.sum() == 600
