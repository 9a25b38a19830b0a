"""Which metadata and which checksums does this process remember?

`MetadataCache` keeps recently used schemas and pages within a byte limit. `SecondNames` maps
fast checksums of chunks to ids. It learns a pair only from the same bytes, and nothing of it is
stored.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from ckptstore.core.ids import ChunkId, digest


class MetadataCache:
    """Least recently used metadata chunks. Thread-safe. Data above the limit is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._items: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, chunk: ChunkId) -> bytes | None:
        with self._lock:
            if chunk in self._items:
                self._items.move_to_end(chunk)
                return self._items[chunk]
            return None

    def put(self, chunk: ChunkId, data: bytes) -> None:
        if len(data) > self._limit_bytes:
            return
        with self._lock:
            self._bytes += len(data) - len(self._items.pop(chunk, b""))
            self._items[chunk] = data
            while self._bytes > self._limit_bytes:
                _, gone = self._items.popitem(last=False)
                self._bytes -= len(gone)


NAMES_MAX = 1 << 18
"""The oldest names are forgotten beyond: 256 GB of chunks of 1 MiB, in 64 MB of memory."""


class SecondNames:
    """In-memory map from checksum to chunk id. Thread-safe."""

    def __init__(self, naming: Callable[[memoryview], bytes]) -> None:
        self._naming = naming
        self._ids: dict[bytes, ChunkId] = {}
        self._lock = threading.Lock()

    def learn(self, data: memoryview) -> tuple[ChunkId, bytes]:
        """The id and the checksum of a chunk, which the map remembers. Nobody may write to
        `data` meanwhile."""
        chunk, name = ChunkId(digest(data)), self._naming(data)
        with self._lock:
            self._ids.pop(name, None)
            self._ids[name] = chunk
            if len(self._ids) > NAMES_MAX:
                del self._ids[next(iter(self._ids))]
        return chunk, name

    def id_of(self, name: bytes) -> ChunkId | None:
        return self._ids.get(name)

    def forget(self, name: bytes) -> None:
        """Drop a checksum that turned out to belong to another chunk."""
        with self._lock:
            self._ids.pop(name, None)
