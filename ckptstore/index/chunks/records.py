"""Records of the chunk index: 48 bytes per chunk, with a sum over store, chunk id and every field.

A batch is encoded and checked at once with numpy, never chunk by chunk. `MemoryRecords` holds the
records that could not be written to disk. As on disk, of several copies the one with the fewest
patches wins, and of equal ones that in the pack added last.

`remains` finds records in a file in any state by their sums, without liblmdb. Only the index knows
the content of a pack whose footer is lost, and a damaged index is recreated when it is opened; so
`repair` reads the remaining records before. Some may be stale: a record counts only if the bytes at
its location match the chunk's id.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.config import MIB
from ckptstore.core.ids import CHUNK_ID_BYTES, PackId, StoreId, digest
from ckptstore.core.paths import is_plain
from ckptstore.index.chunks.lmdb_check import Damaged

LOCATION_DTYPE = np.dtype(
    {
        "names": [
            "pack",
            "stored",
            "raw",
            "codec",
            "width",
            "found",
            "depth",
            "offset",
            "checksum",
            "check",
        ],
        "formats": ["<u4", "<u4", "<u4", "u1", "u1", "u1", "u1", "<u8", "V16", "<u8"],
        "offsets": [0, 4, 8, 12, 13, 14, 15, 16, 24, 40],
        "itemsize": 48,
    }
)
"""The location of a chunk: pack number, offset and stored bytes in it, raw bytes, codec, element
width, the patches between it and a whole chunk, and the checksum of its raw bytes. `found` is 0 if
unknown."""

_FIELDS: Mapping[str, tuple[Any, ...]] = LOCATION_DTYPE.fields or {}

LOCATED_DTYPE = np.dtype(
    {
        "names": ["chunk", *_FIELDS],
        "formats": [f"V{CHUNK_ID_BYTES}", *(field[0] for field in _FIELDS.values())],
        "offsets": [0, *(CHUNK_ID_BYTES + field[1] for field in _FIELDS.values())],
        "itemsize": CHUNK_ID_BYTES + LOCATION_DTYPE.itemsize,
    }
)
"""The id of a chunk, and its location: what a look-up returns."""

Locations: TypeAlias = npt.NDArray[np.void]
RECORD_BYTES = LOCATION_DTYPE.itemsize
NUMBER_BYTES = 4
"""Of a pack's number in a key."""
NOTHING = bytes(RECORD_BYTES)

_ID = np.dtype(f"V{CHUNK_ID_BYTES}")
_ITEM = np.dtype([("chunk", _ID), ("record", f"V{RECORD_BYTES}")])
_CHECK_WORD = RECORD_BYTES // 8 - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def seed_of(store: StoreId) -> int:
    """The seed of a store's checksums, so that another store's records do not pass."""
    return int.from_bytes(digest(b"ckptstore chunk index " + store.encode())[:8], "little")


