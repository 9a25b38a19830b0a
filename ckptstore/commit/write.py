"""Hash what a plan names, drop what the store has, pack the rest: the part of a commit that moves
bytes.

The invariant: the bytes that are hashed are the bytes that are written, whoever writes to the state
meanwhile. A thread copies memory that others may write to into memory of its own, hashes the copy
and writes the copy (docs/decisions/043-…).
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress, count, islice, pairwise
from typing import Self

import numpy as np

from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.commit.plan import CommitPlan, Part, Run
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, SessionId, digest, pack_key
from ckptstore.errors import Conflict, NotFound
from ckptstore.log.fold import Pack, State
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR, align
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.pack_writer import ClosedPack, OpenPack, PackWriter, delete_own
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch, ThreadPool, shared
from ckptstore.state.leaf_sources import NotCopied, Source

COPIED_BY_NUMPY = 64 << 10
"""From so many bytes on a copy lets other threads run meanwhile; for fewer, to arrange that costs
more than the copy."""

PARALLEL_BYTES = 4 << 20
"""A commit of fewer bytes is done by the calling thread alone: one pack instead of several, no
hand-over."""


class DedupHints:
    """What the last commit of the same plan found for each run: its chunk ids and the packs that
    held them all.

    A run that has not changed since needs no look-up. 32 bytes a chunk.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[bytes, frozenset[int]]] = {}

    def packs_of(self, run: Run, ids: bytes) -> frozenset[int] | None:
        """The packs that held the run's chunks if they were `ids` then, else None."""
        known = self._found.get((run.part.leaf, run.first))
        return known[1] if known and known[0] == ids else None

    def ids_of(self, run: Run) -> bytes:
        """The ids of the run's chunks then; none for a run that was new, or has changed since."""
        known = self._found.get((run.part.leaf, run.first))
        return known[0] if known else b""

    def forget(self, run: Run) -> None:
        self._found.pop((run.part.leaf, run.first), None)

    def remember(self, run: Run, ids: bytes, packs: frozenset[int]) -> None:
        self._found[run.part.leaf, run.first] = ids, packs


