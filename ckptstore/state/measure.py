"""How are the numbers of a chunk measured, without another pass through memory?

The fast way reads a chunk in the CPU's cache. It adds rows of 8,192 numbers in their own precision,
and the rows in 64 bits. numpy computes on the calling thread alone, where torch would occupy the
trainer's threads. Numbers for which the fast way is not exact enough are added in 64 bits.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptstore.core.statistics import EMPTY, Statistics, added
from ckptstore.state.sums import flat_tensor
from ckptstore.state.tensors import dtype_of

ROW = 8192
"""A sum of so many numbers in 32 bits has 6 digits, and BLAS starts no threads for it."""

BLOCK = 8 * ROW
"""So many numbers are widened at a time, and stay in the cache."""

PIECE = 2 * ROW
"""Torch starts no threads for so few."""

SAFE = 1e-15, 1e15
"""Squares of 32-bit floats whose largest is of this size neither overflow nor vanish."""

CANCELLATION = 1e-3
"""Below this share of the mean square, the variance is made of digits that 32 bits lack."""

_ONES: dict[np.dtype[Any], NDArray[Any]] = {
    np.dtype(kind): np.ones(ROW, kind) for kind in (np.float32, np.float64)
}


def statistics_of(data: memoryview, dtype: str) -> Statistics:
    """The statistics of the numbers in `data`, a chunk of a tensor of `dtype`."""
    parts = [_statistics(block) for block in _blocks(data, dtype)]
    return parts[0] if len(parts) == 1 else added(parts)


def squared_distance(a: memoryview, b: memoryview, dtype: str) -> float:
    """The sum of squares of the differences of two chunks of `dtype`; NaN if one has a NaN."""
    total = 0.0
    for x, y in zip(_blocks(a, dtype), _blocks(b, dtype), strict=True):
        with np.errstate(all="ignore"):
            difference = x.astype(np.float64)
            difference -= y
            total += float(np.square(difference, out=difference).sum())
    return total


def _blocks(data: memoryview, dtype: str) -> Iterator[NDArray[Any]]:
    """The numbers in `data`. Floats of fewer than 32 bits become 32-bit floats, some at a time, in
    memory that the next block overwrites."""
    if dtype == "bfloat16":
        yield from _widened(np.frombuffer(data, np.uint16))
    elif dtype.startswith("float") and dtype not in ("float32", "float64"):
        own = memoryview(bytearray(data)) if data.readonly else data  # torch warns of such memory
        narrow = flat_tensor(own, dtype_of(dtype))
        wide = torch.empty(min(len(narrow), BLOCK), dtype=torch.float32)
        for block in narrow.split(BLOCK):
            for source, target in zip(block.split(PIECE), wide.split(PIECE), strict=False):
                target[: len(source)].copy_(source)
            yield wide[: len(block)].numpy()
    else:
        yield np.frombuffer(data, np.dtype(dtype))


def _widened(halves: NDArray[np.uint16]) -> Iterator[NDArray[Any]]:
    """Numbers of which `halves` are the upper halves of 32-bit floats."""
    scratch = np.empty(min(len(halves), BLOCK), np.uint32)
    for start in range(0, len(halves), BLOCK):
        block = halves[start : start + BLOCK]
        wide = scratch[: len(block)]
        np.copyto(wide, block)
        wide <<= 16
        yield wide.view(np.float32)


def _statistics(x: NDArray[Any]) -> Statistics:
    if not len(x):
        return EMPTY
    if x.dtype not in _ONES or len(x) < ROW:
        return _exactly(x)
    whole = len(x) // ROW * ROW
    found = _quickly(x[:whole])
    if found is None:
        return _exactly(x)
    return added((found, _exactly(x[whole:]))) if whole < len(x) else found


def _quickly(x: NDArray[Any]) -> Statistics | None:
    """None for numbers that are not all finite, of odd sizes, or nearly equal."""
    low, high = float(x.min()), float(x.max())
    if not SAFE[0] < max(-low, high) < SAFE[1]:
        return None
    rows = x.reshape(-1, ROW)
    squares = float(np.vecdot(rows, rows).sum(dtype=np.float64))
    total = float((rows @ _ONES[x.dtype]).sum(dtype=np.float64))
    if squares - total * total / len(x) < CANCELLATION * squares:
        return None
    zeros = 0 if low > 0 or high < 0 else len(x) - int(np.count_nonzero(x != 0))
    return Statistics(len(x), 0, 0, zeros, total, squares, low, high)


def _exactly(numbers: NDArray[Any]) -> Statistics:
    x = numbers.astype(np.float64)
    nan = inf = 0
    finite = np.isfinite(x)
    if not finite.all():
        nan = int(np.isnan(x).sum())
        inf = len(x) - nan - int(finite.sum())
        x = x[finite]
    if not len(x):
        return Statistics(len(numbers), nan, inf)
    zeros = len(x) - int(np.count_nonzero(x))
    with np.errstate(all="ignore"):
        squares = float(np.square(x).sum())
    sums = float(x.sum()), squares, float(x.min()), float(x.max())
    return Statistics(len(numbers), nan, inf, zeros, *sums)
