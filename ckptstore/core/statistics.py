"""What is known of the numbers in a chunk, or in a leaf of many chunks?

Statistics of parts add up to those of the whole. They depend on a chunk's bytes and dtype alone, so
the catalog keeps them by these two.
"""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from ckptstore.errors import Corrupt

_FORMAT = struct.Struct("<4Q4d")
_DISTANCE = struct.Struct("<d")


class Statistics(NamedTuple):
    """How many numbers there are (`elements`), how many of them are NaN, infinite and zero; and
    sum, sum of squares, minimum and maximum of the finite ones."""

    elements: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    sum: float = 0.0
    squares: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @property
    def finite(self) -> int:
        """How many numbers are neither NaN nor infinite."""
        return self.elements - self.nan - self.inf

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite numbers."""
        return math.sqrt(self.squares)

    @property
    def mean(self) -> float:
        """Their mean; NaN without any."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """Their standard deviation, by the number of them; NaN without any."""
        if not self.finite:
            return math.nan
        return math.sqrt(max(self.squares / self.finite - self.mean**2, 0.0))

    def encode(self) -> bytes:
        return _FORMAT.pack(*self)


EMPTY = Statistics()


def decode_statistics(data: bytes) -> Statistics:
    """The inverse of `Statistics.encode`; raises `Corrupt`."""
    try:
        return Statistics._make(_FORMAT.unpack(data))
    except struct.error as error:
        raise Corrupt(f"the catalog has damaged statistics: {error}") from error


def encode_distance(squares: float) -> bytes:
    """The sum of squares of the differences of two chunks."""
    return _DISTANCE.pack(squares)


def decode_distance(data: bytes) -> float:
    """The inverse of `encode_distance`; raises `Corrupt`."""
    try:
        return float(_DISTANCE.unpack(data)[0])
    except struct.error as error:
        raise Corrupt(f"the catalog has a damaged distance: {error}") from error


def added(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all parts together."""
    columns = list(zip(*parts, strict=True))
    if not columns:
        return EMPTY
    elements, nan, inf, zeros, sums, squares, lows, highs = columns
    counts = sum(elements), sum(nan), sum(inf), sum(zeros)
    return Statistics(*counts, math.fsum(sums), math.fsum(squares), min(lows), max(highs))


def key_of(dtype: str, *chunks: bytes) -> bytes:
    """The catalog's key for the statistics of a chunk, or the distance of two."""
    return b"".join((*chunks, dtype.encode()))


def is_measured(dtype: str) -> bool:
    """Whether the elements of tensors of `dtype` are numbers of which there are statistics."""
    if dtype.startswith(("float", "bfloat")):
        return "float4" not in dtype
    return dtype == "bool" or dtype.lstrip("u") in ("int8", "int16", "int32", "int64")
