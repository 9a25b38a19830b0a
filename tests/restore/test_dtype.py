"""Floats restored as other floats on request, chunk by chunk and bit for bit like `Tensor.to`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import InvalidInput, NotFound
from ckptstore.state.tensors import FLOATS
from tests.restore.counting import peak_buffers
from tests.state.carrying import assert_same, tensor_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=64 << 10)
    ) as opened:
        yield opened


def test_the_floats_are_those_that_torch_converts() -> None:
    """A dtype that a new torch brings is one of these, or this test says so."""
    assert {torch.float64, torch.float32, torch.float16, torch.bfloat16} <= FLOATS
    for dtype in FLOATS:
        assert torch.ones(3).to(dtype).to(torch.float32).tolist() == [1, 1, 1]


def test_every_float_becomes_every_other(store: ckptstore.Store) -> None:
    committed = {str(dtype): torch.rand(300, 130).to(dtype) for dtype in FLOATS}
    snap = store.commit(committed)
    for name, whole in committed.items():
        for dtype in FLOATS:
            read = snap.read(name, (slice(1, 290), slice(2, 120)), dtype=dtype)
            assert read.dtype == dtype
            assert tensor_bytes(read) == tensor_bytes(whole[1:290, 2:120].to(dtype).contiguous()), (
                name,
                dtype,
            )


def state() -> dict[str, Any]:
    return {
        "weight": torch.randn(400, 300),
        "half": torch.randn(20).half(),
        "ids": torch.arange(1000),
        "flags": torch.tensor([True]),
        "complex": torch.randn(200, dtype=torch.complex64),
        "parameter": nn.Parameter(torch.randn(200)),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_channel(
            torch.randn(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8
        ),
        "array": np.random.default_rng(1).random(200),
        "lr": 0.5,
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
def test_a_state_dict_converts_floating_tensors_and_leaves_the_rest_alone(
    store: ckptstore.Store,
) -> None:
    committed = state()
    got = store.commit({"s": committed}).state_dict("s", dtype=torch.bfloat16)
    for name in ("weight", "half"):
        assert_same(got[name], committed[name].to(torch.bfloat16))
    assert_same(got["parameter"], nn.Parameter(committed["parameter"].detach().to(torch.bfloat16)))
    assert got["sparse"].dtype == torch.bfloat16 and torch.equal(
        got["sparse"].to_dense(), torch.eye(3).bfloat16()
    )
    assert torch.equal(got["quantized"].dequantize(), committed["quantized"].dequantize())
    for name in ("ids", "flags", "complex", "array", "lr"):
        assert_same(got[name], committed[name])


@pytest.mark.parametrize("wrong", [torch.int32, torch.complex64, "bfloat16", torch.bool, 3])
def test_only_floats_can_be_asked_for(store: ckptstore.Store, wrong: Any) -> None:
    snap = store.commit({"w": torch.ones(3)})
    target = {"w": torch.zeros(3)}
    for call in (
        lambda: snap.read("w", dtype=wrong),
        lambda: snap.state_dict(dtype=wrong),
        lambda: snap.restore(target, dtype=wrong),
    ):
        with pytest.raises(InvalidInput, match="dtype is"):
            call()


def test_a_restore_converts_where_the_target_has_that_dtype(store: ckptstore.Store) -> None:
    trained, model = (
        nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300)),
        nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300)),
    )
    model[0].bfloat16()
    addresses = [p.data_ptr() for p in model.parameters()]
    snap = store.commit({"model": trained})
    with pytest.raises(
        InvalidInput, match=r"model/0\.weight: the commit has float32.*the target has bfloat16"
    ):
        snap.restore({"model": model})
    with pytest.raises(InvalidInput, match="the target has bfloat16"):
        snap.restore({"model": model}, dtype=torch.float16)
    snap.restore({"model": model}, dtype=torch.bfloat16)
    assert torch.equal(model[0].weight, trained[0].weight.bfloat16())
    assert (
        torch.equal(model[1].weight, trained[1].weight) and model[1].weight.dtype == torch.float32
    )
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_leaves_without_a_target_keep_the_committed_dtype(store: ckptstore.Store) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    snap = store.commit({"model": model, "optimizer": optimizer})
    fresh = nn.Linear(3, 3).bfloat16()
    other = torch.optim.AdamW(fresh.parameters())
    snap.restore({"model": fresh, "optimizer": other}, dtype=torch.bfloat16)
    assert fresh.weight.dtype == torch.bfloat16
    assert torch.equal(
        other.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )
    assert other.state[fresh.weight]["exp_avg"].dtype == torch.float32


def test_a_strided_and_an_expanded_target_are_converted_as_well(store: ckptstore.Store) -> None:
    weight, row = torch.randn(200, 100), torch.randn(1).expand(5)
    target = {
        "weight": torch.zeros(100, 200, dtype=torch.float16).t(),
        "row": torch.zeros(1, dtype=torch.float16).expand(5),
    }
    there = target["weight"]
    store.commit({"s": {"weight": weight, "row": row}}).restore({"s": target}, dtype=torch.float16)
    assert target["weight"] is there
    assert torch.equal(there, weight.half())
    assert_same(target["row"], row.half().contiguous())


def test_a_conversion_needs_no_second_tensor(store: ckptstore.Store) -> None:
    whole = torch.randn(4 << 20)
    snap = store.commit({"w": whole})
    with peak_buffers() as count:
        read = snap.read("w", dtype=torch.bfloat16, memory_budget_bytes=2 << 20)
    assert torch.equal(read, whole.bfloat16())
    assert count.bytes < 3 << 20


# -- into a tensor that is there --

TARGETS = {
    "contiguous": lambda: torch.zeros(289, 118),
    "transposed": lambda: torch.zeros(118, 289).t(),
    "every other": lambda: torch.zeros(578, 236)[::2, ::2],
    "a part": lambda: torch.zeros(400, 400)[5:294, 7:125],
    "a parameter": lambda: nn.Parameter(torch.zeros(289, 118)),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_region_is_read_into_any_strided_tensor(store: ckptstore.Store, target: str) -> None:
    whole = torch.randn(300, 130)
    tensor = TARGETS[target]()
    address = tensor.data_ptr()
    store.commit({"w": whole}).read_into(tensor, "w", (slice(1, 290), slice(2, 120)))
    assert torch.equal(tensor, whole[1:290, 2:120])
    assert tensor.data_ptr() == address


def test_a_row_and_a_whole_leaf_are_read_into_a_tensor(store: ckptstore.Store) -> None:
    whole = torch.randn(300, 130)
    snap = store.commit({"w": whole, "n": torch.tensor(5)})
    row, copy, number = torch.zeros(130), torch.zeros(300, 130), torch.tensor(0)
    snap.read_into(row, "w", 7)
    snap.read_into(copy, "w")
    snap.read_into(number, "n")
    assert torch.equal(row, whole[7]) and torch.equal(copy, whole) and number.item() == 5


def test_floats_are_converted_into_a_tensor_when_asked(store: ckptstore.Store) -> None:
    whole = torch.randn(300, 130)
    snap = store.commit({"w": whole})
    tensor = torch.zeros(300, 130, dtype=torch.float64)
    with pytest.raises(InvalidInput, match=r"float32\[300, 130\]; got float64"):
        snap.read_into(tensor, "w")
    snap.read_into(tensor, "w", dtype=torch.float64)
    assert torch.equal(tensor, whole.double())


def test_a_tensor_that_cannot_take_it_is_refused_and_left_alone(store: ckptstore.Store) -> None:
    snap = store.commit({"w": torch.ones(300), "n": 3})
    for wrong in (
        torch.zeros(299),
        torch.zeros(300, dtype=torch.int32),
        torch.zeros(1).expand(300),
        torch.zeros(300, device="meta"),
    ):
        with pytest.raises(InvalidInput, match="w "):
            snap.read_into(wrong, "w")
    with pytest.raises(InvalidInput, match="use read"):
        snap.read_into(torch.zeros(1), "n")
    with pytest.raises(NotFound):
        snap.read_into(torch.zeros(1), "nope")
    with pytest.raises(InvalidInput, match="region of w"):
        snap.read_into(torch.zeros(1), "w", (0, 0))
