"""Any state that can be stored, drawn by Hypothesis: every structure, value, array, tensor and
generator, nested, and some of it tied."""

import datetime as dt
import io
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ckptstore.state import tensors as tensors_of
from tests.state.test_attributes import Frozen as FrozenTuned
from tests.state.test_attributes import Point as WithDict
from tests.state.test_attributes import Tuned
from tests.state.test_composites import COMPOSITES
from tests.state.test_structures import Config, Frozen, Point
from tests.state.test_tensors import CONJUGATES, LAYOUTS, SHAPE, STORED
from tests.state.test_values import Colour, Heavy, Level, Name, Plain, Rights

seeds = st.integers(0, 2**32 - 1)

ARRAY_DTYPES = [
    "?",
    "b",
    "u2",
    "<i4",
    ">i4",
    "f2",
    "f8",
    "g",
    "c8",
    "c16",
    "M8[us]",
    "m8[D]",
    "S3",
    "V5",
    "i1,f8",
    [("a", "<u4", (2,)), ("b", "S2")],
]
BIT_GENERATORS = [
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
]
TORCH_VALUES = [
    torch.bfloat16,
    torch.device("cuda:3"),
    torch.sparse_bsc,
    torch.channels_last_3d,
    torch.per_tensor_affine,
    torch.Size([3, 0]),
]


def tensor(name: str, layout: str, seed: int) -> torch.Tensor:
    """Random bytes under any dtype, laid out in any way."""
    base = tensors_of.empty(name, SHAPE)
    tensors_of.memory_of(base)[:] = random.Random(seed).randbytes(base.nbytes)
    return LAYOUTS[layout](base)


def lazy(view: str, seed: int) -> torch.Tensor:
    """A conjugate or negative view of numbers that have a sign."""
    return CONJUGATES[view](
        torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
    )


def composite(name: str, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of most of them that they are in beta
        return COMPOSITES[name]()


def array(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    made = np.zeros(shape, dtype)
    return (
        np.frombuffer(random.Random(seed).randbytes(made.nbytes), made.dtype).reshape(shape).copy()
        if made.nbytes
        else made
    )


def ordered(items: dict[Any, Any], metadata: dict[str, Any] | None) -> "OrderedDict[Any, Any]":
    made = OrderedDict(items)
    if metadata is not None:
        # as nn.Module.state_dict does
        made._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return made


def buffer(data: bytes, position: int) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(position)
    return made


def spawned(bits: Any, seed: Any, children: int) -> Any:
    made = np.random.Generator(bits(np.random.SeedSequence(seed, spawn_key=(children,))))
    made.spawn(children)
    return made


def marked(value: Any, attributes: dict[str, Any]) -> Any:
    vars(value).update(attributes)
    return value


text = st.text(max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
pairs = st.tuples(st.integers(0, 9), st.text(max_size=2))
keys = (
    text
    | st.integers()
    | st.booleans()
    | st.none()
    | pairs
    | st.floats(allow_nan=False)
    | st.sampled_from(Colour)
    | st.binary(max_size=3)
)
hashable = st.integers() | text | pairs | st.dates() | st.frozensets(st.integers(), max_size=2)

plain_values = st.one_of(
    st.none() | st.booleans() | text,
    st.integers() | st.integers(-(2**200), 2**200),
    st.floats() | st.complex_numbers(),
    st.binary(max_size=700),
    st.sampled_from(
        [*Colour, *Level, *Name, Rights.READ | Rights.WRITE, Rights(0), ..., *TORCH_VALUES]
    ),
)
windows_paths = st.builds(PureWindowsPath, st.text("ab\\:é", max_size=6)).filter(
    lambda path: PureWindowsPath(str(path)) == path
)
library_values = st.one_of(
    st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.times(timezones=st.none() | st.just(dt.UTC))
    | st.timedeltas(),
    st.decimals() | st.fractions() | st.uuids(),
    st.builds(PurePosixPath, st.text("ab/.é", max_size=6)) | windows_paths,
    st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
)
numpy_values = st.one_of(
    st.builds(array, st.sampled_from(ARRAY_DTYPES), shapes, seeds),
    st.builds(lambda dtype, seed: array(dtype, (), seed)[()], st.sampled_from(ARRAY_DTYPES), seeds),
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=3),
        max_size=3,
    ).map(lambda x: np.array(x, "U3")),
    st.sampled_from(ARRAY_DTYPES).map(np.dtype),
)
tensors = st.one_of(
    st.builds(tensor, st.sampled_from(STORED), st.sampled_from(list(LAYOUTS)), seeds),
    st.builds(composite, st.sampled_from(list(COMPOSITES)), seeds),
    st.builds(lazy, st.sampled_from(list(CONJUGATES)), seeds),
)
generators = st.one_of(
    st.builds(random.Random, seeds) | st.builds(np.random.RandomState, seeds),
    st.builds(
        spawned,
        st.sampled_from(BIT_GENERATORS),
        st.integers(0, 2**130) | st.lists(seeds, max_size=3) | st.tuples(seeds),
        st.integers(0, 3),
    ),
    st.builds(lambda seed: torch.Generator().manual_seed(seed), seeds),
)
sets = st.sets(hashable, max_size=3) | st.frozensets(hashable, max_size=3)
buffers = st.builds(bytearray, st.binary(max_size=8)) | st.builds(
    buffer, st.binary(max_size=8), st.integers(0, 9)
)
leaves = plain_values | library_values | numpy_values | tensors | generators | sets | buffers
metadata = st.none() | st.dictionaries(
    text, st.fixed_dictionaries({"version": st.integers(0, 9)}), max_size=2
)

attributes = st.dictionaries(
    st.sampled_from(["name", "_hidden", "lr_scale"]),
    st.recursive(
        plain_values.filter(lambda each: not isinstance(each, bytes) or len(each) <= 512),
        lambda below: st.lists(below, max_size=2) | st.dictionaries(text, below, max_size=2),
        max_leaves=3,
    ),
    max_size=2,
)

states = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=4) | st.lists(below, max_size=4).map(tuple),
        st.dictionaries(keys, below, max_size=4),
        st.builds(ordered, st.dictionaries(keys, below, max_size=4), metadata),
        st.dictionaries(keys, below, max_size=4).map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.builds(deque, st.lists(below, max_size=4), st.none() | st.integers(0, 4)),
        st.builds(Point, below, below)
        | st.builds(Config, st.floats(), st.lists(below, max_size=2))
        | st.builds(Frozen, below),
        st.builds(Plain, st.integers() | text)
        | st.builds(lambda inner: Heavy({"inner": inner}), below),
        st.builds(lambda one: [one, {"again": one}], tensors),
        st.builds(
            marked,
            st.dictionaries(keys, below, max_size=2).map(OrderedDict)
            | st.dictionaries(keys, st.integers(), max_size=2).map(Counter)
            | st.builds(WithDict, below, below)
            | st.builds(buffer, st.binary(max_size=8), st.integers(0, 9))
            | st.builds(random.Random, seeds)
            | st.builds(tensor, st.just("float32"), st.sampled_from(list(LAYOUTS)), seeds)
            | seeds.map(lambda seed: torch.nn.Parameter(tensor("float32", "contiguous", seed))),
            attributes,
        ),
        st.builds(Tuned, st.floats(0, 9), below) | st.builds(FrozenTuned, st.floats(0, 9)),
    ),
    max_leaves=12,
)
