"""Which chunks does the store have, where do they lie, and what are their verified bytes?

Every chunk is compared with its id. If the index lacks a chunk, or its pack is gone, the log is
replayed and the footers of new packs are read. A chunk is missing only if no listed pack holds
it.

The index counts only for packs that the log lists under the same number and id: a copied or
restored store may give known numbers to other packs.
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
"""Reads announced to the disk in advance, so that it works while chunks are hashed."""

ALONE_BYTES = 4 * MIB
"""Local reads up to this size stay on the calling thread: waking others takes longer."""

LOOKS = 5
"""Lookups of a chunk while concurrent collections move it."""

GAP_BYTES = 256 << 10
"""On slow storage, gaps between chunks up to this size are read: a request takes longer."""

REMOTE_READ_BYTES = 4 * MIB
"""On slow storage, reads of this size are not split among more threads."""

Spread: TypeAlias = Callable[[Callable[[int], None], Sequence[int]], object]

Rescue: TypeAlias = Callable[[bytes, Sequence[memoryview], CkptStoreError], None]
"""Reads chunks elsewhere after this store failed; re-raises the given error if that fails too."""

METADATA_CACHE_BYTES = 64 * MIB
METADATA_BYTES_MAX = 256 * MIB
"""Metadata chunks are never larger. A forged footer must not cost more memory."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Stored bytes of chunks in a local file, which stays open while this object lives."""

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
        """`cache` keeps chunks that were read from slow storage."""
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
        """If set, commits of this process record the checksums of their chunks here."""
        self._lock = threading.Lock()

    def hash(self, data: memoryview) -> ChunkId:
        """The id of a chunk to be committed."""
        return self.second_names.learn(data)[0] if self.second_names else ChunkId(digest(data))

    def sync(self, state: State, *, thorough: bool = False) -> None:
        """Bring the index up to `state`: read the footers of new packs, drop packs that are no
        longer listed.

        Costs only the packs new since the last call. The first call, and a `thorough` one,
        compare all packs.
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
        """The footers of packs; None for an unreadable one. From slow storage they are read in
        parallel, and from batches unless `thorough`."""

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
        """Index a pack of this process that a log entry has just registered."""
        with self._lock:
            self.index.add_pack(number, pack, table)
            if number == self._indexed_below:
                self._indexed_below += 1
        if self._batches:
            self._batches.complete(number, self._log.state.packs)

    def locate(self, ids: bytes) -> "NDArray[np.void]":
        """The position of each of `ids` (32 bytes each), as LOCATION_DTYPE rows. `found` is 0 if
        the index does not have it, or has it in another store's pack."""
        rows = self.index.get_many(ids)
        numbers = set(np.unique(rows["pack"][rows["found"] == 1]).tolist())
        indexed, listed = self.index.pack_ids(numbers), self._pack_names(numbers)
        if foreign := [n for n in numbers if n not in listed or indexed.get(n) != listed[n]]:
            rows["found"][np.isin(rows["pack"], foreign)] = 0
        return rows

    def locations(self, ids: bytes, *, look_again: bool = False) -> list[Location]:
        """The location of each of `ids`; with `look_again`, after a replay of the log. Raises
        `NotFound` if no listed pack holds one."""
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
        """Mark the pack of this chunk as suspect: its bytes did not match."""
        self.suspect_packs.add(self.locations(chunk)[0].pack)

    def file_ranges(self, ids: bytes) -> list[FileRange] | None:
        """The unverified bytes of `ids` as ranges of local files, in order; None if some are
        encoded, remote or gone. Use `read_into` then."""
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
        """Whether a listed pack is complete on a local disk. Slow storage is not asked."""
        try:
            return self._remote or self.storage.size(pack_key(pack.id)) == pack.bytes
        except Corrupt:
            return False

    def read_metadata(self, chunk: ChunkId) -> bytes:
        """A verified schema, page or layout, from memory if it was read before."""
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
        """Cache metadata that was just written: this process is likely to read it next."""
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
        """Read and verify each chunk of `ids` into the memory of `out`, whose lengths are the
        chunks' raw sizes.

        `run(task, numbers)` distributes the reads, of at most `read_bytes` or one chunk, over
        `threads` threads; without it they run here. Each thread needs one such buffer, and one
        chunk, for encoded data. `describe(i)` names chunk `i` in errors. `check(i)`, if given,
        verifies `out[i]` instead of the id, on the thread that read it.

        Raises `Corrupt` for a chunk whose bytes do not match its id or whose length is not that
        of `out`, `NotFound` for one that no listed pack holds.
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
            # An absent pack was collected after its chunks were copied elsewhere. That may happen
            # again during the lookup.
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
                        f"the pack of chunk {name} is listed but absent; run `ckptstore fsck`"
                    )

    def _not_cached(self, request: Request, cache: ReadCache, run: Spread | None) -> Request:
        """The rest of a request, without the chunks that the cache supplied."""
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
        """The chunks `which` of a request, located again."""
        return request.part(which, self.located(b"".join(map(request.id, which))))

    def _read_all(
        self, request: Request, run: Spread | None, threads: int, read_bytes: int
    ) -> list[int]:
        """Carry out the request; returns the positions of chunks whose pack is absent."""
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
        """The position of each of `ids`. Repeats the search while the log changes; at last,
        rebuilds the index."""
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
        """Rebuild the index from every footer before a chunk counts as lost: a damaged index key
        hides its chunk."""
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
        """The ids of listed packs with these numbers."""
        packs = self._log.state.packs
        if any(n not in packs for n in numbers):
            packs = self._log.replay().packs
        return {n: packs[n].id for n in numbers if n in packs}


def _check_sizes(chunks: Sequence[ChunkId], where: "NDArray[np.void]") -> None:
    if (largest := int(where["raw"].max())) > METADATA_BYTES_MAX:
        chunk = chunks[int(where["raw"].argmax())]
        what = f"chunk {chunk.hex()[:12]} claims {largest} bytes of metadata"
        raise Corrupt(f"{what}; wanted at most {METADATA_BYTES_MAX}; run `ckptstore fsck`")
