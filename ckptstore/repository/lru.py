"""Schemas and pages that were read or written lately, by chunk id, within a byte limit. Least
recently used go first."""

import threading
from collections import OrderedDict

from ckptstore.core.ids import ChunkId


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
