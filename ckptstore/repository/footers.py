"""How are pack footers read: one by one, or in batches of a hundred?

A single footer takes one request. If the pack is damaged, its twin is read.

A batch holds the footers of a hundred packs in one object (docs/format.md §9, decisions/033-…),
so that a new host needs few requests. It is a cache; the packs' own footers stay the authority.
Each footer lies in the batch with its trailer. A footer that does not match its hash, or the
pack size that the log lists, is ignored.
"""

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from ckptstore.core.ids import PackId, digest, footers_key, pack_key, twin_key
from ckptstore.core.threads import Pool, behind
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.state import Pack, Packs, State
from ckptstore.objects.frames import compress, decompress
from ckptstore.objects.pack import TRAILER_BYTES, FooterTable, parse_footer, parse_trailer
from ckptstore.storage.contract import FOOTERS_BYTES_MAX, Storage

T = TypeVar("T")

_GUESS_BYTES = 65536
"""A tail of this size holds the footer of a pack of up to 1,022 chunks."""


def read_table(storage: Storage, pack: PackId, *, metadata: bool) -> FooterTable:
    """The records of `pack`, which has a twin if it holds `metadata`; raises `NotFound`, `Corrupt`,
    `Unavailable`."""
    return _of_pack_or_twin(read_table_at, storage, pack, metadata)


def read_tail_of(storage: Storage, pack: PackId, *, metadata: bool) -> bytes:
    """Footer and trailer of `pack` as stored; raises as `read_table` does."""
    return _of_pack_or_twin(_read_tail_at, storage, pack, metadata)


def read_table_at(storage: Storage, key: str) -> FooterTable:
    """The records of the pack or twin at `key`; raises `NotFound`, `Corrupt`."""
    return _read_at(storage, key)[1]


def _read_tail_at(storage: Storage, key: str) -> bytes:
    return _read_at(storage, key)[0]


def _of_pack_or_twin(
    read_at: Callable[[Storage, str], T], storage: Storage, pack: PackId, metadata: bool
) -> T:
    try:
        return read_at(storage, pack_key(pack))
    except (Corrupt, NotFound, Unavailable):
        if not metadata:
            raise
        return read_at(storage, twin_key(pack))


def _read_at(storage: Storage, key: str) -> tuple[bytes, FooterTable]:
    """Footer and trailer as stored, and the parsed records."""
    tail, size = storage.read_tail(key, _GUESS_BYTES)
    try:
        trailer = parse_trailer(tail[-TRAILER_BYTES:], size)
        if trailer.footer_bytes + TRAILER_BYTES > len(tail):
            tail = storage.read(key, trailer.footer_offset)
        tail = tail[-trailer.footer_bytes - TRAILER_BYTES :]
        return tail, parse_footer(tail[:-TRAILER_BYTES], trailer)
    except Corrupt as error:
        raise Corrupt(f"{key} in {storage.url}: {error}") from error


BATCH_PACKS = 100
AT_ONCE = 32
"""So many objects are read from a bucket side by side."""

_WORTH = 4
"""A batch is asked for where so many of its packs are wanted."""
_CAUGHT_UP = 10
"""So many batches that others did not come to write are written along with one."""
_PREFIX = "footers/"
_HASH_DIGITS = 64
_HEAD = struct.Struct("<40sI")

_logger = logging.getLogger("ckptstore")


def encode_batch(tails: Mapping[PackId, bytes]) -> bytes:
    """The bytes of the object `footers/<k>`; each tail is a pack's footer and trailer."""
    parts = [_HEAD.pack(pack.encode(), len(tail)) + tail for pack, tail in tails.items()]
    frame = compress(b"".join(parts))
    return digest(frame).hex().encode() + b"\n" + frame


