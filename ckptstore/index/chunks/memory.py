"""The part of the chunk index that could not be written to disk: the same records in this process's
memory.

It holds packs until the disk takes them, and everything where there is no place to write at all.
The pack added last wins, as on disk.
"""

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import PackId
from ckptstore.index.chunks.records import NOTHING, Locations, as_values

_Contents = tuple[npt.NDArray[np.void], Locations]


class MemoryRecords:
    """Records by chunk id, by pack. The caller sees to it that one thread at a time uses it."""

    def __init__(self) -> None:
        self.packs: dict[int, PackId] = {}
        self._contents: dict[int, _Contents] = {}
        self._by_id: dict[bytes, bytes] = {}

    def add(self, number: int, pack: PackId, ids: npt.NDArray[np.void], rows: Locations) -> None:
        if self.packs.get(number, pack) != pack:
            self.drop([number])
        self._by_id.update(zip(ids.tolist(), as_values(rows), strict=True))
        self._contents[number] = ids, rows
        self.packs[number] = pack

    def contents(self, number: int) -> _Contents:
        """Ids and records of a pack as they were added."""
        return self._contents[number]

    def get(self, ids: Iterable[bytes]) -> bytearray:
        return bytearray().join(map(self._by_id.get, ids, repeat(NOTHING)))

    def drop(self, numbers: Iterable[int]) -> None:
        gone = self.packs.keys() & set(numbers)
        for number in gone:
            del self.packs[number], self._contents[number]
        if gone:
            self._by_id = {}
            for ids, rows in self._contents.values():
                self._by_id.update(zip(ids.tolist(), as_values(rows), strict=True))
