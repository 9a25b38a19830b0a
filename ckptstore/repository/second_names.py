"""What chunks are called besides their ids, by a hash that takes less time, as far as this process
has hashed them by both.

A name stands for an id here only if both were made of the same bytes. Nothing of it is stored: a
new process begins with nothing.
"""

import threading
from collections.abc import Callable

from ckptstore.core.ids import ChunkId, digest

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
