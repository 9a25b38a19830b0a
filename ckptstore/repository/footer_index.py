"""Which chunks do a store's packs hold, by their footers alone?

No index is consulted, so a damaged index cannot hide a missing chunk.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, PackId, digest, pack_key, twin_key
from ckptstore.core.model import PackEntry
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.fold import State
from ckptstore.objects import codecs, pack
from ckptstore.repository import footers
from ckptstore.repository.chunk_store import METADATA_BYTES_MAX
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORDS = CHUNK_ID_BYTES // 8


Strays: TypeAlias = Mapping[str, tuple[PackId, pack.FooterTable]]
"""Tables of twins that list other chunks than their pack does, by key."""


class Place(NamedTuple):
    """A chunk in a pack; `keys` are the objects that hold it there, the pack and its twin."""

    pack: PackId
    keys: tuple[str, ...]
    entry: PackEntry


class Inventory:
    """The chunks of packs whose footers could be read."""

    def __init__(
        self, tables: Mapping[PackId, pack.FooterTable], strays: "Strays | None" = None
    ) -> None:
        self._tables: list[tuple[PackId, str | None, pack.FooterTable]] = [
            (name, None, table) for name, table in tables.items()
        ]
        self._tables += [(name, key, table) for key, (name, table) in (strays or {}).items()]
        lengths = [len(table) for _, _, table in self._tables]
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        ids = [_words(table["chunk"].tobytes()) for _, _, table in self._tables]
        rows = np.concatenate(ids) if ids else np.empty((0, _WORDS), "<u8")
        self._order = np.argsort(rows[:, 0], kind="stable")
        self._rows = rows[self._order]
        self._first = np.ascontiguousarray(self._rows[:, 0])

    def __len__(self) -> int:
        return len(self._order)

    def missing(self, ids: bytes) -> list[ChunkId]:
        """The ids of `ids`, 32 bytes each, that no pack holds."""
        wanted = _words(ids)
        if not len(self):
            return [_id(row) for row in wanted]
        at = np.minimum(np.searchsorted(self._first, wanted[:, 0]), len(self) - 1)
        unsure = np.flatnonzero((self._rows[at] != wanted).any(axis=1))
        return [chunk for i in unsure if not self.places(chunk := _id(wanted[i]))]

    def places(self, chunk: ChunkId) -> list[Place]:
        """Every pack that holds `chunk`, and the position there."""
        word = _words(chunk)[0, 0]
        first, stop = (
            np.searchsorted(self._first, word, "left"),
            np.searchsorted(self._first, word, "right"),
        )
        found = (self._place(int(at)) for at in self._order[first:stop])
        return [place for place in found if place.entry.chunk == chunk]

    def _place(self, at: int) -> Place:
        number = int(np.searchsorted(self._starts, at, "right")) - 1
        (name, key, table), row = self._tables[number], at - int(self._starts[number])
        entry = pack.entries(table[row : row + 1])[0]
        return Place(
            name, (key,) if key else keys_of(name, metadata=entry.kind != pack.TENSOR), entry
        )


def load_tables(
    storage: Storage, state: State, known: Mapping[PackId, pack.FooterTable] | None = None
) -> Iterator[tuple[PackId, pack.FooterTable | Corrupt | NotFound | Unavailable]]:
    """The footer of every pack that the log lists, or the reason why it cannot be read. Packs in
    `known` are not read again."""
    for _, listed in sorted(state.packs.items()):
        if known and listed.id in known:
            yield listed.id, known[listed.id]
            continue
        try:
            yield listed.id, footers.read_table(storage, listed.id, metadata=listed.metadata)
        except (Corrupt, NotFound, Unavailable) as error:
            yield listed.id, error


def keys_of(name: PackId, *, metadata: bool) -> tuple[str, ...]:
    """The object keys of a pack: its own, and its twin's if it holds metadata."""
    return (pack_key(name), twin_key(name)) if metadata else (pack_key(name),)


def read_chunk(storage: Storage, places: Iterable[Place]) -> memoryview:
    """The raw bytes of a chunk from the first place where they match its id. Raises `Corrupt`,
    `NotFound` or `Unavailable` if no place has them."""
    problem: Corrupt | NotFound | Unavailable = NotFound("the chunk lies in no pack")
    for place in places:
        for key in place.keys:
            try:
                return read_chunk_at(storage, key, place.entry)
            except (Corrupt, NotFound, Unavailable) as error:
                problem = error
    raise problem


def read_chunk_at(storage: Storage, key: str, entry: PackEntry) -> memoryview:
    """The raw bytes of the chunk at `entry` of the pack or twin at `key`, verified against its
    id."""
    stored = bytearray(entry.stored_bytes)
    storage.read_into(key, entry.offset, [memoryview(stored)])
    return decode_chunk(memoryview(stored), entry, key)


def decode_chunk(stored: memoryview, entry: PackEntry, key: str) -> memoryview:
    """The verified raw bytes of a chunk; may be the memory of `stored`. Raises `Corrupt` if they
    do not match the id, or if the chunk claims an impossible size."""
    if entry.raw_bytes > METADATA_BYTES_MAX:
        raise Corrupt(
            f"chunk {entry.chunk.hex()[:12]} in {key} claims {entry.raw_bytes} bytes; wanted at "
            f"most {METADATA_BYTES_MAX}"
        )
    if entry.codec == codecs.RAW and len(stored) == entry.raw_bytes:
        raw = stored
    else:
        raw = memoryview(bytearray(entry.raw_bytes))
        codecs.decode_into(entry.codec, stored, raw, entry.width)
    if (got := digest(raw)) != entry.chunk:
        raise Corrupt(
            f"chunk {entry.chunk.hex()[:12]} in {key} does not match its id: got {got.hex()[:12]}"
        )
    return raw


def _words(ids: bytes) -> "NDArray[np.uint64]":
    words: NDArray[np.uint64] = np.frombuffer(ids, "<u8").reshape(-1, _WORDS)
    return words


def _id(row: "NDArray[np.uint64]") -> ChunkId:
    return ChunkId(row.tobytes())
