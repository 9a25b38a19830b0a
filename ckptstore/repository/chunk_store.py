"""Chunks by id: which the store has, where they lie, and their verified bytes.

What is read is always compared with its id. A chunk that the index does not know, or whose pack is
gone, is looked for again after a replay of the log and a look into the footers of packs that are
new; it is missing only when no pack that the log lists holds it.

The index is believed only of packs that the log knows under the same number and the same id: a
store that was copied, or brought back from a backup, gives the numbers that this host knows to
other packs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, PackId, digest, pack_key
from ckptstore.core.model import Location
from ckptstore.core.threads import Pool
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.fold import Pack, State
from ckptstore.log.log import Log
from ckptstore.objects import codecs
from ckptstore.repository import footers
from ckptstore.repository.footers import AT_ONCE, FooterBatches
from ckptstore.repository.lru import MetadataCache, SecondNames
from ckptstore.repository.read_planner import Request, plan_reads
from ckptstore.repository.verified_reader import VerifiedReader
from ckptstore.storage.contract import OpenFile, Storage
from ckptstore.storage.read_cache import ReadCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

READ_AHEAD = 4
"""So many reads the disk is told of in advance, so that it works while chunks are hashed."""

ALONE_BYTES = 4 * MIB
"""So few bytes of a local disk are read by the calling thread alone: to wake others takes
longer."""

LOOKS = 5
"""So often a chunk is looked up again while others collect."""

GAP_BYTES = 256 << 10
"""From a bucket so many bytes between two chunks are read along: another request takes longer."""

REMOTE_READ_BYTES = 4 * MIB
"""A read from a bucket is not cut into smaller ones for the sake of more threads."""

Spread: TypeAlias = Callable[[Callable[[int], None], Sequence[int]], object]

Rescue: TypeAlias = Callable[[bytes, Sequence[memoryview], CkptStoreError], None]
"""Asked to read chunks elsewhere that this store could not give; raises the error that it is given
if it cannot."""

METADATA_CACHE_BYTES = 64 * MIB
METADATA_BYTES_MAX = 256 * MIB
"""What claims to be larger is no schema, page or layout: a footer that was made up must not cost
memory."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of chunks, as they are stored, in a file of this host that stays open as long as this
    is referred to."""

    file: OpenFile
    offset: int
    nbytes: int

    def fileno(self) -> int:
        return self.file.fd


class ObjectStore:
    """The chunks of one store. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        index: ChunkIndex,
        log: Log,
        suspect_packs: SuspectPacks,
        cache: ReadCache | None = None,
    ) -> None:
        """`cache` keeps what is read, for a place that is slow to read from."""
        self.storage = storage
        self.suspect_packs = suspect_packs
        self._cache = cache
        self.index = index
        self._log = log
        self._metadata = MetadataCache(METADATA_CACHE_BYTES)
        self._remote = storage.capabilities.slow_requests
        self._reader = VerifiedReader(storage, index, suspect_packs, cache)
        self._batches = FooterBatches(storage) if self._remote else None
        self._indexed_below = 0
        self.rescue: Rescue | None = None
        self.second_names: SecondNames | None = None
        """If set, what commits of this process hash gets a name there, too."""
        self._lock = threading.Lock()

    def hash(self, data: memoryview) -> ChunkId:
        """The id of a chunk that is to be committed."""
        return self.second_names.learn(data)[0] if self.second_names else ChunkId(digest(data))

    def sync(self, state: State, *, thorough: bool = False) -> None:
        """Bring the index up to `state`: read the footers of listed packs that it lacks, forget
        packs that are not listed any more.

        Costs what is new since the last call; the first call, and a `thorough` one, compare all
        packs.
        """
        with self._lock:
            if thorough or not self._indexed_below:
                have = self.index.pack_ids(self.index.indexed())
                if any(n >= state.next_pack for n in have):
                    # Others share the index and have registered packs since. What they indexed is
                    # in a log that is replayed now.
                    state = self._log.replay()
                foreign = {
                    n
                    for n, pack in have.items()
                    if n not in state.packs or state.packs[n].id != pack
                }
                if foreign:
                    self.index.drop_packs(foreign)
                wanted: Iterable[int] = sorted(
                    n for n in state.packs if n not in have or n in foreign
                )
            else:
                wanted = (
                    n for n in range(self._indexed_below, state.next_pack) if n in state.packs
                )
            for number, table in self._footers(list(wanted), state, thorough):
                # A pack that cannot be read holds nothing that can be reused or restored from it;
                # `fsck` reports it.
                if table is not None:
                    self.index.add_pack(number, state.packs[number].id, table)
            self._indexed_below = state.next_pack

    def _footers(
        self, numbers: Sequence[int], state: State, thorough: bool
    ) -> "Iterator[tuple[int, NDArray[np.void] | None]]":
        """The footers of packs, side by side from a bucket, from batches unless `thorough`; None
        for one that cannot be read."""

        def read(number: int) -> "tuple[int, NDArray[np.void] | None]":
            pack = state.packs[number]
            try:
                return number, footers.read_table(self.storage, pack.id, metadata=pack.metadata)
            except (NotFound, Corrupt):
                return number, None

        if not self._remote or len(numbers) < 2:
            yield from map(read, numbers)
            return
        known = self._batches.tables(numbers, state) if self._batches and not thorough else {}
        yield from known.items()
        if rest := [number for number in numbers if number not in known]:
            with Pool(min(AT_ONCE, len(rest))) as pool:
                yield from pool.map(read, rest)

    def registered(self, number: int, pack: PackId, table: "NDArray[np.void]") -> None:
        """Index a pack of our own that a log entry has just registered."""
        with self._lock:
            self.index.add_pack(number, pack, table)
            if number == self._indexed_below:
                self._indexed_below += 1
        if self._batches:
            self._batches.complete(number, self._log.state.packs)

    def locate(self, ids: bytes) -> "NDArray[np.void]":
        """Where each of `ids` (32 bytes each) lies, as LOCATION_DTYPE rows; `found` is 0 where the
        index does not know, or knows of another store's packs."""
        rows = self.index.get_many(ids)
        numbers = set(np.unique(rows["pack"][rows["found"] == 1]).tolist())
        indexed, listed = self.index.pack_ids(numbers), self._pack_names(numbers)
        if foreign := [n for n in numbers if n not in listed or indexed.get(n) != listed[n]]:
            rows["found"][np.isin(rows["pack"], foreign)] = 0
        return rows

    def locations(self, ids: bytes, *, look_again: bool = False) -> list[Location]:
        """Where each of `ids` lies; with `look_again`, after a replay of the log. Raises `NotFound`
        for one that no listed pack holds."""
        if look_again:
            self._look_again()
        where = self.located(ids)
        names = self._pack_names(numbers := set(where["pack"].tolist()))
        if gone := numbers - names.keys():
            raise NotFound(
                f"packs {sorted(gone)[:4]} are not listed any more; repeat the call, or run "
                "`ckptstore reindex`"
            )
        columns = (
            where[name].tolist() for name in ("pack", "offset", "stored", "raw", "codec", "width")
        )
        return [Location(names[pack], *rest) for pack, *rest in zip(*columns, strict=True)]

    def doubt(self, chunk: ChunkId) -> None:
        """Rely no more on the pack that this chunk is read from: its bytes were found to be
        others."""
        self.suspect_packs.add(self.locations(chunk)[0].pack)

    def file_ranges(self, ids: bytes) -> list[FileRange] | None:
        """Where the bytes of `ids` lie, one chunk behind the other, not verified; None where they
        do not lie in files of this host as they are, or not any more: `read_into` gives them."""
        if self._remote:
            return None
        found: list[FileRange] = []
        last: Location | None = None
        try:
            for place in self.locations(ids):
                if place.codec != codecs.RAW:
                    return None
                if last and (last.pack, last.offset + last.stored_bytes) == (
                    place.pack,
                    place.offset,
                ):
                    found[-1] = replace(found[-1], nbytes=found[-1].nbytes + place.stored_bytes)
                else:
                    found.append(
                        FileRange(
                            self.storage.open_file(pack_key(place.pack)),
                            place.offset,
                            place.stored_bytes,
                        )
                    )
                last = place
        except (NotFound, Unavailable):
            return None
        return found

    def packs_of(self, ids: bytes) -> frozenset[int]:
        """The numbers of the packs that hold `ids`."""
        return frozenset(np.unique(self.located(ids)["pack"]).tolist())

    def is_there(self, pack: Pack) -> bool:
        """Whether a local disk has a listed pack with all its bytes; a bucket is not asked."""
        try:
            return self._remote or self.storage.size(pack_key(pack.id)) == pack.bytes
        except Corrupt:
            return False

    def read_metadata(self, chunk: ChunkId) -> bytes:
        """A schema, page or layout, verified, from memory where it was read before."""
        return self.read_metadata_many([chunk])[0]

    def read_metadata_many(self, chunks: Sequence[ChunkId]) -> list[bytes]:
        """Several metadata chunks, in order."""
        found = {chunk: data for chunk in chunks if (data := self._metadata.get(chunk)) is not None}
        missing = list(dict.fromkeys(chunk for chunk in chunks if chunk not in found))
        if missing:
            ids = b"".join(missing)
            where = self.located(ids)
            _check_sizes(missing, where)
            buffers = [bytearray(int(n)) for n in where["raw"]]
            self.read_into(ids, [memoryview(b) for b in buffers], where=where)
            for chunk, buffer in zip(missing, buffers, strict=True):
                found[chunk] = bytes(buffer)
                self._metadata.put(chunk, found[chunk])
        return [found[chunk] for chunk in chunks]

    def remember_metadata(self, chunk: ChunkId, data: bytes) -> None:
        """Keep metadata that was just written: the next reader is likely to be this process."""
        self._metadata.put(chunk, data)

    def read_into(
        self,
        ids: bytes,
        out: Sequence[memoryview],
        *,
        where: "NDArray[np.void] | None" = None,
        run: Spread | None = None,
        describe: Callable[[int], str] = lambda i: "metadata",
        check: Callable[[int], bool] | None = None,
        threads: int = 1,
        read_bytes: int = RUN_BYTES,
    ) -> None:
        """Read each chunk of `ids` into the memory of `out`, whose lengths are the chunks' raw
        bytes, and verify it.

        `run(task, numbers)` spreads the reads, of at most `read_bytes` or one chunk, over `threads`
        threads; without it they run here. What is encoded is read aside: so much memory, and a
        chunk that is decoded, for each thread. `describe(i)` says what chunk `i` is part of, for
        errors. `check(i)` is asked, on the thread that has read it, whether `out[i]` is right,
        where the caller knows other ways than its id. Raises `Corrupt` for a chunk whose bytes do
        not match its id or whose length is not that of `out`, `NotFound` for one that no listed
        pack holds.
        """
        try:
            request = Request(
                ids,
                out,
                where if where is not None else self.located(ids),
                range(len(out)),
                describe,
                check,
            )
            self._read_here(request, run, threads, read_bytes)
        except (Corrupt, NotFound) as error:
            if self.rescue is None:
                raise
            self.rescue(ids, out, error)

    def _read_here(
        self, request: Request, run: Spread | None, threads: int, read_bytes: int
    ) -> None:
        if self._cache is not None:
            request = self._not_cached(request, self._cache, run)
        while moved := self._read_all(request, run, threads, read_bytes):
            # A pack that is gone was collected, and its chunks were copied before; that may happen
            # again while we look.
            self._look_again()
            before, request = request, self._again(request, moved)
            for i, was in enumerate(moved):
                number = int(request.where["pack"][i])
                if (number, request.where["offset"][i]) == (
                    before.where["pack"][was],
                    before.where["offset"][was],
                ):
                    self.suspect_packs.add(self._log.state.packs[number].id)
                    name = f"{request.short(i)} ({request.name(i)})"
                    raise NotFound(
                        f"the pack of chunk {name} is listed, but not there; run `ckptstore fsck`"
                    )

    def _not_cached(self, request: Request, cache: ReadCache, run: Spread | None) -> Request:
        """What is left of a request after the cache has given what it has."""
        rest: list[int] = []

        def task(i: int) -> None:
            if not cache.read_into(ChunkId(request.id(i)), request.out[i]):
                rest.append(i)

        if run:
            run(task, range(len(request.out)))
        else:
            for i in range(len(request.out)):
                task(i)
        return request.part(sorted(rest), request.where[sorted(rest)])

    def _again(self, request: Request, which: Sequence[int]) -> Request:
        """The chunks `which` of a request, located anew."""
        return request.part(which, self.located(b"".join(map(request.id, which))))

    def _read_all(
        self, request: Request, run: Spread | None, threads: int, read_bytes: int
    ) -> list[int]:
        """Read what the request wants; returns the positions whose pack is not there."""
        stored_bytes = int(request.where["stored"].sum())
        if stored_bytes <= ALONE_BYTES and not self._remote:
            run, threads = None, 1
        least = REMOTE_READ_BYTES if self._remote else MIB
        limit_bytes = min(read_bytes, max(least, stored_bytes // threads))
        names = self._pack_names(set(request.where["pack"].tolist()))
        reads, missing = plan_reads(
            request.where, names, limit_bytes, gap_bytes=GAP_BYTES if self._remote else 0
        )

        def will_need(i: int) -> None:
            if i < len(reads):
                self.storage.will_need(
                    pack_key(reads[i].pack), reads[i].offset, reads[i].stored_bytes
                )

        def task(i: int) -> None:
            will_need(i + READ_AHEAD)
            try:
                self._reader.read(reads[i], request)
            except NotFound:
                missing.extend(reads[i].which)

        for i in range(min(READ_AHEAD, len(reads))):
            will_need(i)
        if run:
            run(task, range(len(reads)))
        else:
            for i in range(len(reads)):
                task(i)
        return missing

    def close(self) -> None:
        if self._batches:
            self._batches.close()
        self.index.close()

    def located(self, ids: bytes) -> "NDArray[np.void]":
        """Where each of `ids` lies: looked up again while the log says something new, at last in an
        index made anew."""
        where, seen = self.locate(ids), -1
        for _ in range(LOOKS):
            if where["found"].all():
                return where
            before, seen = seen, self._look_again().n
            where = self.locate(ids)
            if seen == before:
                break
        return where if where["found"].all() else self._located_anew(ids)

    def _located_anew(self, ids: bytes) -> "NDArray[np.void]":
        """A damaged key of the index is a chunk that it does not find: before a chunk counts as
        lost, every footer is read again."""
        self.index.reset()
        self._look_again()
        where = self.locate(ids)
        lost = np.flatnonzero(where["found"] == 0)
        if len(lost):
            chunk = ids[int(lost[0]) * CHUNK_ID_BYTES : (int(lost[0]) + 1) * CHUNK_ID_BYTES]
            raise NotFound(
                f"chunk {chunk.hex()[:12]} and {len(lost) - 1} more lie in no pack that the log "
                "lists; "
                f"run `ckptstore fsck`, or `ckptstore repair` with a mirror"
            )
        return where

    def _look_again(self) -> State:
        state = self._log.replay(refresh=True)
        self.sync(state, thorough=True)
        return state

    def _pack_names(self, numbers: set[int]) -> dict[int, PackId]:
        """The packs of these numbers, but for those that are not listed."""
        packs = self._log.state.packs
        if any(n not in packs for n in numbers):
            packs = self._log.replay().packs
        return {n: packs[n].id for n in numbers if n in packs}


def _check_sizes(chunks: Sequence[ChunkId], where: "NDArray[np.void]") -> None:
    if (largest := int(where["raw"].max())) > METADATA_BYTES_MAX:
        chunk = chunks[int(where["raw"].argmax())]
        what = f"chunk {chunk.hex()[:12]} claims {largest} bytes of metadata"
        raise Corrupt(f"{what}; wanted at most {METADATA_BYTES_MAX}; run `ckptstore fsck`")
