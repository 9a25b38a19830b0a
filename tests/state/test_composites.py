"""Tensors that are more than one block of memory: apart and together again, in place where they
fit, refused where they have no values."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore.errors import InvalidInput
from ckptstore.state.composites import split_tensor
from ckptstore.state.containers import SplitObject
from ckptstore.state.values import register_class
from tests.state.carrying import carry, tensor_bytes
from tests.state.describing import describe


def quietly(make: Callable[[], Any]) -> Any:
    """torch says of most of these that they are in beta, or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def dense() -> torch.Tensor:
    return torch.randn(4, 6) * (torch.rand(4, 6) < 0.5)


def per_channel(dtype: torch.dtype, zero: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(
        dense(), torch.rand(4) + 0.1, torch.zeros(4, dtype=zero), 0, dtype
    )


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=layout)


def offset_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(8, 6), 0.1, 3, torch.qint8)[2:6]


COMPOSITES: dict[str, Callable[[], torch.Tensor]] = {
    "COO": lambda: dense().to_sparse(),
    "COO, uncoalesced": lambda: torch.sparse_coo_tensor(
        [[0, 0, 2]], torch.randn(3), (4,), check_invariants=True
    ),
    "COO, hybrid": lambda: dense().to_sparse(1),
    "COO, empty": lambda: torch.zeros(3, 4).to_sparse(),
    "COO, bf16": lambda: dense().bfloat16().to_sparse(),
    "CSR": lambda: dense().to_sparse_csr(),
    "CSC": lambda: dense().to_sparse_csc(),
    "BSR": lambda: dense().to_sparse_bsr((2, 3)),
    "BSC": lambda: dense().to_sparse_bsc((2, 3)),
    "qint8": lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.qint32),
    "qint8, a view": offset_quantized,
    "qint8, transposed": lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.qint8).t(),
    "quint8 per channel": lambda: per_channel(torch.quint8, torch.int64),
    "qint8 per channel": lambda: per_channel(torch.qint8, torch.int64),
    "quint4x2 per channel": lambda: per_channel(torch.quint4x2, torch.float32),
    "quint2x4 per channel": lambda: per_channel(torch.quint2x4, torch.float32),
    "nested": lambda: nested(torch.strided),
    "nested, of no tensors": lambda: torch.nested.nested_tensor([], dtype=torch.float16),
    "jagged": lambda: nested(torch.jagged),
    "jagged, transposed": lambda: nested(torch.jagged).transpose(1, 2),
    "subclass": lambda: TwoTensor(torch.randn(3), torch.randn(3)),
    "subclass of subclasses": lambda: TwoTensor(
        TwoTensor(torch.randn(3), torch.randn(3)), TwoTensor(torch.randn(3), torch.randn(3))
    ),
    "parameter": lambda: torch.nn.Parameter(dense()),
    "frozen parameter": lambda: torch.nn.Parameter(dense(), requires_grad=False),
    "integer parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "subclass parameter": lambda: torch.nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3))),
    "leaf that wants a gradient": lambda: dense().requires_grad_(),
}

register_class(TwoTensor)


def parts_of(tensor: torch.Tensor) -> Any:
    """All that a tensor is, as something that compares by its bytes."""
    parts = split_tensor(tensor)
    if isinstance(parts, SplitObject):
        return (
            parts.type,
            parts.keys,
            sorted(parts.attrs),
            [parts_of(child) for child in parts.children],
        )
    return parts.dtype, parts.shape, tensor_bytes(parts)


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_tensor_comes_back_with_all_that_it_is(name: str) -> None:
    tensor = quietly(COMPOSITES[name])
    got = carry({"t": tensor}).inflate()["t"]
    assert type(got) is type(tensor)
    assert (got.layout, got.dtype, got.requires_grad) == (
        tensor.layout,
        tensor.dtype,
        tensor.requires_grad,
    )
    assert parts_of(got) == parts_of(tensor)


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_tensor_is_restored_where_it_stands(name: str) -> None:
    carried = carry({"t": quietly(COMPOSITES[name])})
    target = carried.inflate()
    tensor = target["t"]
    for part in leaves_of(tensor):
        torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).zero_()
    carried.restore(target)
    assert target["t"] is tensor
    assert parts_of(tensor) == parts_of(carried.inflate()["t"])


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_tensor_that_stands_twice_comes_back_tied(name: str) -> None:
    tensor = quietly(COMPOSITES[name])
    state = {"a": tensor, "b": [tensor], "c": quietly(COMPOSITES[name])}
    carried = carry(state)
    for got in (carried.inflate(), carried.restore({"a": None, "b": [None], "c": None})):
        assert describe(got) == describe(state)


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = split_tensor(tensor)
    if not isinstance(parts, SplitObject):
        return [parts]
    # Only values are cleared: what says where they are is part of what must agree.
    children = [
        child
        for i, child in enumerate(parts.children)
        if parts.keys is None or parts.keys[i] in ("values", "integers", "buffer", "a", "b")
    ]
    return [leaf for child in children for leaf in leaves_of(child)]


