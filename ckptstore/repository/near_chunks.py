"""Which chunks at the bases of patches need not be read from packs, because their bytes are at
hand?

A chain of patches ends at the first chunk that the caller has in memory, or that this host keeps in
its read cache. What is made of it is verified like any other chunk, so such memory is not trusted.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId
from ckptstore.index.chunks.records import LOCATED_DTYPE
from ckptstore.log.state import Pack, State
from ckptstore.objects import codecs
from ckptstore.repository.patch_chains import ChunkLookup
from ckptstore.storage.read_cache import ReadCache

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NearChunks:
    """The look-ups of a store, in which chunks at hand count as stored whole."""

    def __init__(
        self, store: ChunkLookup, memory: Mapping[ChunkId, memoryview], cache: ReadCache | None
    ) -> None:
        self.storage, self.suspect_packs = store.storage, store.suspect_packs
        self._store, self._memory, self._cache = store, memory, cache

    def located(self, ids: bytes) -> "NDArray[np.void]":
        """As of the store. A chunk in memory is not looked up, and has no place."""
        chunks = [
            ChunkId(ids[at : at + CHUNK_ID_BYTES]) for at in range(0, len(ids), CHUNK_ID_BYTES)
        ]
        near = [_row(c, self._memory[c]) for c in chunks if c in self._memory]
        far = b"".join(c for c in chunks if c not in self._memory) if near else ids
        rows = self._store.located(far)
        if self._cache is not None:
            cached = [self._cache.has(ChunkId(chunk)) for chunk in rows["chunk"].tolist()]
            rows["codec"][np.array(cached, bool)] = codecs.RAW
        return np.concatenate([rows, *near]) if near else rows

    def listed(self, numbers: set[int]) -> dict[int, Pack]:
        return self._store.listed(numbers)

    def look_again(self) -> State:
        return self._store.look_again()


def _row(chunk: ChunkId, memory: memoryview) -> "NDArray[np.void]":
    row = np.zeros(1, LOCATED_DTYPE)
    row["chunk"], row["raw"], row["codec"] = np.void(chunk), len(memory), codecs.RAW
    return row
