"""How are the packs of one session named, closed and discarded?"""

import threading
from concurrent.futures import Future
from itertools import count
from typing import Self

from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import SessionId, pack_key
from ckptstore.objects import codecs
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.pack_writer import ClosedPack, OpenPack, PackWriter, delete_own
from ckptstore.repository.thread_pool import ThreadPool


class PackSet:
    """The packs of one session: numbers their writers, and closes or discards the packs."""

    def __init__(
        self,
        objects: ObjectStore,
        session: SessionId,
        threads: ThreadPool,
        *,
        codec: int,
        pack_bytes: int,
        rank: int = 0,
        unbuffered: bool = False,
    ) -> None:
        self.closed: list[ClosedPack] = []
        self.session = session
        self._objects, self._threads = objects, threads
        self._pack_bytes, self._rank, self._unbuffered = pack_bytes, rank, unbuffered
        self.codec = codec
        self._numbers = count()
        self._closing: list[Future[None]] = []
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        config: StoreConfig,
        objects: ObjectStore,
        session: SessionId,
        threads: ThreadPool,
        rank: int = 0,
        *,
        unbuffered: bool = False,
    ) -> Self:
        """Packs with the store's codec and the storage's preferred size, named after `rank`."""
        return cls(
            objects,
            session,
            threads,
            codec=codecs.codec_id(config.codec),
            pack_bytes=objects.storage.capabilities.pack_bytes,
            rank=rank,
            unbuffered=unbuffered,
        )

    def pack_writer(self, *, metadata: bool = False) -> PackWriter:
        return PackWriter(
            self._objects.storage,
            self.session,
            self._numbers,
            self._close_aside,
            pack_bytes=self._pack_bytes,
            rank=self._rank,
            unbuffered=self._unbuffered,
            aside=self._threads.aside,
            metadata=metadata,
        )

    def close(self, pack_writer: PackWriter) -> None:
        """Close the writer's last pack on this thread."""
        pack_writer.close_with(self._close)

    def close_aside(self, pack_writer: PackWriter) -> None:
        """Close the writer's last pack in the background; `wait` waits for it."""
        pack_writer.close_with(self._close_aside)

    def wait(self) -> None:
        """Wait until every pack is closed and durable."""
        for future in self._closing:
            future.result()
        self._closing.clear()
        self._objects.storage.sync_dirs([pack_key(pack.record.id) for pack in self.closed])

    def drop(self) -> None:
        """Delete the closed packs, which no log entry will name. gc finds any that remain by the
        session's name."""
        for future in self._closing:
            future.exception()
        for pack in self.closed:
            delete_own(self._objects.storage, pack.own)

    def _close_aside(self, pack: OpenPack) -> None:
        self._closing.append(self._threads.submit(lambda: self._close(pack)))

    def _close(self, pack: OpenPack) -> None:
        closed = pack.close(self._threads.spread)
        with self._lock:
            self.closed.append(closed)
