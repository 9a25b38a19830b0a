"""Which chunks does the store have, where do they lie, and what are their verified bytes?

Every chunk is compared with its checksum, metadata with its id too. If the index lacks a chunk, or
its pack is gone, the log is replayed and the footers of new packs are read. A chunk is missing only
if no listed pack holds it.

The index counts only for packs that the log lists under the same number and id: a copied or
restored store may give known numbers to other packs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckptstore.core import forks
from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    PackId,
    document_key,
    pack_key,
)
from ckptstore.core.model import PackEntry
from ckptstore.core.process import uncollected
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.entries import Commit, Entry
from ckptstore.log.log import Log
from ckptstore.log.state import Pack, State
from ckptstore.objects import codecs, patches
from ckptstore.repository.chunk_reader import (
    METADATA_BYTES_MAX,
    NO_BASES,
    MergedRead,
    PackRead,
    Request,
    StoredChunk,
    StoredPatch,
    Unread,
    coalesce,
    keys_of,
    plan_runs,
    read_run,
)
from ckptstore.repository.footers import (
    FooterBatches,
    is_elsewhere,
    read_copies,
    readable_tables,
)
from ckptstore.repository.memory_budget import ReadRoom
from ckptstore.repository.patch_bases import PatchBases
from ckptstore.repository.patch_chains import LOOKS, Rounded, RoundedChunk, follow
from ckptstore.repository.patched_chunks import Damaged, Located, PatchedReads, overlap
from ckptstore.repository.thread_pool import Scratch, ThreadPool, one_by_one, shared
from ckptstore.storage.contract import FileRange, Storage
from ckptstore.storage.read_cache import ReadCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

HASHED_BYTES = MIB
"""Bytes that are read from the page cache before they are hashed: they fit a processor's own
cache."""

COLD_BYTES = RUN_BYTES
"""Bytes of one read where the page cache lacks them: the kernel asks the disk for all of them at
once (docs/decisions/046-cold-reads-are-large.md)."""

SAMPLES = 4
"""Chunks of a large read that are looked for in the page cache."""

ALONE_BYTES = 4 * MIB
"""Local reads up to this size stay on the calling thread: waking others takes longer."""

GAP_BYTES = 256 << 10
"""On slow storage, gaps between chunks up to this size are read: a request takes longer."""

REMOTE_READ_BYTES = 4 * MIB
"""On slow storage, reads of this size are not split among more threads."""

AHEAD_PACKS, AHEAD_BYTES = 32, 2 * MIB
"""So many packs of at most so many bytes are read ahead: moving them takes as long as the requests
that wait for each other otherwise."""

ALONE = ReadRoom(1, RUN_BYTES, 0, 0)
"""A read on the calling thread."""

Rescue: TypeAlias = Callable[[bytes, Sequence[memoryview], CkptStoreError], None]
"""Reads chunks elsewhere after this store failed; re-raises the given error if that fails too."""


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
        self.storage, self.index, self.suspect_packs = storage, index, suspect_packs
        self._log, self._cache = log, cache
        self._remote = storage.capabilities.slow_requests
        self._batches = FooterBatches(storage) if self._remote else None
        self._indexed_below = 0
        self.patch_bases = PatchBases(storage, log, self.locate, self.listed)
        self.rescue: Rescue | None = None
        self._lock = forks.lock()

    # -- the index --

    def sync(self, state: State, *, thorough: bool = False) -> None:
        """Bring the index up to `state`: read the footers of new packs, drop packs that are no
        longer listed.

        Costs only the packs new since the last call. The first call, and a `thorough` one,
        compare all packs and read no batches of footers.
        """
        with self._lock:
            if thorough or not self._indexed_below:
                state, wanted = self._not_indexed(state)
            else:
                new = range(self._indexed_below, state.next_pack)
                wanted = [n for n in new if n in state.packs]
            batches = None if thorough else self._batches
            for number, table in readable_tables(self.storage, state, wanted, batches):
                self.index.add_pack(number, state.packs[number].id, table)
            self._indexed_below = state.next_pack

    def read_ahead(self, entry: Entry, run: str) -> None:
        """If `entry` is a commit of `run`, read its document and its small packs, all at once. The
        reader would ask for footers first, then for pages, and for chunks at last."""
        body = entry.body
        if self._remote and isinstance(body, Commit) and body.run == run:
            adds = {document_key(body.session, body.commit): body.document_bytes}
            adds |= {pack_key(pack.id): pack.bytes for pack in body.packs[:AHEAD_PACKS]}
            self.storage.read_ahead({key: n for key, n in adds.items() if n <= AHEAD_BYTES})

    def _not_indexed(self, state: State) -> tuple[State, list[int]]:
        """The numbers of listed packs that the index lacks; drops all others from it."""
        have = self.index.pack_ids(self.index.indexed())
        if any(n >= state.next_pack for n in have):
            # Others share the index and have registered packs, which a replay tells of.
            state = self._log.replay()
        listed = {n: pack.id for n, pack in state.packs.items()}
        if foreign := {n for n in have if listed.get(n) != have[n]}:
            self.index.drop_packs(foreign)
        return state, sorted(n for n in listed if n not in have or n in foreign)

    def registered(self, number: int, pack: PackId, table: "NDArray[np.void]") -> None:
        """Index a pack of this process that a log entry has just registered."""
        self.patch_bases.written(pack, table)
        with self._lock:
            self.index.add_pack(number, pack, table)
            if number == self._indexed_below:
                self._indexed_below += 1
        if self._batches:
            self._batches.complete(number, self._log.state.packs)

    def locate(self, ids: bytes) -> "NDArray[np.void]":
        """Each of `ids` (32 bytes each) with its position: LOCATED_DTYPE rows. `found` is 0 if
        the index does not have it, or has it in another store's pack."""
        rows = self.index.get_many(ids)
        numbers = set(rows["pack"][rows["found"] == 1].tolist())
        if not numbers or not self._foreign(numbers):
            return rows
        self.index.drop_packs(self._foreign(self.index.indexed()))  # they hide others
        rows = self.index.get_many(ids)
        foreign = self._foreign(set(rows["pack"][rows["found"] == 1].tolist()))
        rows["found"][np.isin(rows["pack"], list(foreign))] = 0
        return rows

    def _foreign(self, numbers: set[int]) -> set[int]:
        """Those of the indexed packs `numbers` that the log lists not, or by another id."""
        indexed, listed = self.index.pack_ids(numbers), self.listed(numbers)
        return {n for n in numbers if n not in listed or indexed.get(n) != listed[n].id}

    def located(self, ids: bytes) -> "NDArray[np.void]":
        """The position of each of `ids`. Repeats the search while the log changes; at last,
        rebuilds the index, since a damaged key of it hides its chunk. Raises `NotFound`."""
        seen = -1
        for _ in range(LOOKS):
            where = self.locate(ids)
            if where["found"].all():
                return where
            before, seen = seen, self.look_again().n
            if seen == before:
                break
        self.index.reset()
        self.look_again()
        where = self.locate(ids)
        lost = np.flatnonzero(where["found"] == 0)
        if len(lost):
            chunk = ids[int(lost[0]) * CHUNK_ID_BYTES : (int(lost[0]) + 1) * CHUNK_ID_BYTES]
            raise NotFound(
                f"chunk {chunk.hex()[:12]} and {len(lost) - 1} more lie in no pack that the log "
                "lists; run `ckptstore fsck`, or `ckptstore repair` with a mirror"
            )
        return where

    def to_read(self, ids: bytes) -> "NDArray[np.void]":
        """As `located`. Raises `Unavailable` for what a mirror may have that does not answer."""
        try:
            return self.located(ids)
        except NotFound as error:
            if self.rescue is not None:
                self.rescue(b"", (), error)
            raise

    def packs_of(self, ids: bytes) -> frozenset[int]:
        """The numbers of the packs that hold `ids`, and of those that hold the bases of patches
        there. Raises `NotFound`."""
        where = self.located(ids)
        self.patch_bases.note(where)
        packs = frozenset(where["pack"].tolist())
        return packs.union(*(self.patch_bases.needed(number).packs for number in packs))

    def is_there(self, pack: Pack) -> bool:
        """Whether a listed pack is complete. Slow storage is not asked, but for hosts, which may be
        lost with all copies of a pack."""
        trusted = self._remote and not self.storage.capabilities.copies
        try:
            return trusted or self.storage.size(pack_key(pack.id)) == pack.bytes
        except Corrupt:
            return False

    def look_again(self) -> State:
        """The log as it is now, with the index brought up to it."""
        state = self._log.replay(refresh=True)
        self.sync(state, thorough=True)
        return state

    def listed(self, numbers: set[int]) -> dict[int, Pack]:
        """The listed packs with these numbers."""
        packs = self._log.state.packs
        if any(n not in packs for n in numbers):
            packs = self._log.replay().packs
        return {n: packs[n] for n in numbers if n in packs}

    # -- bytes --

    def file_ranges(self, ids: bytes) -> list[FileRange] | None:
        """The unverified bytes of `ids` as ranges of local files, in order; None if some are
        encoded, remote or gone. Use `read_into` then."""
        with suppress(NotFound, Unavailable):
            return None if self._remote else self.open_ranges(ids)
        return None

    def open_ranges(self, ids: bytes) -> list[FileRange] | None:
        """As `file_ranges`. Raises `NotFound`, and `InvalidInput` for a bucket."""
        try:
            return self._open_ranges(self.located(ids))
        except NotFound:
            # gc has moved them since the lookup. An open file cannot be taken away any more.
            self.look_again()
            return self._open_ranges(self.located(ids))

    def _open_ranges(self, where: "NDArray[np.void]") -> list[FileRange] | None:
        if (where["codec"] != codecs.RAW).any():
            return None
        numbers, starts = where["pack"].tolist(), where["offset"].tolist()
        stops = (where["offset"] + where["stored"]).tolist()
        packs = self.listed(set(numbers))
        found = []
        for some in coalesce(starts, stops, objects=numbers):
            if (pack := packs.get(numbers[some.start])) is None:
                raise NotFound(f"pack {numbers[some.start]} is not listed; run `ckptstore reindex`")
            key, start, stop = pack_key(pack.id), starts[some.start], stops[some.stop - 1]
            found.append(FileRange(key, self.storage.open_file(key), start, stop - start))
        return found

    def read_metadata(self, chunk: ChunkId) -> bytes:
        """A verified schema, page or layout."""
        return self.read_metadata_many([chunk])[chunk]

    def read_metadata_many(
        self, chunks: Iterable[ChunkId], *, past_cache: bool = False
    ) -> dict[ChunkId, bytes]:
        """Several metadata chunks, by id."""
        ids = b"".join(dict.fromkeys(chunks))
        where = self.to_read(ids)
        buffers: dict[ChunkId, bytearray] = {}
        for chunk, nbytes in where[["chunk", "raw"]].tolist():
            if nbytes > METADATA_BYTES_MAX:
                raise Corrupt(
                    f"chunk {chunk.hex()[:12]} claims {nbytes} bytes of metadata; wanted at most "
                    f"{METADATA_BYTES_MAX}; run `ckptstore fsck`"
                )
            buffers[chunk] = bytearray(nbytes)
        out = [memoryview(buffer) for buffer in buffers.values()]
        self.read_into(ids, out, where=where, verify_ids=True, past_cache=past_cache)
        return {chunk: bytes(buffer) for chunk, buffer in buffers.items()}

    def read_into(
        self,
        ids: bytes,
        out: Sequence[memoryview],
        *,
        where: "NDArray[np.void] | None" = None,
        threads: ThreadPool | None = None,
        room: ReadRoom = ALONE,
        describe: Callable[[int], str] = lambda i: "metadata",
        verify_ids: bool = False,
        past_cache: bool = False,
        bases: Mapping[ChunkId, memoryview] = NO_BASES,
        is_base: bool = False,
    ) -> None:
        """Read and verify each chunk of `ids` into the memory of `out`, whose lengths are the
        chunks' raw sizes.

        `threads`, if given, share the work within `room`. `describe(i)` names chunk `i` in errors.
        With `verify_ids`, bytes are compared with the ids too; `past_cache` reads the store itself.
        `bases` are chunks that the caller has in memory, of which others may be patches. They may
        be damaged: then they are read. With `is_base`, others are made of the chunks' rounding, and
        so none of them is rounded itself.

        Raises `Corrupt` for a chunk whose bytes do not match, or whose length is not that of
        `out`, `NotFound` for one that no listed pack holds.
        """
        request = Request(ids, out, describe, verify_ids, past_cache, bases, is_base)
        left: Sequence[int] = range(len(out))
        try:
            if self._cache is not None and not past_cache:
                left, where = self._not_cached(request, self._cache, threads), None
            if where is None:
                where = self.located(request.ids_of(left))
            damaged = Damaged()
            patched = list[Located]()
            while left:
                if (is_patch := where["codec"] == codecs.PATCH).any():
                    numbers = np.asarray(left)
                    patched.append(Located(numbers[is_patch], where[is_patch]))
                    left, where = numbers[~is_patch].tolist(), where[~is_patch]
                runs, moved, count = self._plan(request, left, where, room)
                alone = not self._remote and int(where["stored"].sum()) <= ALONE_BYTES
                queue = shared(range(len(runs)))
                work = partial(self._read, request, runs, moved, damaged, queue)
                if threads is None or alone or len(runs) < 2:
                    work()
                else:
                    threads.together([work] * min(count, len(runs)), queue.stop)
                if not moved:
                    break
                left, where = self._where_moved(request, where, moved, damaged)
            if patched:
                damaged |= self._read_patched(request, patched, damaged, threads, room)
            if damaged:
                self._distrust(pack for pack, _ in damaged.values())
                packs = () if past_cache else self._log.replay().packs.values()
                read_copies(self.storage, packs, request, damaged)
        except (Corrupt, NotFound) as error:
            if self.rescue is None:
                raise
            self.rescue(ids, out, error)

    def _read_patched(
        self,
        request: Request,
        patched: Sequence[Located],
        damaged: Iterable[int],
        threads: ThreadPool | None,
        room: ReadRoom,
    ) -> Damaged:
        """Read the chunks that are stored as patches, once all others were, but for `damaged`."""
        left = Located.joined(patched)
        unread = {*left.numbers.tolist(), *damaged}
        read = {request.id(i): out for i, out in enumerate(request.out) if i not in unread}
        reads = PatchedReads(
            self,
            request,
            {**read, **request.bases},
            None if request.past_cache else self._cache,
            threads.scratch if threads else Scratch(),
            room,
            overlap(request.out),
        )
        return reads.read_all(left, threads)

    def _distrust(self, packs: Iterable[PackId]) -> None:
        """Packs with a chunk that could not be read are no longer relied on for chunks: the next
        commit that has these stores them."""
        for pack in set(packs) & {pack.id for pack in self._log.state.packs.values()}:
            self.suspect_packs.add(pack)

    def chains_of(self, ids: bytes) -> dict[ChunkId, patches.ChainLength]:
        """How far each of `ids` is from a chunk that is stored whole. Raises `NotFound`, and
        `Corrupt` if it is a patch that cannot be read."""
        where = self.located(ids)
        found = {ChunkId(chunk): patches.WHOLE for chunk in where["chunk"].tolist()}
        for chunk, chain in follow(self, where[where["codec"] == codecs.PATCH], steps=1).items():
            if isinstance(chain.end, Corrupt | NotFound):
                raise chain.end
            if chain.patches:
                found[chunk] = chain.patches[0].head.chain
        return found

    def patches_of(self, ids: bytes) -> dict[ChunkId, StoredPatch]:
        """Those of `ids` that are stored as patches of one base each, but for any that cannot be
        read. Raises `NotFound` for a chunk that no listed pack holds."""
        where = self.located(ids)
        chains = follow(self, where[where["codec"] == codecs.PATCH], steps=1)
        first = {chunk: chain.patches[0] for chunk, chain in chains.items() if chain.patches}
        return {c: patch for c, patch in first.items() if patch.head.function == patches.SAME}

    def rounded(self, ids: bytes) -> list[RoundedChunk]:
        """Those of `ids` that are made of the rounding of others. Raises `NotFound`."""
        where = self.located(ids)
        chains = follow(self, where[where["codec"] == codecs.PATCH])
        return [
            RoundedChunk(chunk, first.raw_bytes, first.width, chain.end.bases)
            for chunk, chain in chains.items()
            for first in [chain.patches[0].entry]
            if isinstance(chain.end, Rounded)
        ]

    def is_near(self, chunk: ChunkId) -> bool:
        """Whether a chunk can be read without a request to slow storage, if it is not damaged."""
        where = self.locate(chunk)
        if not where["found"][0] or not self._remote:
            return bool(where["found"][0])
        is_patch = int(where["codec"][0]) == codecs.PATCH
        return self._cache is not None and not is_patch and self._cache.has(chunk)

    def peek(self, chunk: ChunkId, parts: Sequence[slice]) -> list[tuple[slice, memoryview]] | None:
        """Some parts of a chunk, unverified; None unless it is stored raw on a local disk, with as
        many bytes. Raises as storage does."""
        where = self.index.get_many(chunk)  # `locate`, which checks the pack, takes twice as long
        pack = self._log.state.packs.get(int(where["pack"][0])) if where["found"][0] else None
        if self._remote or pack is None or int(where["codec"][0]) != codecs.RAW:
            return None
        if int(where["raw"][0]) < max(part.stop for part in parts):
            return None
        found = [(part, memoryview(bytearray(part.stop - part.start))) for part in parts]
        for part, memory in found:
            start = int(where["offset"][0]) + part.start
            self.storage.read_into(pack_key(pack.id), start, [memory])
        return found

    def read_one(
        self, pack: Pack | None, entry: PackEntry, out: memoryview, name: str, verify_ids: bool
    ) -> None:
        """Read and verify a chunk that was at `entry` of `pack` a moment ago: on a local disk
        without a plan, which costs half as much as the read. `name` is for errors, which are those
        of `read_into`."""
        if pack is not None and not self._remote:
            run = MergedRead((PackRead(entry, out),))
            found = read_run(self.storage, keys_of(pack), run, verify_ids=verify_ids)
            if isinstance(found[0], StoredChunk):
                return
        self.read_into(entry.chunk, [out], describe=lambda _: name, verify_ids=verify_ids)

    @uncollected()
    def _plan(
        self,
        request: Request,
        left: Sequence[int],
        where: "NDArray[np.void]",
        room: ReadRoom,
    ) -> tuple[list[tuple[Pack, MergedRead]], list[int], int]:
        """The reads for the chunks `left`, those whose pack is not listed any more, and the number
        of threads that read."""
        packs = self.listed(set(where["pack"].tolist()))
        sizes = [len(request.out[i]) for i in left]
        if sizes != (got := where["raw"].tolist()):
            n = next(n for n, size in enumerate(sizes) if size != got[n])
            raise Corrupt(
                f"chunk {request.name(left[n])} has {got[n]} bytes by the chunk index; wanted "
                f"{sizes[n]}; run `ckptstore fsck`"
            )
        nbytes = int(where["stored"].sum())
        threads, streams = room.threads, 1
        if self._remote:
            limit_bytes = max(REMOTE_READ_BYTES, nbytes // threads)
        elif nbytes > ALONE_BYTES and self._is_cold(where[:: -(-len(where) // SAMPLES)], packs):
            # One more waits for the disk while others verify; raw chunks need no memory on the way.
            threads += bool((where["codec"] == codecs.RAW).all())
            streams = threads
            limit_bytes = min(COLD_BYTES, max(HASHED_BYTES, nbytes // threads))
        else:
            limit_bytes = HASHED_BYTES
        planned = plan_runs(
            request,
            where,
            left,
            limit_bytes=min(room.read_bytes, limit_bytes),
            gap_bytes=GAP_BYTES if self._remote else 0,
        )
        runs: list[tuple[Pack, MergedRead]] = []
        moved: list[int] = []
        for number, run in planned:
            if number in packs:
                runs.append((packs[number], run))
            else:
                moved.extend(read.number for read in run.reads)
        # Streams in turn, each in the order of the disk, so that read-ahead works for all threads.
        stride = -(-len(runs) // streams)
        return [run for first in range(stride) for run in runs[first::stride]], moved, threads

    def _is_cold(self, where: "NDArray[np.void]", packs: Mapping[int, Pack]) -> bool:
        """Whether the disk must be asked for some of these chunks."""
        return not all(
            self.storage.is_cached(pack_key(packs[number].id), offset)
            for number, offset in where[["pack", "offset"]].tolist()
            if number in packs
        )

    def _read(
        self,
        request: Request,
        runs: Sequence[tuple[Pack, MergedRead]],
        moved: list[int],
        damaged: Damaged,
        numbers: Iterable[int],
    ) -> None:
        """Execute the reads `numbers`. Adds chunks whose pack is absent, or that the index
        misplaces, to `moved`, and unreadable ones to `damaged`."""
        scratch = Scratch()
        for number in numbers:
            pack, run = runs[number]
            for chunk in read_run(
                self.storage, keys_of(pack), run, verify_ids=request.verify_ids, scratch=scratch
            ):
                if isinstance(chunk, StoredChunk):
                    if self._cache is not None:
                        self._cache.put(chunk.entry.chunk, chunk.raw)
                elif isinstance(chunk, StoredPatch):
                    raise AssertionError("patches were read before")
                elif self._is_moved(request, pack, chunk):
                    moved.append(chunk.read.number)
                else:
                    damaged[chunk.read.number] = pack.id, chunk.problem

    def _is_moved(self, request: Request, pack: Pack, chunk: Unread) -> bool:
        """Whether the chunk may be elsewhere: its pack is absent, or the index misplaces it.
        Raises `Unavailable`."""
        read, problem = chunk
        if isinstance(problem, NotFound):
            return True
        if isinstance(problem, Unavailable):
            problem.add_note(f"while reading chunk {request.name(read.number)}")
            raise problem
        if is_elsewhere(self.storage, pack, read.entry):
            self.index.reset()
            return True
        return False

    def _where_moved(
        self,
        request: Request,
        where: "NDArray[np.void]",
        moved: Sequence[int],
        damaged: Damaged,
    ) -> tuple[list[int], "NDArray[np.void]"]:
        """Locate again the chunks whose pack gc deleted after it had copied them elsewhere. That
        may happen again during the lookup. Chunks of a listed pack are `damaged`."""
        self.look_again()
        now = self.located(request.ids_of(moved))
        before, after = _places(where), _places(now)
        for i in moved:
            place = after[request.id(i)]
            # Another thread may have replayed the deletion meanwhile: then it is looked up again.
            if place == before[request.id(i)] and (pack := self._log.state.packs.get(place[0])):
                damaged[i] = pack.id, NotFound("its pack is listed but absent")
        stay = np.array([i not in damaged for i in moved])
        return [i for i in moved if i not in damaged], now[stay]

    def _not_cached(
        self, request: Request, cache: ReadCache, threads: ThreadPool | None
    ) -> list[int]:
        """The chunks of a request that the cache did not supply."""
        rest: list[int] = []

        def task(i: int) -> None:
            if not cache.read_into(request.id(i), request.out[i], verify_id=request.verify_ids):
                rest.append(i)

        (threads.spread if threads else one_by_one)(task, range(len(request.out)))
        return sorted(rest)

    def close(self) -> None:
        if self._batches:
            self._batches.close()
        self.index.close()


def _places(where: "NDArray[np.void]") -> dict[ChunkId, tuple[int, int]]:
    """Pack and offset of each chunk."""
    return {
        chunk: (pack, offset) for chunk, pack, offset in where[["chunk", "pack", "offset"]].tolist()
    }
