"""How the footer of a stored pack is read: usually in one request, from the twin where the pack
itself is damaged."""

from collections.abc import Callable
from typing import TypeVar

from ckptstore.core.ids import PackId, pack_key, twin_key
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.objects.pack import TRAILER_BYTES, FooterTable, parse_footer, parse_trailer
from ckptstore.storage.contract import Storage

T = TypeVar("T")

_GUESS_BYTES = 65536
"""A tail of this size holds the footer of a pack of up to 1,022 chunks."""


def read_table(storage: Storage, pack: PackId, *, metadata: bool) -> FooterTable:
    """The records of `pack`, which has a twin if it holds `metadata`; raises `NotFound`, `Corrupt`,
    `Unavailable`."""
    return _of_pack_or_twin(read_table_at, storage, pack, metadata)


def read_tail_of(storage: Storage, pack: PackId, *, metadata: bool) -> bytes:
    """Footer and trailer of `pack`, as they lie in it; raises as `read_table` does."""
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
    """Footer and trailer as they lie there, and the records in them."""
    tail, size = storage.read_tail(key, _GUESS_BYTES)
    try:
        trailer = parse_trailer(tail[-TRAILER_BYTES:], size)
        if trailer.footer_bytes + TRAILER_BYTES > len(tail):
            tail = storage.read(key, trailer.footer_offset)
        tail = tail[-trailer.footer_bytes - TRAILER_BYTES :]
        return tail, parse_footer(tail[:-TRAILER_BYTES], trailer)
    except Corrupt as error:
        raise Corrupt(f"{key} in {storage.url}: {error}") from error
