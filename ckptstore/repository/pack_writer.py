"""How do new chunks get into packs?

Each thread fills its own pack, so a run's chunks lie together and no lock is needed. The disk
writes while the thread hashes the next chunks. A pack counts only after it was closed: footer
parsed back, fsync, name.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

from ckptstore.core.config import MIB
from ckptstore.core.ids import (
    ChunkId,
    PackId,
    SessionId,
    checksum,
    pack_id,
    pack_key,
    pack_session,
    twin_key,
)
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import CkptStoreError
from ckptstore.objects import codecs, pack, patches
from ckptstore.repository.thread_pool import ThreadPool, one_by_one
from ckptstore.storage.contract import Storage, Writer

Spread: TypeAlias = Callable[[Callable[[str], None], Sequence[str]], None]

FLUSH_BYTES = 2 * MIB
_ZEROS = bytes(4096)


class NewChunk(NamedTuple):
    """A chunk to write: its id, and the checksum and the memory of its raw bytes."""

    id: ChunkId
    checksum: bytes
    raw: memoryview


class NewPatch(NamedTuple):
    """A chunk to write as the patch `stored` of the chunks `bases`, with the checksum of its raw
    bytes."""

    id: ChunkId
    checksum: bytes
    raw_bytes: int
    width: int
    bases: tuple[ChunkId, ...]
    stored: bytes


def new_chunk(chunk: ChunkId, raw: memoryview) -> NewChunk:
    """A chunk to write, whose bytes were verified."""
    return NewChunk(chunk, checksum(raw), raw)


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
        self._writers: dict[str, Writer] = {}
        self._own: list[str] = []
        try:
            for key in (pack_key(name), twin_key(name)) if metadata else (pack_key(name),):
                self._writers[key] = storage.create(
                    key, session=pack_session(name), unbuffered=unbuffered, aside=aside
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

    def put(self, entry: PackEntry, stored: memoryview | bytes) -> int:
        """Queue a chunk that begins at `offset`, and return the number of its record. Chunks are
        written once there are enough."""
        self.append(stored)
        self.entries.append(entry)
        if self.is_full:
            self.flush()
        return len(self.entries) - 1

    @property
    def is_full(self) -> bool:
        """Whether enough is queued to be written."""
        return self.offset - self._flushed >= FLUSH_BYTES

    def pad_to(self, offset: int) -> None:
        while self.offset < offset:
            self.append(_ZEROS[: min(offset - self.offset, len(_ZEROS))])

    def flush(self) -> None:
        if not self._pending:
            return
        for writer in self._writers.values():
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
            spread(self._finish, list(self._writers))
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
        for writer in self._writers.values():
            writer.discard()
        delete_own(self._storage, self._own)

    def _finish(self, key: str) -> None:
        if self._writers[key].finish():
            self._own.append(key)


class PackWriter:
    """One thread's writer of packs. Each full pack is closed in the background."""

    def __init__(self, packs: "PackSet", *, metadata: bool) -> None:
        self._packs, self._metadata = packs, metadata
        self._pack: OpenPack | None = None

    def add(
        self,
        chunks: Sequence[NewChunk],
        width: int,
        kind: int,
        *,
        codec: int,
        run_bytes: int,
        whole: memoryview | None = None,
    ) -> None:
        """Append chunks that will lie next to each other: a run, or a piece of one.

        `run_bytes` is the run's raw length and decides its alignment; 0 if these chunks go on with
        the run of the last call. `whole` is the memory that holds all of `chunks` contiguously, if
        there is one: unencoded chunks then go to storage in one piece, even if they end within a
        disk block. The memory of `chunks` must not change before `flush`.
        """
        target = self.pack_with_room(run_bytes)
        if run_bytes:
            target.pad_to(pack.align(target.offset, run_bytes))
        if whole is not None and codec == codecs.RAW:
            offset = target.append(whole)
            for chunk, summed, raw in chunks:
                target.entries.append(
                    PackEntry(chunk, summed, offset, len(raw), len(raw), codecs.RAW, width, kind)
                )
                offset += len(raw)
            if target.is_full:
                target.flush()
            return
        for chunk, summed, raw in chunks:
            used, stored = codecs.encode(codec, raw, width)
            nbytes, offset = len(stored), target.offset
            entry = PackEntry(chunk, summed, offset, nbytes, len(raw), used, width, kind)
            target.put(entry, stored)

    def add_patches(self, chunks: Sequence[NewPatch]) -> None:
        """Append patches of tensor bytes, one directly behind the other."""
        target = self.pack_with_room(sum(len(chunk.stored) for chunk in chunks))
        for chunk, summed, raw_bytes, width, bases, stored in chunks:
            at, nbytes, depth = target.offset, len(stored), patches.head_of(stored).chain.depth
            entry = PackEntry(chunk, summed, at, nbytes, raw_bytes, codecs.PATCH, width)
            target.put(entry._replace(patch_of=b"".join(bases), depth=depth), stored)

    def pack_with_room(self, nbytes: int) -> OpenPack:
        """The pack to write `nbytes` to, if it has room for them, else a new one."""
        target = self._pack
        if target is None or (target.offset and target.offset + nbytes > self._packs.pack_bytes):
            self.close()
            target = self._pack = self._packs.open_pack(metadata=self._metadata)
        return target

    def flush(self) -> None:
        """Write the queued chunks; afterwards the caller may reuse their memory."""
        if self._pack:
            self._pack.flush()

    def close(self) -> None:
        """Close the open pack, in the background if it holds tensors; one without chunks is
        deleted."""
        self.flush()
        if self._pack and self._pack.entries:
            last, self._pack = self._pack, None
            self._packs.close(last, aside=not self._metadata)
        self.discard()

    def discard(self) -> None:
        """Delete the open pack; nothing refers to it."""
        if self._pack:
            self._pack.discard()
        self._pack = None


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

    @contextmanager
    def writing(self, *, metadata: bool = False) -> Iterator[PackWriter]:
        """A writer for one thread, whose last pack is closed after the block, or deleted if that
        raises."""
        writer = PackWriter(self, metadata=metadata)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.discard()
            raise

    def open_pack(self, *, metadata: bool) -> OpenPack:
        """A new pack of this session."""
        return OpenPack(
            self._storage,
            pack_id(self.session, self._rank, next(self._numbers)),
            metadata=metadata,
            unbuffered=self._unbuffered,
            aside=self._threads.aside,
        )

    def close(self, pack: OpenPack, *, aside: bool) -> None:
        """Close a pack, or let that be done in the background; `wait` waits for it."""
        if aside:
            self._closing.append(self._threads.submit(lambda: self._close(pack)))
        else:
            self._close(pack)

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
