"""How the footer of a stored pack is read: usually in one request, from the twin where the pack itself is damaged."""

from ckptstore.core.ids import PackId, pack_key, twin_key
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.objects.backend import Backend
from ckptstore.objects.pack import TRAILER_BYTES, FooterTable, parse_footer, parse_trailer

_GUESS_BYTES = 65536
"""A tail of this size holds the footer of a pack of up to 1,022 chunks."""


def read_table(backend: Backend, pack: PackId, *, metadata: bool) -> FooterTable:
    """The records of `pack`, which has a twin if it holds `metadata`; raises `NotFound`, `Corrupt`, `Unavailable`."""
    try:
        return read_table_at(backend, pack_key(pack))
    except (Corrupt, NotFound, Unavailable):
        if not metadata:
            raise
        return read_table_at(backend, twin_key(pack))


def read_table_at(backend: Backend, key: str) -> FooterTable:
    """The records of the pack or twin at `key`; raises `NotFound`, `Corrupt`."""
    tail, size = backend.read_tail(key, _GUESS_BYTES)
    try:
        trailer = parse_trailer(tail[-TRAILER_BYTES:], size)
        if trailer.footer_bytes + TRAILER_BYTES > len(tail):
            tail = backend.read(key, trailer.footer_offset)
        return parse_footer(tail[-trailer.footer_bytes - TRAILER_BYTES : -TRAILER_BYTES], trailer)
    except Corrupt as error:
        raise Corrupt(f"{key} in {backend.url}: {error}") from error
