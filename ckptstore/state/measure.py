"""How are the numbers of a chunk measured, without another pass through memory?

The fast way is NumKong's: one pass for the moments and one for the extremes, on the calling thread
alone, where torch would occupy the trainer's threads. It adds 32-bit and 64-bit floats in more than
64 bits, narrower ones in 32 bits. Numbers for which that is not exact enough, and those that are
not finite, are measured in 64 bits.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numkong
import numpy as np
import torch
from numpy.typing import NDArray

from ckptstore.core.statistics import Moments, Statistics, added
from ckptstore.state.sums import flat_tensor
from ckptstore.state.tensors import dtype_of

BLOCK = 1 << 16
"""Sums of so many squares in 32 bits have 5 digits."""

PIECE = 1 << 14
"""Torch starts no threads for so few, and they stay in the cache as 64-bit floats."""

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
    total = 0.0
    for x, y in zip(_widened(a, dtype), _widened(b, dtype), strict=True):
        with np.errstate(all="ignore"):
            x -= y
            total += float(x @ x)
    return total


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
    return added(map(_exact, _widened(data, dtype)))


def _widened(data: memoryview, dtype: str) -> Iterator[NDArray[np.float64]]:
    """Copies of the numbers in `data` in 64 bits, some at a time."""
    if len(data):
        own = memoryview(bytearray(data)) if data.readonly else data  # torch warns of such memory
        for piece in flat_tensor(own, dtype_of(dtype)).split(PIECE):
            yield piece.to(torch.float64, copy=True).numpy()


def _exact(numbers: NDArray[np.float64]) -> Statistics:
    x, nan, inf = numbers, 0, 0
    finite = np.isfinite(x)
    if not finite.all():
        nan = int(np.isnan(x).sum())
        inf = len(x) - nan - int(finite.sum())
        x = x[finite]
    if not len(x):
        return Statistics(len(numbers), nan, inf)
    with np.errstate(all="ignore"):
        sums = float(x.sum()), float(np.square(x).sum())
    zeros = len(x) - int(np.count_nonzero(x))
    return Statistics(len(numbers), nan, inf, *sums, zeros, float(x.min()), float(x.max()))
