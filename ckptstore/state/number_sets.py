"""How is a large set of integers laid out, so that one more changes a few of the bytes and no other
moves (docs/values.md)?

As a hash table with linear probing, sorted by the hash. The place of every integer follows from the
set alone, so equal sets have equal bytes, whatever was added and removed before.
"""

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

_EMPTY = {4: -(2**31), 8: -(2**63)}
"""What stands in an empty place, by the bytes of a place."""
_BEHIND = 64
"""Places for integers that found none before, so that the table's length rarely depends on them."""


def encode(numbers: Set[int]) -> tuple[int, bytes]:
    """The bytes of a place, and the table. All numbers are within ±2^53."""
    values = np.fromiter(numbers, np.int64, len(numbers))
    width = 4 if _EMPTY[4] < values.min() and values.max() < -_EMPTY[4] else 8
    hashes = _hashes(values)
    order = np.argsort(hashes)
    places = _places(len(values))
    homes = ((hashes[order] >> np.uint64(32)) * np.uint64(places)) >> np.uint64(32)
    rank = np.arange(len(values))
    at = rank + np.maximum.accumulate(homes.astype(np.int64) - rank)
    table = np.full(max(places + _BEHIND, int(at[-1]) + 1), _EMPTY[width], f"<i{width}")
    table[at] = values[order]
    return width, table.tobytes()


def decode(width: int, data: bytes) -> list[int]:
    """The integers of a table. Raises ValueError for bytes that are none, LookupError for a width
    that is none."""
    empty = _EMPTY[width]
    table = np.frombuffer(data, f"<i{width}")
    found: list[int] = table[table != empty].tolist()
    return found


def _places(count: int) -> int:
    """A table for `count` integers is at most four fifths full, and its size changes seldom."""
    least = count * 5 // 4 + 1
    step = 1 << max(least.bit_length() - 4, 0)
    return -(-least // step) * step


def _hashes(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A permutation of 64 bits, the last step of splitmix64: no two have one hash."""
    x = values.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
