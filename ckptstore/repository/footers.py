"""Which chunks do packs hold, by their footers alone?

A single footer takes one request. If the pack is damaged, its twin is read. `Inventory` finds
chunks without the index, so a damaged index cannot hide a missing chunk.

A batch holds the footers of a hundred packs in one object (docs/format.md §9, decisions/033-…),
so that a new host needs few requests. It is a cache; the packs' own footers stay the authority.
Each footer lies in the batch with its trailer. A footer that does not match its hash, or the
pack size that the log lists, is ignored.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, PackId, footers_key, pack_key
from ckptstore.core.model import PackEntry
from ckptstore.core.process import Pool, behind
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.state import Pack, Packs, State
from ckptstore.objects.frames import bundle, unbundle
from ckptstore.objects.pack import (
    TRAILER_BYTES,
    FooterTable,
    entries,
    parse_footer,
    parse_trailer,
)
from ckptstore.repository.chunk_reader import (
    AnyPack,
    Problem,
    Request,
    StoredPatch,
    keys_of,
    read_chunk_at,
    stored_patch_at,
    verify_at,
)
from ckptstore.storage.contract import COPY, FOOTERS_BYTES_MAX, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

AT_ONCE = 32
"""So many objects are read from a bucket side by side."""

_WORDS = CHUNK_ID_BYTES // 8
_GUESS_BYTES = 65536
"""A tail of this size holds the footer of a pack of up to 818 chunks."""


class Footer(NamedTuple):
    """The records of a pack, and footer and trailer as stored."""

    table: FooterTable
    tail: bytes


def read_table(storage: Storage, pack: AnyPack) -> FooterTable:
    """The records of `pack`; raises `NotFound`, `Corrupt`, `Unavailable`."""
    return read_footer(storage, pack).table


def read_footer(storage: Storage, pack: AnyPack) -> Footer:
    """The footer of `pack` or of its twin; raises as `read_table` does."""
    first, *others = keys_of(pack)
    try:
        return _read_at(storage, first)
    except (Corrupt, NotFound, Unavailable):
        if storage.capabilities.copies:
            with suppress(Corrupt, NotFound, Unavailable):
                return _read_at(storage, first + COPY)
        if not others:
            raise
        return _read_at(storage, others[0])


def read_table_at(storage: Storage, key: str) -> FooterTable:
    """The records of the pack or twin at `key`; raises `NotFound`, `Corrupt`."""
    return _read_at(storage, key).table


def is_elsewhere(storage: Storage, pack: Pack, entry: PackEntry) -> bool:
    """Whether the footer of `pack` lacks the chunk of `entry`, or gives it another place or
    checksum. False if it cannot be read."""
    try:
        table = read_table_at(storage, pack_key(pack.id))
    except (Corrupt, NotFound, Unavailable):
        return False
    there = table[["chunk", "checksum"]][table["offset"] == entry.offset].tolist()
    return (entry.chunk, entry.checksum) not in there


def load_tables(
    storage: Storage, listed: Sequence[Pack]
) -> Iterator[tuple[Pack, FooterTable | Problem]]:
    """The footer of each pack, in order, or the reason why it cannot be read. Slow storage is asked
    for several at once."""

    def read(pack: Pack) -> tuple[Pack, FooterTable | Problem]:
        try:
            return pack, read_table(storage, pack)
        except (Corrupt, NotFound, Unavailable) as error:
            return pack, error

    if not storage.capabilities.slow_requests or len(listed) < 2:
        yield from map(read, listed)
        return
    with Pool(min(AT_ONCE, len(listed))) as pool:
        yield from pool.map(read, listed)


def _read_at(storage: Storage, key: str) -> Footer:
    tail, size = storage.read_tail(key, _GUESS_BYTES)
    try:
        trailer = parse_trailer(tail[-TRAILER_BYTES:], size)
        if trailer.footer_bytes + TRAILER_BYTES > len(tail):
            tail = storage.read(key, trailer.footer_offset)
        tail = tail[-trailer.footer_bytes - TRAILER_BYTES :]
        return Footer(parse_footer(tail[:-TRAILER_BYTES], trailer), tail)
    except Corrupt as error:
        raise Corrupt(f"{key} in {storage.url}: {error}") from error


class ChunkInPack(NamedTuple):
    """A chunk in a pack; `keys` are the objects that hold it there, the pack and its twin."""

    pack: PackId
    keys: tuple[str, ...]
    entry: PackEntry


class Table(NamedTuple):
    """The footer of a pack, and the objects that have its chunks."""

    pack: PackId
    keys: tuple[str, ...]
    rows: FooterTable


class Inventory:
    """The chunks of packs whose footers could be read."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)
        lengths = [len(table.rows) for table in self._tables]
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        ids = [_words(table.rows["chunk"].tobytes()) for table in self._tables]
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

    def places(self, chunk: ChunkId) -> list[ChunkInPack]:
        """Every pack that holds `chunk`, and the position there."""
        word = _words(chunk)[0, 0]
        first, stop = (
            np.searchsorted(self._first, word, "left"),
            np.searchsorted(self._first, word, "right"),
        )
        found = (self._place(int(at)) for at in self._order[first:stop])
        return [place for place in found if place.entry.chunk == chunk]

    def _place(self, at: int) -> ChunkInPack:
        number = int(np.searchsorted(self._starts, at, "right")) - 1
        (pack, keys, rows), row = self._tables[number], at - int(self._starts[number])
        return ChunkInPack(pack, keys, entries(rows[row : row + 1])[0])


