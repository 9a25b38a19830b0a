"""How are the chunks of one pack read by its footer, without any index?

Maintenance reads this way: every chunk is verified, and the twin supplies the ones that the pack
has lost.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import PackId, digest, pack_key, twin_key
from ckptstore.errors import Corrupt, NotFound
from ckptstore.objects import codecs
from ckptstore.objects.pack import FooterTable
from ckptstore.repository.chunk_store import METADATA_BYTES_MAX
from ckptstore.storage.contract import Storage

GAP_BYTES = 64 << 10
"""Reading on across so much that nobody wants costs less than another read."""


class StoredChunk(NamedTuple):
    """Row `row` of a table with its stored and its raw bytes. The caller owns the memory."""

    row: int
    stored: memoryview
    raw: memoryview


def read_chunks(
    storage: Storage, pack: PackId, rows: FooterTable, *, metadata: bool
) -> Iterator[StoredChunk]:
    """The chunks of `rows`, in order of offset. A pack with `metadata` has a twin. Raises
    `Corrupt` for a chunk that does not match its id, `NotFound` for an absent pack."""
    for first, stop in _spans(rows):
        start = int(rows["offset"][first])
        size = int(rows["offset"][stop - 1]) + int(rows["stored"][stop - 1]) - start
        keys = (pack_key(pack), twin_key(pack)) if metadata else (pack_key(pack),)
        buffers = {keys[0]: _read(storage, keys[0], start, size, last=not metadata)}
        for i in range(first, stop):
            yield _verified(storage, keys, buffers, rows, i, start, size)


def _verified(
    storage: Storage,
    keys: tuple[str, ...],
    buffers: dict[str, memoryview | None],
    rows: FooterTable,
    i: int,
    start: int,
    size: int,
) -> StoredChunk:
    for key in keys:
        if key not in buffers:
            buffers[key] = _read(storage, key, start, size, last=True)
        if (buffer := buffers[key]) is None:
            continue
        at = int(rows["offset"][i]) - start
        stored = buffer[at : at + int(rows["stored"][i])]
        raw = _decode(stored, int(rows["codec"][i]), int(rows["raw"][i]), int(rows["width"][i]))
        if raw is not None and digest(raw) == rows["chunk"][i].tobytes():
            return StoredChunk(i, stored, raw)
    raise Corrupt(
        f"chunk {rows['chunk'][i].tobytes().hex()[:12]} in {' and '.join(keys)} of {storage.url} "
        "does not match its id; "
        f"run `ckptstore fsck --read-data`, or heal it with `ckptstore repair`"
    )


def _spans(rows: FooterTable) -> Iterator[tuple[int, int]]:
    """Row ranges `first:stop`, one per read."""
    starts, stops = rows["offset"].tolist(), (rows["offset"] + rows["stored"]).tolist()
    first = 0
    for i in range(1, len(starts) + 1):
        if (
            i == len(starts)
            or starts[i] - stops[i - 1] > GAP_BYTES
            or stops[i] - starts[first] > RUN_BYTES
        ):
            yield first, i
            first = i


def _read(storage: Storage, key: str, offset: int, size: int, *, last: bool) -> memoryview | None:
    """The bytes, padded with zeros where the object was truncated; None if it is absent and
    another copy remains to be tried."""
    buffer = memoryview(bytearray(size))
    try:
        storage.read_into(key, offset, [buffer])
    except Corrupt:
        return buffer  # each chunk is compared with its id
    except NotFound:
        if last:
            raise
        return None
    return buffer


def _decode(stored: memoryview, codec: int, raw_bytes: int, width: int) -> memoryview | None:
    """The raw bytes, or None if `stored` is damaged."""
    if codec == codecs.RAW:
        return stored
    if raw_bytes > METADATA_BYTES_MAX:  # more than any chunk has: the footer was forged
        return None
    raw = memoryview(bytearray(raw_bytes))
    try:
        codecs.decode_into(codec, stored, raw, width)
    except Corrupt:
        return None
    return raw
