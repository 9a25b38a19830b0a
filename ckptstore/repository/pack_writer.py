"""How do new chunks get into packs?

Each thread fills its own pack, so a run's chunks lie together and no lock is needed. The disk
starts to write while the thread hashes on. A pack counts only after it was closed: footer parsed
back, fsync, name.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from ckptstore.core.config import MIB
from ckptstore.core.ids import ChunkId, PackId, SessionId, pack_id, pack_key, pack_session, twin_key
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import CkptStoreError
from ckptstore.objects import codecs, pack
from ckptstore.repository.thread_pool import ThreadPool, one_by_one
from ckptstore.storage.contract import Storage, Writer

Spread: TypeAlias = Callable[[Callable[[Writer], None], Sequence[Writer]], None]

FLUSH_BYTES = 2 * MIB
_ZEROS = bytes(4096)


@dataclass(frozen=True, slots=True)
class ClosedPack:
    """A durable pack that no log entry names yet, with its footer's table. `own` lists the
    objects to delete if none ever will."""

    record: PackRecord
    table: pack.FooterTable
    own: tuple[str, ...]


class OpenPack:
    """A pack being written, together with its twin."""

    def __init__(
        self,
        storage: Storage,
        name: PackId,
        *,
        metadata: bool,
        unbuffered: bool = False,
        aside: bool = False,
    ) -> None:
        self.name = name
        self.offset = 0
        self.entries: list[PackEntry] = []
        self._metadata = metadata
        self._pending: list[memoryview | bytes] = []
        self._flushed = 0
        self._storage = storage
        self._keys = [pack_key(name), twin_key(name)] if metadata else [pack_key(name)]
        self._writers: list[Writer] = []
        self._own: list[str] = []
        try:
            for key in self._keys:
                self._writers.append(
                    storage.create(
                        key, session=pack_session(name), unbuffered=unbuffered, aside=aside
                    )
                )
        except BaseException:
            self.discard()
            raise

    def append(self, data: memoryview | bytes) -> int:
        """Queue `data` at the end and return its offset. Its memory must not change before
        `flush`."""
        start = self.offset
        self._pending.append(data)
        self.offset += len(data)
        return start

    @property
    def is_full(self) -> bool:
        """Whether enough is queued for `flush`."""
        return self.offset - self._flushed >= FLUSH_BYTES

    def pad_to(self, offset: int) -> None:
        while self.offset < offset:
            self.append(_ZEROS[: min(offset - self.offset, len(_ZEROS))])

    def flush(self) -> None:
        if not self._pending:
            return
        for writer in self._writers:
            writer.append([memoryview(data) for data in self._pending])
        self._pending.clear()
        self._flushed = self.offset

    def close(self, spread: Spread = one_by_one) -> ClosedPack:
        """Write the footer, fsync and name the pack and its twin in parallel.

        The caller syncs the directory, once for all packs. Raises `Conflict` if another writer
        has taken a name; that writer's objects stay.
        """
        try:
            tail, table = pack.encode_tail(self.entries, self.offset, self._metadata)
            self.append(tail)
            self.flush()
            spread(self._finish, self._writers)
        except BaseException:
            self.discard()
            raise
        return ClosedPack(
            PackRecord(self.name, self.offset, len(self.entries), self._metadata),
            table,
            tuple(self._own),
        )

    def discard(self) -> None:
        """Delete the bytes written so far; one of two twins may already have its name. Objects
        of other writers stay."""
        for writer in self._writers:
            writer.discard()
        delete_own(self._storage, self._own)

    def _finish(self, writer: Writer) -> None:
        if writer.finish():
            self._own.append(self._keys[self._writers.index(writer)])


class PackWriter:
    """One thread's writer of packs. Each full pack is closed in the background."""

    def __init__(self, packs: "PackSet", *, metadata: bool) -> None:
        self._packs, self._metadata = packs, metadata
        self._pack: OpenPack | None = None

    def add(
        self,
        ids: Sequence[ChunkId],
        checksums: Sequence[bytes],
        raws: Sequence[memoryview],
        width: int,
        kind: int,
        *,
        codec: int,
        run_bytes: int,
        whole: memoryview | None = None,
    ) -> None:
        """Append chunks that will lie next to each other: a run, or a piece of one.

        `run_bytes` is the run's raw length and decides its alignment; 0 if these chunks go on with
        the run of the last call. `whole` is the memory that holds all of `raws` contiguously, if
        there is one: unencoded chunks then go to storage in one piece, even if they end within a
        disk block. The memory of `raws` must not change before `flush`.
        """
        target = self.pack_with_room(run_bytes)
        if run_bytes:
            target.pad_to(pack.align(target.offset, run_bytes))
        if whole is not None and codec == codecs.RAW:
            offset = target.append(whole)
            for chunk, summed, raw in zip(ids, checksums, raws, strict=True):
                target.entries.append(
                    PackEntry(chunk, summed, offset, len(raw), len(raw), codecs.RAW, width, kind)
                )
                offset += len(raw)
            if target.is_full:
                target.flush()
            return
        for chunk, summed, raw in zip(ids, checksums, raws, strict=True):
            used, stored = codecs.encode(codec, raw, width)
            offset = target.append(stored)
            target.entries.append(
                PackEntry(chunk, summed, offset, len(stored), len(raw), used, width, kind)
            )
            if target.is_full:
                target.flush()

    def pack_with_room(self, nbytes: int) -> OpenPack:
        """The pack to write `nbytes` to, if it has room for them, else a new one."""
        target = self._pack
        if target is None or (target.offset and target.offset + nbytes > self._packs.pack_bytes):
            self.flush()
            self._packs.close_aside(self)
            target = self._pack = self._packs.open_pack(metadata=self._metadata)
        return target

    def flush(self) -> None:
        """Write the queued chunks; afterwards the caller may reuse their memory."""
        if self._pack:
            self._pack.flush()

    def take(self) -> OpenPack | None:
        """The open pack, which is then the caller's to close."""
        last, self._pack = self._pack, None
        return last

    @property
    def is_empty(self) -> bool:
        """Whether the open pack has no chunks."""
        return self._pack is None or not self._pack.entries

    def discard(self) -> None:
        """Delete the open pack; nothing refers to it."""
        if last := self.take():
            last.discard()


