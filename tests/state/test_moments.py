"""Moments of chunks: equal to sums in 64 bits, on every processor, and no NaN is overlooked."""

import math
from collections.abc import Iterator

import numkong
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ckptstore.core.statistics import Moments, added_moments, is_measured
from ckptstore.plugins.analysis.measure import (
    moments_of,
    squared_distance,
    squared_distances,
    statistics_of,
    statistics_of_many,
)
from ckptstore.state.tensors import DTYPES, memory_of

NARROW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
NEWEST = ["genoa", "icelake", "skylake", "haswell", "neonfhm", "neonhalf", "neonbfdot", "neon"]
HERE = [name for name in NEWEST if numkong.get_capabilities()[name]]
"""NumKong's instruction sets that this processor has, the newest first."""


def by_numpy(x: NDArray[np.float64]) -> Moments:
    finite = x[np.isfinite(x)]
    nan = int(np.isnan(x).sum())
    with np.errstate(over="ignore"):
        sums = float(finite.sum()), float(np.square(finite).sum())
    return Moments(len(x), nan, len(x) - len(finite) - nan, *sums)


def check(data: memoryview, dtype: str) -> None:
    x = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).double().numpy()
    found, wanted = moments_of(data, dtype), by_numpy(x)
    for name in ("elements", "nan", "inf"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.squares == pytest.approx(wanted.squares, rel=2e-5)
    assert found.sum == pytest.approx(wanted.sum, rel=2e-5, abs=1e-6 * math.sqrt(wanted.squares))
    whole = statistics_of(data, dtype)
    assert (whole.elements, whole.nan, whole.inf) == (found.elements, found.nan, found.inf)
    finite = x[np.isfinite(x)]
    if finite.size:
        assert (whole.min, whole.max) == (finite.min(), finite.max())
    assert whole.zeros == int((x == 0).sum())


@given(
    st.sampled_from(["float32", "float64"]).flatmap(
        lambda name: hnp.arrays(name, st.integers(1, 300), elements={"allow_subnormal": True})
    )
)
def test_any_floats_have_the_moments_that_64_bits_find(x: NDArray[np.floating]) -> None:
    check(memoryview(x).cast("B"), x.dtype.name)


@given(st.sampled_from(NARROW), st.binary(min_size=16, max_size=600), st.integers(1, 64))
def test_any_bytes_have_the_moments_that_64_bits_find(dtype: str, raw: bytes, times: int) -> None:
    check(memoryview(raw[: len(raw) // 2 * 2] * times), dtype)


@pytest.fixture(params=range(len(HERE) + 1))
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """This processor, and older ones that lack its newest instructions."""
    for name in HERE[: request.param]:
        numkong.disable_capability(name)
    yield
    for name in HERE:
        numkong.enable_capability(name)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", NARROW)
def test_every_value_of_a_narrow_float_is_measured(dtype: str) -> None:
    """Each in a row with others, where vectors end and begin."""
    width = DTYPES[dtype].itemsize
    bits = torch.arange(256**width, dtype=torch.int32)
    unsigned = torch.uint16 if width == 2 else torch.uint8
    odd = ~bits.to(unsigned).view(DTYPES[dtype]).double().isfinite()
    # torch 2.6 cannot index 8-bit floats, so their bits are chosen
    for row in bits[~odd].to(unsigned).view(DTYPES[dtype]).split(1000):
        check(memory_of(row.clone()), dtype)
    others = torch.linspace(0.5, 2, 101).to(DTYPES[dtype])
    for i, value in enumerate(bits[odd].to(unsigned).view(DTYPES[dtype])):
        row = others.clone()
        row[i % 101] = value
        found = moments_of(memory_of(row), dtype)
        assert found.nan + found.inf == 1, hex(int(bits[odd][i]))
        assert found.nan == int(value.double().isnan())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [*NARROW, "float32", "float64"])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (1e-3, 0), (1, 20), (0, 1.5), (0, 0)])
def test_a_large_chunk_has_the_moments_that_64_bits_find(
    dtype: str, scale: float, offset: float
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(300_000) * scale + offset).to(DTYPES[dtype])
    check(memory_of(x), dtype)
    std = float(x.double().std(correction=0))
    assert moments_of(memory_of(x), dtype).std == pytest.approx(std, rel=2e-4, abs=1e-8)


@pytest.mark.parametrize("dtype", [*NARROW, "float32", "float64", "int16", "bool"])
def test_memory_may_begin_anywhere_and_may_be_read_only(dtype: str) -> None:
    x = torch.arange(3000).remainder(7).to(DTYPES[dtype])
    raw = bytes(memory_of(x))
    for shift in range(9):
        moved = memoryview(bytearray(shift) + raw)[shift:]
        assert moments_of(moved, dtype) == moments_of(memory_of(x), dtype)
        assert moments_of(moved.toreadonly(), dtype) == moments_of(memory_of(x), dtype)
    assert moments_of(memoryview(b""), dtype).elements == 0 == added_moments([]).elements


MEASURED = [name for name in DTYPES if is_measured(name)]


@pytest.mark.parametrize("dtype", [name for name in MEASURED if name.startswith("float8")])
def test_each_byte_is_the_number_that_torch_makes_of_it(dtype: str) -> None:
    for byte in range(256):
        data = memoryview(bytes([byte]))
        number = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(DTYPES[dtype]).double()
        found = statistics_of_many({byte: data}, dtype)[byte]
        assert found.nan == int(number.isnan())
        assert found.inf == int(number.isinf())
        if found.finite:
            assert found.min == found.max == found.sum == float(number)


@given(
    st.sampled_from(MEASURED),
    st.lists(st.binary(max_size=80).map(lambda raw: raw[: len(raw) // 8 * 8]), max_size=6),
    st.booleans(),
)
def test_many_chunks_are_measured_as_each_alone(
    dtype: str, chunks: list[bytes], large: bool
) -> None:
    if dtype == "bool":
        chunks = [bytes(byte & 1 for byte in chunk) for chunk in chunks]
    many = {i: memoryview(chunk * (4096 if large else 1)) for i, chunk in enumerate(chunks)}
    for i, found in statistics_of_many(many, dtype).items():
        alone = statistics_of(many[i], dtype)
        for name in ("elements", "nan", "inf", "zeros", "min", "max"):
            assert getattr(found, name) == getattr(alone, name), name
        assert found.squares == pytest.approx(alone.squares, rel=2e-5)
    pairs = {i: (many[i], many[i][::-1].tobytes()) for i in many if len(many[i])}
    pairs = {i: (a, memoryview(b)) for i, (a, b) in pairs.items()}
    for i, squares in squared_distances(pairs, dtype).items():
        assert squares == pytest.approx(squared_distance(*pairs[i], dtype), nan_ok=True)
    assert statistics_of_many({}, dtype) == {} == squared_distances({}, dtype)
