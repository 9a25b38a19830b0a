"""How are the numbers of a chunk measured, without another pass through memory?

The fast way is NumKong's: one pass for the moments and one for the extremes, on the calling thread
alone, where torch would occupy the trainer's threads. It adds 32-bit and 64-bit floats in more than
64 bits, narrower ones in 32 bits. Numbers for which that is not exact enough, and those that are
not finite, are measured in 64 bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import Any, Literal, NamedTuple, TypeVar

import numkong
import numpy as np
from numpy.typing import NDArray

from ckptstore.plugin.model import width_of
from ckptstore.plugin.statistics import Moments, Statistics, added

K = TypeVar("K")
T = TypeVar("T")

BLOCK = 1 << 16
"""Sums of so many squares in 32 bits have 5 digits."""

PIECE = 1 << 14
"""So many numbers stay in the cache as 64-bit floats."""

SMALL_BYTES = 16 << 10
"""Chunks up to this size are measured together: a call for each would cost more than its numbers.
"""

VANISHING = 1e-30
"""A mean square below this is made of squares that vanish in 32 bits."""

CANCELLATION = 0.03
"""Below this share of the mean square, the variance is made of digits that 32 bits lack."""


class _Kernel(NamedTuple):
    """What NumKong calls a dtype, and integers of its width."""

    name: Literal["float64", "float32", "bfloat16", "float16", "e4m3"]
    bits: type[np.unsignedinteger[Any]]
    narrow: bool = True


_KERNELS = {
    "float64": _Kernel("float64", np.uint64, narrow=False),
    "float32": _Kernel("float32", np.uint32, narrow=False),
    "bfloat16": _Kernel("bfloat16", np.uint16),
    "float16": _Kernel("float16", np.uint16),
    "float8_e4m3fn": _Kernel("e4m3", np.uint8),
}
"""The dtypes that NumKong adds, and of which it reports what is not finite; e5m2 is not one."""


def moments_of(data: memoryview, dtype: str) -> Moments:
    """The moments of the numbers in `data`, a chunk of a tensor of `dtype`."""
    return _quickly(data, dtype) or _exactly(data, dtype)


def statistics_of(data: memoryview, dtype: str) -> Statistics:
    """The statistics of the numbers in `data`, a chunk of a tensor of `dtype`."""
    found = _quickly(data, dtype)
    if found is None or not found.elements:
        return _exactly(data, dtype)
    bits, kernel = _bits(data, dtype), _KERNELS[dtype]
    low, _, high, _ = numkong.minmax(bits, dtype=kernel.name) or (math.nan, 0, math.nan, 0)
    zeros = len(bits) - int(np.count_nonzero(bits << 1))  # without the sign
    return Statistics(found.elements, 0, 0, found.sum, found.squares, zeros, low, high)


def squared_distance(a: memoryview, b: memoryview, dtype: str) -> float:
    """The sum of squares of the differences of two chunks of `dtype`; NaN if one has a NaN."""
    pieces = zip(_widened(a, dtype), _widened(b, dtype), strict=True)
    return sum(distance for x, y in pieces for distance in _distances(x, y))


def statistics_of_many(chunks: Mapping[K, memoryview], dtype: str) -> dict[K, Statistics]:
    """As `statistics_of`, of each of many chunks of tensors of `dtype`."""
    found: dict[K, Statistics] = {}
    for nbytes, keys in _by_size(chunks, len).items():
        if nbytes > SMALL_BYTES:
            found |= {key: statistics_of(chunks[key], dtype) for key in keys}
        else:
            numbers = _rows([chunks[key] for key in keys], nbytes, dtype)
            found.update(_named(keys, _exact(numbers)))
    return found


def squared_distances(
    pairs: Mapping[K, tuple[memoryview, memoryview]], dtype: str
) -> dict[K, float]:
    """As `squared_distance`, of each of many pairs of chunks of `dtype`."""
    found: dict[K, float] = {}
    for nbytes, keys in _by_size(pairs, lambda pair: len(pair[0])).items():
        if nbytes > SMALL_BYTES:
            found |= {key: squared_distance(*pairs[key], dtype) for key in keys}
        else:
            x, y = (_rows([pairs[key][end] for key in keys], nbytes, dtype) for end in (0, 1))
            found.update(_named(keys, _distances(x, y)))
    return found


def _by_size(items: Mapping[K, T], nbytes: Callable[[T], int]) -> dict[int, list[K]]:
    """The keys of items of one size."""
    found: dict[int, list[K]] = {}
    for key, item in items.items():
        found.setdefault(nbytes(item), []).append(key)
    return found


def _named(keys: Sequence[K], values: Sequence[T]) -> Iterator[tuple[K, T]]:
    return zip(keys, values, strict=True)


def _bits(data: memoryview, dtype: str) -> NDArray[np.unsignedinteger[Any]]:
    """The numbers in `data` as integers, at an address that is a multiple of their width."""
    bits = np.frombuffer(data, _KERNELS[dtype].bits)
    return bits if bits.flags.aligned else bits.copy()


def _quickly(data: memoryview, dtype: str) -> Moments | None:
    """None for numbers of which NumKong's sums are not right."""
    if (kernel := _KERNELS.get(dtype)) is None:
        return None
    bits = _bits(data, dtype)
    total, squares = numkong.moments(bits[:BLOCK] if kernel.narrow else bits, dtype=kernel.name)
    for start in range(BLOCK, len(bits) if kernel.narrow else 0, BLOCK):
        part = numkong.moments(bits[start : start + BLOCK], dtype=kernel.name)
        total, squares = total + part[0], squares + part[1]
    if not math.isfinite(total + squares):
        return None
    if kernel.narrow:
        scale = squares * len(bits)
        if squares < VANISHING * len(bits) or scale - total * total < CANCELLATION * scale:
            return None
    return Moments(len(bits), 0, 0, total, squares)