def test_a_sparse_tensor_with_more_values_replaces_the_targets() -> None:
    wanted = torch.eye(4).to_sparse()
    target = {"t": torch.eye(4).to_sparse().coalesce() * 0}
    target["t"] = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 4), check_invariants=True)
    carry({"t": wanted}).restore(target)
    assert torch.equal(target["t"].to_dense(), torch.eye(4))


@pytest.mark.parametrize(
    ("committed", "target"),
    [
        (lambda: dense().to_sparse(), dense),
        (dense, lambda: dense().to_sparse()),
        (lambda: dense().to_sparse(), lambda: dense().double().to_sparse()),
        (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(4).to_sparse()),
        (
            lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.qint8),
            lambda: torch.quantize_per_tensor(dense(), 0.1, 3, torch.quint8),
        ),
        (lambda: TwoTensor(torch.ones(3), torch.ones(3)), lambda: torch.ones(3)),
    ],
)
def test_a_composite_tensor_of_another_kind_shape_or_dtype_is_a_mismatch(
    committed: Callable[[], torch.Tensor], target: Callable[[], torch.Tensor]
) -> None:
    binding = carry({"t": quietly(committed)}).bind({"t": quietly(target)})
    assert [mismatch.path for mismatch in binding.mismatched] == ["s/t"]


def test_a_parameter_takes_a_plain_tensor_and_keeps_its_own_mind_about_gradients() -> None:
    for committed, target in (
        (torch.ones(3), torch.nn.Parameter(torch.zeros(3))),
        (torch.nn.Parameter(torch.ones(3)), torch.zeros(3)),
    ):
        state = {"t": target}
        carry({"t": committed}).restore(state)
        assert state["t"] is target
        assert target.requires_grad == isinstance(target, torch.nn.Parameter)
        assert target.tolist() == [1, 1, 1]


def test_a_tensor_within_a_graph_is_stored_without_it() -> None:
    result = torch.ones(3, requires_grad=True) * 2
    got = carry({"t": result}).inflate()["t"]
    assert type(got) is torch.Tensor
    assert not got.requires_grad


class Thin(torch.Tensor):
    """Methods only."""


class Labelled(torch.Tensor):
    """Has data besides."""


class Own(torch.nn.Parameter):
    """A parameter of one's own class."""


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3).as_subclass(Thin), lambda: Own(torch.ones(3))]
)
def test_a_subclass_without_data_needs_its_class_registered_or_in_the_target(
    make: Callable[[], torch.Tensor],
) -> None:
    carried = carry({"t": make()})
    with pytest.raises(InvalidInput, match="neither registered nor in the target"):
        carried.inflate()
    target = {"t": make()}
    target["t"].detach().zero_()
    there = target["t"]
    carried.restore(target)
    assert target["t"] is there
    assert there.tolist() == [1, 1, 1]


def labelled() -> torch.Tensor:
    tensor = torch.ones(3).as_subclass(Labelled)
    tensor.label = object()  # type: ignore[attr-defined]
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "to_empty"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "to_dense"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "get_mask",
    ),
    "uninitialized parameter": (lambda: torch.nn.UninitializedParameter(), "run the module once"),
    "uninitialized buffer": (lambda: torch.nn.UninitializedBuffer(), "run the module once"),
    "fake": (fake, "__tensor_flatten__"),
    "subclass with attributes": (labelled, "attribute 'label' .*register_value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_without_values_are_refused_with_path_and_advice(name: str) -> None:
    make, way_out = REFUSED[name]
    with pytest.raises(InvalidInput, match=f"^s/a/0: .*{way_out}"):
        carry({"a": [quietly(make)]})