def decode_batch(data: bytes) -> dict[str, bytes]:
    """The tails by pack id; raises `Corrupt`."""
    frame = memoryview(data)[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != digest(frame).hex().encode() + b"\n":
        raise Corrupt(
            "a batch of footers does not match its hash; it is ignored and may be deleted"
        )
    content, at, tails = decompress(frame, FOOTERS_BYTES_MAX), 0, {}
    while at < len(content):
        try:
            name, nbytes = _HEAD.unpack_from(content, at)
        except struct.error as error:
            raise Corrupt(
                f"a batch of footers ends in mid-entry: {error}; it is ignored and may be deleted"
            ) from error
        at += _HEAD.size + nbytes
        tails[name.rstrip(b"\0").decode("ascii", "replace")] = content[at - nbytes : at]
    return tails


class FooterBatches:
    """The batches of one store in a bucket. Threads may share it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._writing: threading.Thread | None = None

    def tables(self, numbers: Sequence[int], state: State) -> dict[int, FooterTable]:
        """The footers of listed packs that batches contain."""
        wanted: dict[int, list[int]] = {}
        for number in numbers:
            wanted.setdefault(number // BATCH_PACKS, []).append(number)
        written = state.next_pack // BATCH_PACKS
        batches = [
            batch for batch, members in wanted.items() if len(members) >= _WORTH and batch < written
        ]
        found: dict[int, FooterTable] = {}
        if batches:
            with Pool(min(AT_ONCE, len(batches))) as pool:
                for batch, tails in zip(batches, pool.map(self._read, batches), strict=True):
                    found.update(_checked(wanted[batch], state.packs, tails))
        return found

    def complete(self, last: int, packs: Packs) -> None:
        """Write, in the background, the batch that ends with pack number `last`, and a few
        missing ones before it."""
        if (last + 1) % BATCH_PACKS:
            return
        self.close()
        self._writing = behind(
            partial(self._complete, last // BATCH_PACKS, packs), "ckptstore-footers"
        )

    def close(self) -> None:
        """Wait for pending writes."""
        if self._writing is not None:
            self._writing.join()

    def _read(self, batch: int) -> dict[str, bytes]:
        try:
            return decode_batch(self._storage.read(footers_key(batch)))
        except NotFound:
            return {}
        except Corrupt as error:
            _logger.warning("%s in %s: %s", footers_key(batch), self._storage.url, error)
            return {}

    def _complete(self, newest: int, packs: Packs) -> None:
        members: dict[int, list[Pack]] = {}
        for number, pack in packs.items():
            members.setdefault(number // BATCH_PACKS, []).append(pack)
        try:
            there = {key for key, _ in self._storage.list(_PREFIX)}
            missing = [
                batch
                for batch in range(newest + 1)
                if batch in members and footers_key(batch) not in there
            ]
            for batch in missing[-_CAUGHT_UP:]:
                self._write(batch, members[batch])
            for key in there - set(map(footers_key, members)):
                self._storage.delete(key)
        except CkptStoreError as error:
            _logger.warning(
                "footers were not put together; a host without a cache reads more of them: %s",
                error,
            )

    def _write(self, batch: int, members: Iterable[Pack]) -> None:
        def read(pack: Pack) -> tuple[PackId, bytes] | None:
            try:
                return pack.id, read_tail_of(self._storage, pack.id, metadata=pack.metadata)
            except (NotFound, Corrupt):
                return None  # one that is gone or damaged is for `fsck` to report

        with Pool(AT_ONCE) as pool:
            tails = dict(filter(None, pool.map(read, members)))
        self._storage.put(footers_key(batch), encode_batch(tails))


def _checked(
    numbers: Iterable[int], packs: Packs, tails: Mapping[str, bytes]
) -> dict[int, FooterTable]:
    """The tables of those packs whose tail in `tails` passes the checks."""
    found = {}
    for number in numbers:
        pack = packs[number]
        if (tail := tails.get(pack.id)) is not None:
            try:
                trailer = parse_trailer(tail[-TRAILER_BYTES:], pack.bytes)
                found[number] = parse_footer(tail[:-TRAILER_BYTES], trailer)
            except Corrupt as error:
                _logger.warning("the footer of pack %s in a batch is not used: %s", pack.id, error)
    return found