def _exactly(data: memoryview, dtype: str) -> Statistics:
    return added(found for rows in _widened(data, dtype) for found in _exact(rows))


def _widened(data: memoryview, dtype: str) -> Iterator[NDArray[np.float64]]:
    """Copies of the numbers in `data` in 64 bits, some at a time, each a row."""
    step = PIECE * width_of(dtype)
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        yield _rows([piece], len(piece), dtype)


def _rows(chunks: Sequence[memoryview], nbytes: int, dtype: str) -> NDArray[np.float64]:
    """The numbers of chunks of `nbytes` each in 64 bits, a row for each chunk."""
    with np.errstate(invalid="ignore"):  # some NaN signal that they are converted
        numbers = _wide(b"".join(chunks), dtype)
    return numbers.reshape(len(chunks), nbytes // width_of(dtype))


def _wide(raw: bytes, dtype: str) -> NDArray[np.float64]:
    """The numbers of a tensor of `dtype` in 64 bits."""
    if dtype.startswith("float8"):
        return _values_of_8_bits(dtype)[np.frombuffer(raw, np.uint8)]
    if dtype == "bfloat16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(raw, dtype).astype(np.float64)


_MANTISSA_AND_BIAS = {
    "float8_e4m3fn": (3, 7),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2": (2, 15),
    "float8_e5m2fnuz": (2, 16),
}
"""The bits of the mantissa, and the bias of the exponent."""


@cache
def _values_of_8_bits(dtype: str) -> NDArray[np.float64]:
    """What each byte means as a float of 8 bits: `fn` has no infinities, `uz` no negative zero
    (https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2206.02915, and OCP's MX for e8m0).
    """
    bits = np.arange(256, dtype=np.uint64)
    if dtype == "float8_e8m0fnu":
        values = np.ldexp(1.0, bits.astype(np.int64) - 127)
        values[255] = np.nan
        return values
    mantissa, bias = _MANTISSA_AND_BIAS[dtype]
    wide = (bits >> 7) << 63 | (bits & 127) << (52 - mantissa)  # as a float64 of another bias
    values = np.ldexp(wide.view(np.float64), 1023 - bias)
    if dtype.endswith("uz"):
        values[128] = np.nan
    elif dtype == "float8_e4m3fn":
        values[[127, 255]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _exact(rows: NDArray[np.float64]) -> list[Statistics]:
    """The statistics of each row of numbers."""
    elements = rows.shape[1]
    finite = np.isfinite(rows)
    only: Any = True if finite.all() else finite
    with np.errstate(all="ignore"):
        columns = (
            np.isnan(rows).sum(1),
            np.isinf(rows).sum(1),
            rows.sum(1, where=only),
            np.square(rows).sum(1, where=only),
            elements - np.count_nonzero(rows, axis=1),
            rows.min(1, where=only, initial=math.inf),
            rows.max(1, where=only, initial=-math.inf),
        )
    return list(map(Statistics, repeat(elements), *(column.tolist() for column in columns)))


def _distances(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[float]:
    """For each row, the sum of squares of the differences to that of `y`."""
    with np.errstate(all="ignore"):
        gaps = x - y
        found: list[float] = np.einsum("ij,ij->i", gaps, gaps).tolist()
    return found