def ids_of(ids: bytes | npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """`ids`, 32 bytes each, as an array whose `tolist` gives bytes."""
    return np.frombuffer(ids, _ID)


def sorted_order(ids: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """The order of `ids` in the index, except among ids that share their first eight bytes."""
    return np.argsort(ids.view(">u8").reshape(-1, CHUNK_ID_BYTES // 8)[:, 0].astype(np.uint64))


def with_ids(ids: npt.NDArray[np.void], rows: Locations) -> Locations:
    """The locations of `ids`, in the same order, as rows of `LOCATED_DTYPE`."""
    found = np.empty(len(rows), LOCATED_DTYPE)
    id_words, row_words = CHUNK_ID_BYTES // 8, RECORD_BYTES // 8
    words = found.view(np.uint64).reshape(-1, id_words + row_words)
    words[:, :id_words] = ids.view(np.uint64).reshape(-1, id_words)
    words[:, id_words:] = rows.view(np.uint64).reshape(-1, row_words)
    return found


def encode(seed: int, number: int, table: npt.NDArray[np.void]) -> Locations:
    """The chunks of pack `number`, whose footer has the rows `table`, as rows of `LOCATED_DTYPE`
    in the order of the index."""
    ids = np.ascontiguousarray(table["chunk"])
    order = sorted_order(ids)
    ids, table = ids[order], table[order]
    rows = np.zeros(len(table), LOCATION_DTYPE)
    rows["pack"], rows["found"] = number, 1
    for field in ("stored", "raw", "codec", "width", "depth", "offset", "checksum"):
        rows[field] = table[field]
    rows["check"] = checks(seed, ids, rows)
    return with_ids(ids, rows)


def decode(seed: int, ids: npt.NDArray[np.void], records: bytearray) -> tuple[Locations, bool]:
    """The records of `ids`, `NOTHING` for absent ones, and whether all are sound. Damaged ones
    count as absent."""
    rows = np.frombuffer(records, LOCATION_DTYPE)
    if records.count(0) == len(records):
        return rows, True
    wrong = checks(seed, ids, rows) != rows["check"]
    if not wrong.any():
        return rows, True
    damaged = wrong & np.frombuffer(records, np.uint64).reshape(-1, RECORD_BYTES // 8).any(axis=1)
    rows[wrong] = np.zeros((), LOCATION_DTYPE)
    return rows, not damaged.any()


def items_of(rows: Locations) -> list[tuple[bytes, bytes]]:
    """Id and record of each of `rows`, which are of `LOCATED_DTYPE`."""
    items: list[tuple[bytes, bytes]] = rows.view(_ITEM).tolist()
    return items


def checks(seed: int, ids: npt.NDArray[np.void], rows: Locations) -> npt.NDArray[np.uint64]:
    """64-bit checksums of records over store, chunk id and fields.

    Each step is a bijection of the sum so far, so that one changed word is always detected.
    """
    total = np.full(len(rows), seed, np.uint64)
    keys = ids.view(np.uint64).reshape(-1, CHUNK_ID_BYTES // 8)
    values = rows.view(np.uint64).reshape(-1, RECORD_BYTES // 8)
    for words in (*keys.T, *values.T[:_CHECK_WORD]):
        total ^= words
        total *= _ODD
        total ^= total >> _SHIFT
    return total


def encode_pack(seed: int, number: int, pack: PackId) -> bytes:
    """The row saying that every chunk of pack `number` is in the index."""
    return _pack_check(seed, number, pack.encode()) + pack.encode()


def decode_pack(seed: int, key: bytes, row: bytes) -> tuple[int, PackId]:
    """The pack's number and id. Raises `Damaged` unless `encode_pack` made the row for this key:
    any bytes may lie there."""
    number = int.from_bytes(key)
    if len(key) != NUMBER_BYTES or _pack_check(seed, number, row[8:]) != row[:8]:
        raise Damaged(f"the row {key[:16].hex()} lists no pack")
    return number, PackId(row[8:].decode())


def _pack_check(seed: int, number: int, pack: bytes) -> bytes:
    return digest(seed.to_bytes(8, "little") + number.to_bytes(NUMBER_BYTES, "little") + pack)[:8]


def depth_of(record: bytes) -> int:
    """How many patches lie between a chunk at this place and a whole one. Raises `Damaged` for a
    record that does not have the size that all have."""
    if len(record) != RECORD_BYTES:
        raise Damaged("a record does not have the size that all have")
    return record[_DEPTH]


class MemoryRecords:
    """Records by chunk id, by pack. The caller serializes access."""

    def __init__(self) -> None:
        self.packs: dict[int, PackId] = {}
        self.contents: dict[int, Locations] = {}
        """The chunks of a pack as they were added."""
        self._by_id: dict[bytes, bytes] = {}

    def add(self, number: int, pack: PackId, rows: Locations) -> None:
        if self.packs.get(number, pack) != pack:
            self.drop([number])
        self._index(rows)
        self.contents[number] = rows
        self.packs[number] = pack

    def get(self, ids: Iterable[bytes]) -> bytearray:
        return bytearray().join(map(self._by_id.get, ids, repeat(NOTHING)))

    def drop(self, numbers: Iterable[int]) -> None:
        gone = self.packs.keys() & set(numbers)
        for number in gone:
            del self.packs[number], self.contents[number]
        if gone:
            self._by_id = {}
            for rows in self.contents.values():
                self._index(rows)

    def _index(self, rows: Locations) -> None:
        """The copy with the fewest patches counts, of equal ones the last."""
        for chunk, record in items_of(rows):
            known = self._by_id.get(chunk)
            if known is None or depth_of(record) <= depth_of(known):
                self._by_id[chunk] = record


_DISTANCES = (CHUNK_ID_BYTES, CHUNK_ID_BYTES + NUMBER_BYTES)
"""Distance from a chunk id to its record in either database. LMDB puts a value right after its key.
"""
_OVERLAP = _DISTANCES[-1] + RECORD_BYTES
_FOUND: int = _FIELDS["found"][1]
_DEPTH: int = _FIELDS["depth"][1]


def remains(folder: Path, store: StoreId) -> Iterator[Locations]:
    """Rows of `LOCATED_DTYPE` of `store` in the index at `folder`, in blocks; none without a
    readable file."""
    seed = seed_of(store)
    if not is_plain(folder / "data.mdb"):
        return
    try:
        with open(folder / "data.mdb", "rb") as file:
            tail = b""
            while block := file.read(MIB):
                data = np.frombuffer(tail + block, np.uint8)
                for distance in _DISTANCES:
                    yield _in_block(data, distance, seed)
                tail = data[-(_OVERLAP + _OVERLAP % 2) :].tobytes()
    except OSError:
        return


def _in_block(data: npt.NDArray[np.uint8], distance: int, seed: int) -> Locations:
    count = max(0, len(data) - distance - RECORD_BYTES + 1)
    # Keys begin at even offsets.
    marks = data[distance + _FOUND : distance + _FOUND + count : 2]
    starts = 2 * np.flatnonzero(marks == 1)
    ids = ids_of(data[starts[:, None] + np.arange(CHUNK_ID_BYTES)].tobytes())
    rows = np.frombuffer(
        data[starts[:, None] + distance + np.arange(RECORD_BYTES)].tobytes(), LOCATION_DTYPE
    )
    sound = checks(seed, ids, rows) == rows["check"]
    return with_ids(ids[sound], rows[sound])
