"""A segment is a hundred entries of the log in one object, so that who knows none of them need not
ask for each (docs/format.md §9).

It is a cache of the log: the entries stay where they are, and are the authority. Each names the
hash of the one before, so a segment whose last entry is the log's holds the log's; whoever reads
one compares that, and ignores a segment that is not what it should be.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise

from ckptstore.core.ids import StoreId, digest
from ckptstore.errors import Corrupt
from ckptstore.log.entries import Entry, check_follows, decode_entry, encode_again
from ckptstore.objects.frames import compress, decompress
from ckptstore.storage.limits import SEGMENT_BYTES_MAX

SEGMENT_ENTRIES = 100
"""Few enough for whoever appends the last one to know them all, and to leave less than that many to
be asked for one by one."""

_HASH_DIGITS = 64
_LENGTHS = struct.Struct(f"<{SEGMENT_ENTRIES}I")


def segment_end(n: int) -> int:
    """The last entry of the segment that entry `n` is in."""
    return -(-n // SEGMENT_ENTRIES) * SEGMENT_ENTRIES


def encode_segment(entries: Sequence[Entry]) -> bytes:
    """The bytes of the file `log/segment-<n>` for the `SEGMENT_ENTRIES` entries up to `n`."""
    files = [encode_again(entry) for entry in entries]
    frame = compress(_LENGTHS.pack(*map(len, files)) + b"".join(files))
    return digest(frame).hex().encode() + b"\n" + frame


def decode_segment(data: bytes, last: int, store: StoreId) -> list[Entry]:
    """The entries up to `last` of the log of `store`, each of which names the one before.

    Raises `Corrupt` for anything else, `NewerEntry` for an entry that is not known here.
    """
    frame = memoryview(data)[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != digest(frame).hex().encode() + b"\n":
        raise Corrupt(
            "a segment of the log does not match its hash; it is ignored and may be deleted"
        )
    entries = [
        decode_entry(file)
        for file in _files(decompress(frame, SEGMENT_BYTES_MAX, min_bytes=_LENGTHS.size))
    ]
    for before, entry in pairwise(entries):
        check_follows(entry, before.position, store)
    if (entries[-1].n, entries[-1].store) != (last, store):
        raise Corrupt(
            f"a segment of the log ends at entry {entries[-1].n} of store {entries[-1].store}; "
            f"wanted {last} of {store}"
        )
    return entries


def _files(content: bytes) -> list[bytes]:
    lengths = _LENGTHS.unpack_from(content)
    if _LENGTHS.size + sum(lengths) != len(content):
        raise Corrupt(
            f"a segment of the log has {len(content)} bytes; wanted "
            f"{_LENGTHS.size + sum(lengths)}; it is ignored"
        )
    files, at = [], _LENGTHS.size
    for length in lengths:
        files.append(content[at : at + length])
        at += length
    return files