def read_chunk(
    storage: Storage, places: Iterable[ChunkInPack], out: memoryview | None = None
) -> memoryview:
    """The raw bytes of a chunk from the first place where they match its id. If no place has them,
    raises `Unavailable` where one did not answer, else `Corrupt` or `NotFound`."""
    return _first(places, lambda place: read_chunk_at(storage, place.keys, place.entry, out))


def stored_patch(storage: Storage, places: Iterable[ChunkInPack]) -> StoredPatch:
    """The patch at the first place where it matches its checksum. Raises as `read_chunk`."""
    return _first(places, lambda place: stored_patch_at(storage, place.keys, place.entry))


def verify_any(storage: Storage, places: Iterable[ChunkInPack]) -> None:
    """Verify that one of the places has the bytes of a chunk, or of a patch that makes them of its
    base. Raises as `read_chunk`."""
    _first(places, lambda place: verify_at(storage, place.keys, place.entry))


def _first(places: Iterable[ChunkInPack], read: Callable[[ChunkInPack], T]) -> T:
    problem: Problem = NotFound("the chunk lies in no pack")
    for place in places:
        try:
            return read(place)
        except (Corrupt, NotFound, Unavailable) as error:
            problem = problem if isinstance(problem, Unavailable) else error
    raise problem


def read_copies(
    storage: Storage,
    listed: Iterable[Pack],
    request: Request,
    damaged: Mapping[int, tuple[PackId, Problem]],
) -> None:
    """Read the `damaged` chunks of a request, each with the problem of its pack, from any of the
    `listed` packs whose bytes match their ids, and warn. Reads footers until all are found. If one
    is found nowhere, raises `Corrupt`, or `NotFound` if its pack is absent."""
    left = set(damaged)
    for other, table in load_tables(storage, list(listed)):
        if isinstance(table, CkptStoreError):
            continue
        inventory = Inventory([Table(other.id, keys_of(other), table)])
        for i in sorted(left):
            out, places = request.out[i], inventory.places(request.id(i))
            fitting = [place for place in places if place.entry.raw_bytes == len(out)]
            with suppress(Corrupt, NotFound, Unavailable):
                read_chunk(storage, fitting, out)
                left.discard(i)
        if not left:
            break
    told: dict[PackId, str] = {}
    for i, (pack, problem) in damaged.items():
        what = str(problem).removesuffix("; run `ckptstore fsck`")
        text = f"chunk {request.name(i)} in pack {pack}: {what}; run `ckptstore fsck --read-data`"
        if i in left:
            raise type(problem)(
                f"{text}, restore another commit, or heal it with `ckptstore repair`"
            ) from problem
        told.setdefault(pack, text)
    for text in told.values():  # one for each pack: a truncated one has lost thousands
        _logger.warning("another pack has what one has lost: %s", text)


def _words(ids: bytes) -> "NDArray[np.uint64]":
    words: NDArray[np.uint64] = np.frombuffer(ids, "<u8").reshape(-1, _WORDS)
    return words


def _id(row: "NDArray[np.uint64]") -> ChunkId:
    return ChunkId(row.tobytes())


BATCH_PACKS = 100
_WORTH = 4
"""A batch is asked for where so many of its packs are wanted."""
_CAUGHT_UP = 10
"""So many batches that others did not come to write are written along with one."""
_PREFIX = "footers/"
_BATCH = "a batch of footers, which is ignored and may be deleted,"

_logger = logging.getLogger("ckptstore")


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
                for batch, tails in pool.map(self._read, batches):
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

    def _read(self, batch: int) -> tuple[int, dict[str, bytes]]:
        try:
            data = self._storage.read(footers_key(batch))
            return batch, unbundle(data, _BATCH, FOOTERS_BYTES_MAX)
        except NotFound:
            return batch, {}
        except Corrupt as error:
            _logger.warning("%s in %s: %s", footers_key(batch), self._storage.url, error)
            return batch, {}

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
        def read(pack: Pack) -> tuple[str, bytes] | None:
            try:
                return pack.id, read_footer(self._storage, pack).tail
            except (NotFound, Corrupt):
                return None  # one that is gone or damaged is for `fsck` to report

        with Pool(AT_ONCE) as pool:
            tails = dict(filter(None, pool.map(read, members)))
        self._storage.put(footers_key(batch), bundle(tails))


def readable_tables(
    storage: Storage, state: State, numbers: Sequence[int], batches: FooterBatches | None
) -> Iterator[tuple[int, FooterTable]]:
    """The footers of listed packs, by number, from `batches` if given. A pack that cannot be read
    holds nothing that can be reused or restored from it; `fsck` reports it. Raises `Unavailable`.
    """
    known = batches.tables(numbers, state) if batches and len(numbers) > 1 else {}
    yield from known.items()
    rest = [number for number in numbers if number not in known]
    numbers_of = {state.packs[number].id: number for number in rest}
    for pack, table in load_tables(storage, [state.packs[number] for number in rest]):
        if isinstance(table, Unavailable):
            raise table
        if not isinstance(table, Corrupt | NotFound):
            yield numbers_of[pack.id], table


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