class Dedup:
    """Which chunks a commit need not write: those in live packs that can be relied on, and those
    that it has taken on already. Threads share it."""

    def __init__(self, objects: ObjectStore, state: State, runs: DedupHints) -> None:
        self._objects = objects
        self._state = state
        self.runs = runs
        self._suspected = objects.suspect_packs.packs()
        self._live: dict[int, bool] = {}
        self._taken: dict[ChunkId, object] = {}
        self.reused: set[int] = set()

    def fresh(self, ids: Sequence[ChunkId]) -> list[bool]:
        """For each chunk whether the caller is the one to write it. `reused` gets the packs of
        those that are there."""
        return [
            self._is_fresh(chunk, number)
            for chunk, number in zip(ids, self._numbers(b"".join(ids)), strict=True)
        ]

    def fresh_runs(self, runs: Sequence[tuple[Run, Sequence[ChunkId]]]) -> list[list[bool]]:
        """The same, run by run."""
        unknown = [
            (run, ids, joined) for run, ids in runs if not self._known(run, joined := b"".join(ids))
        ]
        numbers = iter(
            self._numbers(b"".join(joined for _, _, joined in unknown)) if unknown else ()
        )
        found = {
            id(run): self._fresh_run(run, ids, joined, numbers) for run, ids, joined in unknown
        }
        return [found.get(id(run)) or [False] * len(ids) for run, ids in runs]

    def live(self, ids: bytes) -> list[bool]:
        """Whether a live pack holds each of `ids`. Notes nothing."""
        return [self._is_live(number) for number in self._numbers(ids)]

    def hash(self, data: memoryview) -> ChunkId:
        """The id of a chunk."""
        return self._objects.hash(data)

    def read_back(self, chunk: ChunkId, nbytes: int) -> memoryview:
        """The bytes of a chunk that a live pack held when the state was staged: a condemned pack is
        still read, until it is deleted.

        Raises `Conflict` if it has been: then nobody has them any more.
        """
        data = memoryview(bytearray(nbytes))
        try:
            self._objects.read_into(chunk, [data])
        except NotFound as error:
            raise Conflict(
                f"chunk {chunk.hex()[:12]} was in the store when the state was staged and has been "
                "collected since, so that its bytes are "
                f"gone; repeat the commit, without an impatient gc beside it"
            ) from error
        return data

    def _known(self, run: Run, ids: bytes) -> bool:
        packs = self.runs.packs_of(run, ids)
        if packs is None or not all(map(self._is_live, packs)):
            return False
        self.reused |= packs
        return True

    def _fresh_run(
        self, run: Run, ids: Sequence[ChunkId], joined: bytes, numbers: Iterator[int]
    ) -> list[bool]:
        held = list(islice(numbers, len(ids)))
        fresh = [self._is_fresh(chunk, number) for chunk, number in zip(ids, held, strict=True)]
        if all(map(self._is_live, held)):
            self.runs.remember(run, joined, frozenset(held))
        return fresh

    def _numbers(self, ids: bytes) -> list[int]:
        """The pack that holds each chunk; 0 for none. Packs are numbered from 1."""
        if not self._state.packs:
            return [0] * (len(ids) // CHUNK_ID_BYTES)
        where = self._objects.locate(ids)
        # numpy's tolist is untyped
        return np.where(where["found"] == 1, where["pack"], 0).tolist()  # type: ignore[no-any-return]

    def _is_fresh(self, chunk: ChunkId, number: int) -> bool:
        if self._is_live(number):
            self.reused.add(number)
            return False
        me = object()
        return self._taken.setdefault(chunk, me) is me

    def _is_live(self, number: int) -> bool:
        live = self._live.get(number)
        if live is None:
            pack = self._state.packs.get(number)
            live = self._live[number] = pack is not None and self._is_reliable(pack)
        return live

    def _is_reliable(self, pack: Pack) -> bool:
        return pack.live and pack.id not in self._suspected and self._objects.is_there(pack)


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_chunks` did: the chunk ids of each part's leaf in grid order, and how many chunks
    were new."""

    ids: dict[int, bytes]
    chunks: int
    new_chunks: int


class PackSet:
    """The packs of one session: their names, those closed so far, and how to get rid of them."""

    def __init__(
        self,
        objects: ObjectStore,
        session: SessionId,
        threads: ThreadPool,
        *,
        codec: int,
        pack_bytes: int,
        rank: int = 0,
        unbuffered: bool = False,
    ) -> None:
        self.closed: list[ClosedPack] = []
        self.session = session
        self._objects, self._threads = objects, threads
        self._pack_bytes, self._rank, self._unbuffered = pack_bytes, rank, unbuffered
        self.codec = codec
        self._numbers = count()
        self._closing: list[Future[None]] = []
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        config: StoreConfig,
        objects: ObjectStore,
        session: SessionId,
        threads: ThreadPool,
        rank: int = 0,
        *,
        unbuffered: bool = False,
    ) -> Self:
        """Packs as the store and its storage want them, named after `rank`; `unbuffered` ones are
        written without buffers."""
        return cls(
            objects,
            session,
            threads,
            codec=codecs.codec_id(config.codec),
            pack_bytes=objects.storage.capabilities.pack_bytes,
            rank=rank,
            unbuffered=unbuffered,
        )

    def pack_writer(self, *, metadata: bool = False) -> PackWriter:
        return PackWriter(
            self._objects.storage,
            self.session,
            self._numbers,
            self._close_aside,
            pack_bytes=self._pack_bytes,
            rank=self._rank,
            unbuffered=self._unbuffered,
            aside=self._threads.aside,
            metadata=metadata,
        )

    def close(self, pack_writer: PackWriter) -> None:
        """Close the packer's last pack on this thread."""
        pack_writer.close_with(self._close)

    def close_aside(self, pack_writer: PackWriter) -> None:
        """Close the packer's last pack while this thread goes on; `wait` waits for it."""
        pack_writer.close_with(self._close_aside)

    def wait(self) -> None:
        """Wait until every pack is closed and durable."""
        for future in self._closing:
            future.result()
        self._closing.clear()
        self._objects.storage.sync_dirs([pack_key(pack.record.id) for pack in self.closed])

    def drop(self) -> None:
        """Delete what was closed: no log entry will ever name it. What cannot be deleted now is
        found by gc under the session's name."""
        for future in self._closing:
            future.exception()
        for pack in self.closed:
            delete_own(self._objects.storage, pack.own)

    def _close_aside(self, pack: OpenPack) -> None:
        self._closing.append(self._threads.submit(lambda: self._close(pack)))

    def _close(self, pack: OpenPack) -> None:
        closed = pack.close(self._threads.spread)
        with self._lock:
            self.closed.append(closed)


def write_chunks(
    plan: CommitPlan,
    sources: Sequence[Source],
    dedup: Dedup,
    packs: PackSet,
    threads: ThreadPool,
    watch: Watch = UNWATCHED,
    *,
    max_workers: int | None = None,
) -> Written:
    """Carry out `plan` on at most `max_workers` threads; afterwards the packs are closed but not
    yet awaited. Any thread's failure is raised here."""
    ids = {part.leaf: bytearray(CHUNK_ID_BYTES * len(part)) for part in plan.parts}
    batches = shared(plan.batches)
    small = sum(part.raw_bytes for part in plan.parts) <= PARALLEL_BYTES
    max_workers = (
        1 if small else min(max_workers or threads.count, threads.count, len(plan.batches))
    )
    workers = [
        _Worker(batches, sources, ids, dedup, packs, watch, threads.scratch)
        for _ in range(max_workers)
    ]
    if workers:
        threads.together([worker.work for worker in workers], batches.stop)
    new = sum(worker.new_chunks for worker in workers)
    return Written(
        {leaf: bytes(data) for leaf, data in ids.items()}, sum(map(len, plan.parts)), new
    )


def write_metadata(
    chunks: Mapping[ChunkId, tuple[bytes, int]], dedup: Dedup, packs: PackSet
) -> None:
    """Put the metadata chunks (bytes and kind) that are new into a metadata pack, and close it."""
    ids = list(chunks)
    fresh = [chunk for chunk, new in zip(ids, dedup.fresh(ids), strict=True) if new]
    if not fresh:
        return
    pack_writer = packs.pack_writer(metadata=True)
    try:
        for chunk in fresh:
            data, kind = chunks[chunk]
            pack_writer.add(
                [chunk], [memoryview(data)], 1, kind, codec=codecs.ZSTD, run_bytes=len(data)
            )
        pack_writer.flush()
        packs.close(pack_writer)
    except BaseException:
        pack_writer.discard()
        raise


def read_all(source: Source) -> bytes:
    """All bytes of a small source."""
    memory = source.view(0, source.nbytes)
    if memory is not None:
        return bytes(memory)
    buffer = bytearray(source.nbytes)
    source.stage(0, source.nbytes, memoryview(buffer))
    return bytes(buffer)


class _Worker:
    """One thread of a commit."""

    def __init__(
        self,
        batches: Iterable[tuple[Run, ...]],
        sources: Sequence[Source],
        ids: Mapping[int, bytearray],
        dedup: Dedup,
        packs: PackSet,
        watch: Watch,
        scratch: Scratch,
    ) -> None:
        self.new_chunks = 0
        self._batches, self._sources, self._ids = batches, sources, ids
        self._dedup, self._packs, self._watch = dedup, packs, watch
        self._pack_writer = packs.pack_writer()
        self._codec = packs.codec
        self._scratch = scratch
        self._memory = NO_MEMORY
        """Of this thread alone; a batch's until the next one."""

    def work(self) -> None:
        try:
            for batch in self._batches:
                self._batch(batch)
                self._watch.worked(batch)
            self._packs.close_aside(self._pack_writer)
        except BaseException:
            self._pack_writer.discard()
            raise
        finally:
            self._scratch.give(self._memory)
            self._memory = NO_MEMORY

    def _batch(self, batch: tuple[Run, ...]) -> None:
        hashed = self._hashed(batch)
        fresh = self._dedup.fresh_runs(
            [(run, ids) for run, (ids, _) in zip(batch, hashed, strict=True)]
        )
        for run, (ids, memory), is_new in zip(batch, hashed, fresh, strict=True):
            at = (run.first - run.part.first) * CHUNK_ID_BYTES
            self._ids[run.part.leaf][at : at + len(ids) * CHUNK_ID_BYTES] = b"".join(ids)
            if any(is_new):
                new = (
                    self._fetched(run, ids, is_new)
                    if memory is None
                    else list(compress(_chunks(run, memory), is_new))
                )
                self._add(
                    run.part, list(compress(ids, is_new)), new, memory if all(is_new) else None
                )
        self._pack_writer.flush()

    def _hashed(self, batch: Sequence[Run]) -> list[tuple[list[ChunkId], memoryview | None]]:
        """The ids of each run's chunks, and its bytes, which nobody else writes to; None for a run
        of which probably nothing is new."""
        places, nbytes = self._places(batch)
        if len(self._memory) < nbytes:
            self._memory = self._scratch.take(nbytes)
        found: list[tuple[list[ChunkId], memoryview | None]] = []
        for run, place in zip(batch, places, strict=True):
            if place is not None:
                memory = self._memory[place : place + run.raw_bytes]
                unchanged = self._unchanged(run)
                found.append(
                    (unchanged, None) if unchanged else (self._copied(run, memory), memory)
                )
            elif ids := self._known(run):
                found.append((ids, None))
            else:
                still = self._sources[run.part.leaf].view(run.cuts[0], run.cuts[-1])
                assert still is not None  # as it promises
                found.append((list(map(self._dedup.hash, _chunks(run, still))), still))
        return found

    def _places(self, batch: Sequence[Run]) -> tuple[list[int | None], int]:
        """Where in this thread's memory each run goes that must be copied, aligned as in a pack, so
        that it can go to the disk from there; and how many bytes that takes."""
        places: list[int | None] = []
        end = 0
        for run in batch:
            source = self._sources[run.part.leaf]
            if source.still or source.known_ids is not None:
                places.append(None)
            else:
                start = align(end, run.raw_bytes)
                places.append(start)
                end = start + run.raw_bytes
        return places, end

    def _unchanged(self, run: Run) -> list[ChunkId]:
        """The ids of a run's chunks, hashed where they are, if they are those that the store had
        last time, else none. That damages nothing: of such a run nothing is written, unless its
        pack has gone, and then only after a comparison."""
        expected = self._dedup.runs.ids_of(run)
        live = self._sources[run.part.leaf].view(run.cuts[0], run.cuts[-1]) if expected else None
        ids: list[ChunkId] = []
        for i, chunk in enumerate(_chunks(run, live) if live is not None else ()):
            ids.append(ChunkId(digest(chunk)))
            if ids[-1] != expected[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]:
                self._dedup.runs.forget(run)
                return []
        return ids

    def _copied(self, run: Run, out: memoryview) -> list[ChunkId]:
        """Copy a run, and hash the copy: chunk by chunk, while the processor's cache has it."""
        source = self._sources[run.part.leaf]
        live = source.view(run.cuts[0], run.cuts[-1])
        if live is None:
            source.stage(run.cuts[0], run.cuts[-1], out)
            return list(map(self._dedup.hash, _chunks(run, out)))
        ids = []
        for here, there in zip(_chunks(run, live), _chunks(run, out), strict=True):
            _copy(here, there)
            ids.append(self._dedup.hash(there))
        return ids

    def _known(self, run: Run) -> list[ChunkId]:
        """The ids of the run's chunks where they need not be hashed, else none."""
        ids = self._sources[run.part.leaf].known_ids
        if ids is None:
            return []
        first = run.first - run.part.first
        return [
            ChunkId(ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
            for i in range(first, first + len(run.cuts) - 1)
        ]

    def _fetched(self, run: Run, ids: list[ChunkId], wanted: Sequence[bool]) -> list[memoryview]:
        """The bytes of those chunks of which no copy was hashed and which no live pack holds:
        compared, since they may have changed."""
        source = self._sources[run.part.leaf]
        return [
            self._fetch(source, chunk, start, stop)
            for chunk, (start, stop) in compress(zip(ids, pairwise(run.cuts), strict=True), wanted)
        ]

    def _fetch(self, source: Source, chunk: ChunkId, start: int, stop: int) -> memoryview:
        try:
            data = source.view(start, stop) if source.still else None
            if data is None:
                data = memoryview(
                    bytearray(stop - start)
                )  # a copy, since it is compared and then written; the scratch is in use
                source.stage(start, stop, data)
        except NotCopied:
            return self._dedup.read_back(chunk, stop - start)
        if digest(data) != chunk:
            raise Conflict(
                f"bytes {start}:{stop} of a tensor were written to after they had been hashed as "
                f"{chunk.hex()[:12]}; repeat the commit"
            )
        return data

    def _add(
        self, part: Part, ids: list[ChunkId], raws: list[memoryview], whole: memoryview | None
    ) -> None:
        self._pack_writer.add(
            ids,
            raws,
            part.width,
            TENSOR,
            codec=self._codec_of(part),
            run_bytes=sum(map(len, raws)),
            whole=whole,
        )
        self.new_chunks += len(ids)

    def _codec_of(self, part: Part) -> int:
        """Floats compress better byte plane by byte plane."""
        return (
            codecs.SPLIT_ZSTD
            if self._codec == codecs.ZSTD and part.floating and part.width > 1
            else self._codec
        )


def _chunks(run: Run, memory: memoryview) -> list[memoryview]:
    """The chunks of a run that lies in `memory`."""
    return [memory[start - run.cuts[0] : stop - run.cuts[0]] for start, stop in pairwise(run.cuts)]


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < COPIED_BY_NUMPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
