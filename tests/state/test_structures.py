"""Nested states of all types return bit for bit and type for type, under the expected paths."""

import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptstore.core.model import Node, Schema
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state import containers, tensors
from ckptstore.state.flatten import MAX_NESTING, flatten
from ckptstore.state.inflate import inflate, inflate_leaf
from ckptstore.state.restore import bind
from ckptstore.state.stateful import StateDict, is_stateful
from ckptstore.state.values import register_class
from tests.state.carrying import assert_same, carry


@register_class
class Point(NamedTuple):
    x: Any
    y: Any = 0


@register_class
@dataclass
class Config:
    lr: float
    layers: list[Any] = field(default_factory=list)


@register_class
@dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any


class Counting:
    """An object with a state, and nothing else in common with torch."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


STRUCTURES: list[Any] = [
    {},
    [],
    (),
    {"a": {}, "b": [[]], "c": ((), {})},
    {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
    OrderedDict([("b", 1), ("a", torch.ones(1))]),
    defaultdict(list, {"a": [torch.ones(1)]}),
    defaultdict(None, {"a": 1}),
    Counter({3: 2, 1: 1}),
    deque([torch.ones(1), 1], maxlen=5),
    deque([1, 2], maxlen=2),
    [torch.ones(1), [1, 2], {"a": 1}],
    (torch.ones(1), (1, (2,)), None),
    Point(torch.ones(2), Point(1, "a")),
    Config(1e-3, [torch.ones(1), "x"]),
    Frozen(torch.ones(1)),
    [Point(1), {"p": Frozen(2)}],
    {
        1: "a",
        "1": "b",
        1.5: "c",
        None: "d",
        True + 1: "e",
        (1, "a"): "f",
        False: "g",
        b"k": "h",
        -7: "i",
        2**60: "j",
    },
    {"": 1, "a/b": 2, "%": 3, "a%2Fb": 4, "\n": 5, "é": 6},
    {
        "bytes": b"\0\1",
        "many": random.Random(0).randbytes(5000),
        "array": bytearray(b"abc"),
        "in a list": [b"x" * 600, b"y"],
    },
    {"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(1000)), "nested": [[1, [2.5]], ["a"]]},
    [{"step": torch.tensor(3.0), "flag": True}] * 2,
]


@pytest.mark.parametrize("state", STRUCTURES, ids=lambda s: repr(s)[:50])
def test_a_structure_comes_back(state: Any) -> None:
    assert_same(carry(state).inflate(), state)


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6).reshape(2, 3).T,
    np.arange(6)[::-2],
    np.array(3.5),
    np.zeros((0, 3), dtype=np.float16),
    np.arange(6, dtype=">i4"),
    np.array([True, False]),
    np.array([1 + 2j], dtype=np.complex64),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2026-01-02", "NaT"], dtype="datetime64[us]"),
    np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", ">f8")]),
    np.array([1.5], dtype=np.longdouble),
    np.array([1, 2], dtype=np.uint16),
    np.broadcast_to(np.arange(3), (2, 3)),
    np.empty((2, 0), dtype="U3"),
    np.array([(1, 2), (3, 4)], dtype=[("a", "i1"), ("b", "<i4")])["b"],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_an_array_comes_back_and_can_be_written_to(array: Any) -> None:
    got = carry({"a": array}).inflate()["a"]
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable


def test_an_array_of_numbers_is_a_tensor_to_the_store() -> None:
    schema = carry({"a": np.zeros((2, 3), dtype=np.uint32)}).schema
    assert (schema.kinds, schema.dtypes, schema.shapes, schema.paths) == (
        ("tensor",),
        ("uint32",),
        ((2, 3),),
        ("s/a",),
    )


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^s/a: .*allow_pickle"):
        carry({"a": np.array([object()])})


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.dtype(("i4", (2,))),
        lambda: np.zeros(
            2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 8}
        ),
    ],
)
def test_a_numpy_dtype_that_would_come_back_as_another_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^s/a: .*view\(np.uint8\)"):
        carry({"a": make()})


@dataclass
class Items(dict[str, Any]):
    name: str = ""


@dataclass
class Failed(Exception):
    why: str


@pytest.mark.parametrize("value", [Items("x"), Failed("y")], ids=repr)
def test_a_dataclass_with_content_beside_its_fields_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^s/a: .*register_value.*allow_pickle"):
        carry({"a": value})


def test_generators_come_back_at_the_same_draw() -> None:
    state = {
        "random": random.Random(3),
        "numpy": np.random.default_rng(3),
        "legacy": np.random.RandomState(3),
        "philox": np.random.Generator(np.random.Philox(3)),
        "torch": torch.Generator().manual_seed(3),
    }
    got = carry(state).inflate()
    assert got["random"].random() == state["random"].random()
    assert got["numpy"].random() == state["numpy"].random()
    assert got["legacy"].random() == state["legacy"].random()
    assert got["philox"].random() == state["philox"].random()
    assert torch.rand(1, generator=got["torch"]) == torch.rand(1, generator=state["torch"])


def test_a_buffer_keeps_content_and_position() -> None:
    buffer = io.BytesIO(b"abcdef")
    buffer.seek(2)
    carried = carry({"_extra_state": buffer})
    assert carried.content == [b"abcdef"]
    assert carried.inflate()["_extra_state"].read() == b"cdef"


def test_a_nested_object_gives_its_state_dict() -> None:
    carried = carry({"deep": [Counting({"n": torch.ones(1), "m": 2})]})
    assert carried.schema.paths == ("s/deep/0/n", "s/deep/0/m")
    assert_same(carried.inflate(), {"deep": [{"n": torch.ones(1), "m": 2}]})


def test_a_state_dict_of_ours_is_stored_as_a_dict() -> None:
    assert carry(StateDict(a=1)).schema == carry({"a": 1}).schema


class Part(StrEnum):
    MODEL = "model"


@pytest.mark.parametrize("key", [5, np.str_("5"), Part.MODEL])
def test_a_key_of_the_application_state_is_a_plain_string(key: Any) -> None:
    """Another would come back as another key, or not at all."""
    with pytest.raises(InvalidInput, match=rf"a {type(key).__name__}; its keys must be plain"):
        flatten({key: torch.ones(2)})


def test_the_order_of_keys_is_kept() -> None:
    state = {str(i): i for i in random.sample(range(100), 100)}
    assert list(carry(state).inflate()) == list(state)


def test_containers_nest_as_deep_as_a_schema_can_hold() -> None:
    state: Any = torch.ones(1)
    for _ in range(MAX_NESTING):
        state = {(1, (2, (3,))): state}
    assert_same(carry(state).inflate(), state)
    with pytest.raises(InvalidInput, match="nested more than"):
        carry([state])


def test_a_growing_list_changes_no_schema() -> None:
    assert (
        carry({"losses": [1.0]}).schema
        == carry({"losses": [(i, float(i)) for i in range(1000)]}).schema
    )


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.randn(4, 4)
    carried = carry(
        {
            "a": weight,
            "b": {"c": weight.view(4, 4)},
            "d": weight.t(),
            "e": weight[:2],
            "f": weight.clone(),
        }
    )
    assert carried.schema.aliases == (-1, 0, -1, -1, -1)
    assert [len(data) for data in carried.content] == [64, 0, 64, 32, 64]
    got = carried.inflate()
    got["a"].zero_()
    assert got["b"]["c"].sum() == 0
    assert torch.equal(got["d"], weight.t())


def test_empty_tensors_share_nothing() -> None:
    assert carry([torch.empty(0), torch.empty(0), torch.ones(3)[3:]]).schema.aliases == (-1, -1, -1)


def test_tensors_of_short_life_are_not_taken_for_one() -> None:
    class Fresh(Counting):
        def state_dict(self) -> Any:
            return {"t": torch.full((100,), self.state)}

    got = carry([Fresh(1.0), Fresh(2.0), Fresh(3.0)]).inflate()
    assert [item["t"][0].item() for item in got] == [1, 2, 3]


def test_a_single_leaf_keeps_its_wrappers() -> None:
    carried = carry(
        {
            "array": np.arange(3),
            "buffer": io.BytesIO(b"x"),
            "p": torch.nn.Parameter(torch.ones(2)),
            "n": 5,
            "t": torch.ones(3),
        }
    )
    tensors_at = {
        i: tensors.tensor_from(
            carried.content[i], carried.schema.dtypes[i], carried.schema.shapes[i]
        )
        for i in (0, 2, 4)
    }
    got = [inflate_leaf(carried.schema, i, tensors_at.get(i, carried.content[i])) for i in range(5)]
    assert [type(each) for each in got] == [
        np.ndarray,
        io.BytesIO,
        torch.nn.Parameter,
        int,
        torch.Tensor,
    ]


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=3), below, max_size=2)
    ),
    max_leaves=8,
)
node_types = st.sampled_from([*sorted(containers._TYPES), "os.system", "torch.unknown", ""])


@given(st.data())
def test_a_damaged_skeleton_is_corrupt_or_makes_something(data: st.DataObject) -> None:
    """Whatever a document says: an object or one of our errors, for a new state as for a target."""
    leaf_values: list[Any] = [
        torch.ones(2),
        torch.zeros(2, 2, dtype=torch.int64),
        b'["list",1]',
        b"bytes",
    ]
    skeleton = data.draw(st.permutations(range(4)).map(lambda order: _wrap(data, [*order])))
    schema = Schema(
        skeleton,
        ("a", "b", "c", "d"),
        ("tensor", "tensor", "value", "bytes"),
        ("float32", "int64", "", ""),
        ((2,), (2, 2), (), ()),
        (-1,) * 4,
    )
    with suppress(CkptStoreError):
        inflate(schema, leaf_values)
    for target in (
        {"a": torch.ones(2)},
        [torch.ones(2)],
        torch.ones(2),
        nn.Linear(2, 2),
        Counting({"a": 1}),
    ):
        with suppress(CkptStoreError):
            binding = bind(target, "s", schema)
            if not binding.mismatched:
                binding.receive({i: leaf_values[i] for i in binding.wanted_bytes})
                binding.finish()


def _wrap(data: st.DataObject, numbers: list[int]) -> Node:
    if len(numbers) > 1 and data.draw(st.booleans()):
        children: tuple[Any, ...] = (_wrap(data, numbers[:2]), *numbers[2:])
    else:
        children = tuple(numbers)
    names = st.sampled_from(
        [
            "class",
            "shape",
            "dtype",
            "factory",
            "position",
            "maxlen",
            "metadata",
            "name",
            "requires_grad",
            "device",
            "axis",
        ]
    )
    encoded = st.lists(
        st.text(max_size=2) | st.integers(0, 3) | st.lists(json, min_size=1, max_size=2),
        min_size=len(children),
        max_size=len(children),
    )
    keys = data.draw(st.none() | encoded.map(tuple))
    attrs = data.draw(
        st.dictionaries(
            names, json | st.just(["list", 2, 2]) | st.just(["torch.dtype", "qint8"]), max_size=3
        )
    )
    return Node(data.draw(node_types), children, keys, tuple(sorted(attrs.items())))


class Namespace(dict[str, Any]):
    """A dict whose attributes are its items, and empty namespaces where it has none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name, Namespace())


def test_a_dict_with_any_attribute_is_no_object_with_a_state_dict() -> None:
    assert not is_stateful(Namespace(a=1))
    assert is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(torch.nn.Linear)
