"""Schemas and pages that were read or written lately, by chunk id, within a byte limit. Least
recently used go first.

What chunks are called besides their ids, by a hash that takes less time, as far as this process
has hashed them by both.

A name stands for an id here only if both were made of the same bytes. Nothing of it is stored: a
new process begins with nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from ckptstore.core.ids import ChunkId, digest


class MetadataCache:
    """Thread-safe. What does not fit at all is not kept."""

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
    """Ids by what `naming` calls their chunks. Threads share it."""

    def __init__(self, naming: Callable[[memoryview], bytes]) -> None:
        self._naming = naming
        self._ids: dict[bytes, ChunkId] = {}
        self._lock = threading.Lock()

    def learn(self, data: memoryview) -> tuple[ChunkId, bytes]:
        """The id of a chunk, and its name, which is known from now on. Nobody may write to `data`
        meanwhile."""
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
        """What is called so is another chunk than the one that was learned."""
        with self._lock:
            self._ids.pop(name, None)
