"""How do new chunks get into packs?

Each thread fills its own pack, so a run's chunks lie together and no lock is needed. The disk
starts to write while the thread hashes on. A pack counts only after it was closed: footer parsed
back, fsync, name.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ckptstore.core.config import MIB
from ckptstore.core.ids import ChunkId, PackId, SessionId, pack_id, pack_key, pack_session, twin_key
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import CkptStoreError
from ckptstore.objects import codecs, pack
from ckptstore.storage.contract import Storage, Writer

Spread: TypeAlias = Callable[[Callable[[Writer], None], Sequence[Writer]], None]

FLUSH_BYTES = 2 * MIB
_ZEROS = bytes(4096)


def one_by_one(task: Callable[[Writer], None], writers: Sequence[Writer]) -> None:
    """The sequential `Spread`."""
    for writer in writers:
        task(writer)


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
            data_bytes = self.offset
            tail = pack.encode_tail(self.entries, data_bytes, self._metadata)
            table = _read_back(tail, data_bytes)
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
    """One thread's writer of packs. `close_pack` receives each full pack and may close it on
    another thread."""

    def __init__(
        self,
        storage: Storage,
        session: SessionId,
        numbers: Iterator[int],
        close_pack: Callable[[OpenPack], None],
        *,
        pack_bytes: int,
        rank: int = 0,
        unbuffered: bool = False,
        aside: bool = False,
        metadata: bool = False,
    ) -> None:
        self._storage, self._session, self._numbers, self._rank, self._unbuffered, self._aside = (
            storage,
            session,
            numbers,
            rank,
            unbuffered,
            aside,
        )
        self._close_pack, self._pack_bytes, self._metadata = close_pack, pack_bytes, metadata
        self._pack: OpenPack | None = None

    def add(
        self,
        ids: Sequence[ChunkId],
        raws: Sequence[memoryview],
        width: int,
        kind: int,
        *,
        codec: int,
        run_bytes: int,
        whole: memoryview | None = None,
    ) -> None:
        """Append a run: chunks that will lie next to each other.

        `run_bytes` is its raw length and decides its alignment. `whole` is the memory that holds
        all of `raws` contiguously, if there is one: unencoded chunks then go to storage in one
        piece, even if they end within a disk block. The memory of `raws` must not change before
        `flush`.
        """
        target = self._pack
        if target is None or (target.offset and target.offset + run_bytes > self._pack_bytes):
            target = self._next_pack()
        target.pad_to(pack.align(target.offset, run_bytes))
        if whole is not None and codec == codecs.RAW:
            offset = target.append(whole)
            for chunk, raw in zip(ids, raws, strict=True):
                target.entries.append(
                    PackEntry(chunk, offset, len(raw), len(raw), codecs.RAW, width, kind, 0)
                )
                offset += len(raw)
            if target.is_full:
                target.flush()
            return
        for chunk, raw in zip(ids, raws, strict=True):
            used, stored = codecs.encode(codec, raw, width)
            crc = zlib.crc32(stored) if used != codecs.RAW else 0
            offset = target.append(stored)
            target.entries.append(
                PackEntry(chunk, offset, len(stored), len(raw), used, width, kind, crc)
            )
            if target.is_full:
                target.flush()

    def flush(self) -> None:
        """Write the queued chunks; afterwards the caller may reuse their memory."""
        if self._pack:
            self._pack.flush()

    def close_with(self, close_pack: Callable[[OpenPack], None]) -> None:
        """Pass the last pack to `close_pack`."""
        last, self._pack = self._pack, None
        if last:
            close_pack(last)

    def discard(self) -> None:
        """Delete the open pack; nothing refers to it."""
        if self._pack:
            self._pack.discard()
            self._pack = None

    def _next_pack(self) -> OpenPack:
        self.flush()
        self.close_with(self._close_pack)
        name = pack_id(self._session, self._rank, next(self._numbers))
        self._pack = OpenPack(
            self._storage,
            name,
            metadata=self._metadata,
            unbuffered=self._unbuffered,
            aside=self._aside,
        )
        return self._pack


def delete_own(storage: Storage, keys: Iterable[str]) -> None:
    """Delete objects that no log entry will name. If storage fails, they stay for gc, which
    finds them under the session's name."""
    for key in keys:
        with suppress(CkptStoreError):
            storage.delete(key)


def _read_back(tail: bytes, footer_offset: int) -> pack.FooterTable:
    """The table of a footer, parsed as a reader parses it: an unreadable pack must not be
    closed."""
    footer_bytes = len(tail) - pack.TRAILER_BYTES
    trailer = pack.parse_trailer(tail[footer_bytes:], footer_offset + len(tail))
    return pack.parse_footer(tail[:footer_bytes], trailer)