class PackSet:
    """The packs of one session: names, closes or discards them. Named after `rank`."""

    def __init__(
        self,
        storage: Storage,
        session: SessionId,
        threads: ThreadPool,
        *,
        codec: int,
        rank: int = 0,
        unbuffered: bool = False,
    ) -> None:
        self.closed: list[ClosedPack] = []
        self.session, self.codec = session, codec
        self.pack_bytes = storage.capabilities.pack_bytes
        self._storage, self._threads = storage, threads
        self._rank, self._unbuffered = rank, unbuffered
        self._numbers = count()
        self._closing: list[Future[None]] = []
        self._lock = threading.Lock()

    def pack_writer(self, *, metadata: bool = False) -> PackWriter:
        return PackWriter(self, metadata=metadata)

    def open_pack(self, *, metadata: bool) -> OpenPack:
        """A new pack of this session."""
        return OpenPack(
            self._storage,
            pack_id(self.session, self._rank, next(self._numbers)),
            metadata=metadata,
            unbuffered=self._unbuffered,
            aside=self._threads.aside,
        )

    def close(self, pack_writer: PackWriter) -> None:
        """Close the writer's last pack on this thread."""
        if last := pack_writer.take():
            self._close(last)

    def close_aside(self, pack_writer: PackWriter) -> None:
        """Close the writer's last pack in the background; `wait` waits for it."""
        if last := pack_writer.take():
            self._closing.append(self._threads.submit(lambda: self._close(last)))

    def wait(self) -> None:
        """Wait until every pack is closed and durable."""
        for future in self._closing:
            future.result()
        self._closing.clear()
        self.closed.sort(key=lambda pack: pack.record.id)  # as they were opened, for equal logs
        self._storage.sync_dirs([pack_key(pack.record.id) for pack in self.closed])

    def drop(self) -> None:
        """Delete the closed packs, which no log entry will name. gc finds any that remain by the
        session's name."""
        for future in self._closing:
            future.exception()
        for closed in self.closed:
            delete_own(self._storage, closed.own)

    def _close(self, pack: OpenPack) -> None:
        closed = pack.close(self._threads.spread)
        with self._lock:
            self.closed.append(closed)


def delete_own(storage: Storage, keys: Iterable[str]) -> None:
    """Delete objects that no log entry will name. If storage fails, they stay for gc, which
    finds them under the session's name."""
    for key in keys:
        with suppress(CkptStoreError):
            storage.delete(key)
