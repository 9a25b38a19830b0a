"""What is known of the numbers in a chunk, or in a leaf of many chunks?

Statistics of parts add up to those of the whole. They depend only on a chunk's bytes and dtype,
which are their key in the catalog. A commit measures moments, in one pass; the rest takes three
more passes and is measured on request.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ckptstore.errors import Corrupt

_MOMENTS = struct.Struct("<3Q2d")
_STATISTICS = struct.Struct("<4Q4d")
_DISTANCE = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers there are (`elements`), how many of them are NaN and infinite; and sum and
    sum of squares of the finite ones."""

    elements: int = 0
    nan: int = 0
    inf: int = 0
    sum: float = 0.0
    squares: float = 0.0

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
        return _MOMENTS.pack(self.elements, self.nan, self.inf, self.sum, self.squares)


@dataclass(frozen=True, slots=True)
class Statistics(Moments):
    """Moments, how many of the numbers are zero, and minimum and maximum of the finite ones."""

    zeros: int = 0
    min: float = math.inf
    max: float = -math.inf

    def encode(self) -> bytes:
        counts = self.elements, self.nan, self.inf, self.zeros
        return _STATISTICS.pack(*counts, self.sum, self.squares, self.min, self.max)


def has_statistics(data: bytes) -> bool:
    """Whether encoded `data` is more than moments."""
    return len(data) != _MOMENTS.size


def decode_moments(data: bytes) -> Moments:
    """The inverse of `Moments.encode`, and of `Statistics.encode`; raises `Corrupt`."""
    if has_statistics(data):
        return decode_statistics(data)
    return Moments(*_MOMENTS.unpack(data))


def decode_statistics(data: bytes) -> Statistics:
    """The inverse of `Statistics.encode`; raises `Corrupt`."""
    try:
        elements, nan, inf, zeros, total, squares, low, high = _STATISTICS.unpack(data)
    except struct.error as error:
        raise Corrupt(f"the catalog has damaged statistics: {error}") from error
    return Statistics(elements, nan, inf, total, squares, zeros, low, high)


def encode_distance(squares: float) -> bytes:
    """The sum of squares of the differences of two chunks."""
    return _DISTANCE.pack(squares)


def decode_distance(data: bytes) -> float:
    """The inverse of `encode_distance`; raises `Corrupt`."""
    try:
        return float(_DISTANCE.unpack(data)[0])
    except struct.error as error:
        raise Corrupt(f"the catalog has a damaged distance: {error}") from error


def added_moments(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    return Moments(
        sum(part.elements for part in found),
        sum(part.nan for part in found),
        sum(part.inf for part in found),
        sum(part.sum for part in found),
        sum(part.squares for part in found),
    )


def added(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all parts together."""
    found = list(parts)
    moments = added_moments(found)
    return Statistics(
        *(moments.elements, moments.nan, moments.inf, moments.sum, moments.squares),
        sum(part.zeros for part in found),
        min((part.min for part in found), default=math.inf),
        max((part.max for part in found), default=-math.inf),
    )


def key_of(dtype: str, *chunks: bytes) -> bytes:
    """The catalog's key for the statistics of a chunk, or the distance of two."""
    return b"".join((*chunks, dtype.encode()))


@cache
def is_measured(dtype: str) -> bool:
    """Whether the elements of tensors of `dtype` are numbers of which there are statistics."""
    if dtype.startswith(("float", "bfloat")):
        return "float4" not in dtype
    return dtype == "bool" or dtype.lstrip("u") in ("int8", "int16", "int32", "int64")
