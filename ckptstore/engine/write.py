"""Hash what a plan names, drop what the store has, pack the rest: the part of a commit that moves bytes."""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, SessionId, digest, pack_key, twin_key
from ckptstore.engine.plan import CommitPlan, Part, Run
from ckptstore.engine.transfer import Threads, shared
from ckptstore.history.fold import State
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR
from ckptstore.objects.packing import ClosedPack, OpenPack, Packer
from ckptstore.objects.store import ObjectStore

PARALLEL_BYTES = 4 << 20
"""A commit of fewer bytes is done by the calling thread alone: one pack instead of several, no hand-over."""


class Source(Protocol):
    """Where a leaf's raw bytes come from (`state.flatten`)."""

    def memory(self) -> memoryview | None:
        """The leaf's raw bytes where they are, or None if they must be staged."""

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Copy the raw bytes `start:stop` to `out`."""


class Dedup:
    """Which chunks a commit need not write: those in live packs, and those that it has taken on already. Threads share it."""

    def __init__(self, objects: ObjectStore, state: State) -> None:
        self._objects = objects
        self._state = state
        self._live: dict[int, bool] = {}
        self._taken: dict[ChunkId, object] = {}
        self.reused: set[int] = set()

    def fresh(self, ids: Sequence[ChunkId]) -> list[bool]:
        """For each chunk whether the caller is the one to write it. `reused` gets the packs of those that are there."""
        where = self._objects.locate(b"".join(ids))
        numbers = where["pack"].tolist()
        known = where["found"].tolist()
        return [self._is_fresh(chunk, number if there else 0) for chunk, number, there in zip(ids, numbers, known, strict=True)]

    def _is_fresh(self, chunk: ChunkId, number: int) -> bool:
        if number and self._is_live(number):
            self.reused.add(number)
            return False
        me = object()
        return self._taken.setdefault(chunk, me) is me

    def _is_live(self, number: int) -> bool:
        live = self._live.get(number)
        if live is None:
            pack = self._state.packs.get(number)
            live = self._live[number] = pack is not None and pack.live
        return live


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_chunks` did: the chunk ids of each part's leaf in grid order, and how many chunks were new."""

    ids: dict[int, bytes]
    chunks: int
    new_chunks: int


class SessionPacks:
    """The packs of one session: their names, those closed so far, and how to get rid of them."""

    def __init__(self, objects: ObjectStore, session: SessionId, threads: Threads, *, codec: int, pack_bytes: int) -> None:
        self.closed: list[ClosedPack] = []
        self._objects, self._session, self._threads = objects, session, threads
        self._pack_bytes = pack_bytes
        self.codec = codec
        self._numbers = itertools.count()
        self._closing: list[Future[None]] = []
        self._lock = threading.Lock()

    def packer(self, *, metadata: bool = False) -> Packer:
        return Packer(
            self._objects.backend,
            self._session,
            self._numbers,
            self._close_aside,
            pack_bytes=self._pack_bytes,
            metadata=metadata,
        )

    def close(self, packer: Packer) -> None:
        """Close the packer's last pack on this thread."""
        packer.close_with(self._close)

    def wait(self) -> None:
        """Wait until every pack is closed and durable."""
        for future in self._closing:
            future.result()
        self._closing.clear()
        self._objects.backend.sync_dirs([pack_key(pack.record.id) for pack in self.closed])

    def drop(self) -> None:
        """Delete what was closed: no log entry will ever name it."""
        for future in self._closing:
            future.exception()
        for pack in self.closed:
            self._objects.backend.delete(pack_key(pack.record.id))
            self._objects.backend.delete(twin_key(pack.record.id))

    def _close_aside(self, pack: OpenPack) -> None:
        self._closing.append(self._threads.submit(lambda: self._close(pack)))

    def _close(self, pack: OpenPack) -> None:
        closed = pack.close()
        with self._lock:
            self.closed.append(closed)


def write_chunks(plan: CommitPlan, sources: Sequence[Source], dedup: Dedup, packs: SessionPacks, threads: Threads) -> Written:
    """Carry out `plan`; afterwards the packs are closed but not yet awaited. Any thread's failure is raised here."""
    ids = {part.leaf: bytearray(CHUNK_ID_BYTES * len(part.grid)) for part in plan.parts}
    batches = shared(plan.batches)
    small = sum(part.raw_bytes for part in plan.parts) <= PARALLEL_BYTES
    workers = [_Worker(batches, sources, ids, dedup, packs) for _ in range(1 if small else min(threads.count, len(plan.batches)))]
    if workers:
        threads.together([worker.work for worker in workers], batches.stop)
    new = sum(worker.new_chunks for worker in workers)
    return Written({leaf: bytes(data) for leaf, data in ids.items()}, sum(len(part.grid) for part in plan.parts), new)


def write_metadata(chunks: Mapping[ChunkId, tuple[bytes, int]], dedup: Dedup, packs: SessionPacks) -> None:
    """Put the metadata chunks (bytes and kind) that are new into a metadata pack, and close it."""
    ids = list(chunks)
    fresh = [chunk for chunk, new in zip(ids, dedup.fresh(ids), strict=True) if new]
    if not fresh:
        return
    packer = packs.packer(metadata=True)
    try:
        for chunk in fresh:
            data, kind = chunks[chunk]
            packer.add([chunk], [memoryview(data)], 1, kind, codec=codecs.ZSTD, run_bytes=len(data))
        packer.flush()
        packs.close(packer)
    except BaseException:
        packer.discard()
        raise


class _Worker:
    """One thread of a commit."""

    def __init__(
        self, batches: Iterable[tuple[Run, ...]], sources: Sequence[Source], ids: Mapping[int, bytearray], dedup: Dedup, packs: SessionPacks
    ) -> None:
        self.new_chunks = 0
        self._batches, self._sources, self._ids, self._dedup, self._packs = batches, sources, ids, dedup, packs
        self._packer = packs.packer()
        self._codec = packs.codec
        self._staging: memoryview | None = None

    def work(self) -> None:
        try:
            for batch in self._batches:
                self._batch(batch)
            self._packs.close(self._packer)
        except BaseException:
            self._packer.discard()
            raise

    def _batch(self, batch: tuple[Run, ...]) -> None:
        views = [self._views(run, batch) for run in batch]
        ids = [[ChunkId(digest(view)) for view in run_views] for run_views in views]
        fresh = iter(self._dedup.fresh([chunk for run_ids in ids for chunk in run_ids]))
        for run, run_ids, run_views in zip(batch, ids, views, strict=True):
            at = run.first * CHUNK_ID_BYTES
            self._ids[run.part.leaf][at : at + len(run_ids) * CHUNK_ID_BYTES] = b"".join(run_ids)
            new = [i for i, is_new in zip(range(len(run_ids)), fresh, strict=False) if is_new]
            if new:
                size = sum(len(run_views[i]) for i in new)
                self._packer.add(
                    [run_ids[i] for i in new],
                    [run_views[i] for i in new],
                    run.part.width,
                    TENSOR,
                    codec=self._codec_of(run.part),
                    run_bytes=size,
                )
                self.new_chunks += len(new)
        self._packer.flush()

    def _codec_of(self, part: Part) -> int:
        """Floats compress better byte plane by byte plane."""
        return codecs.SPLIT_ZSTD if self._codec == codecs.ZSTD and part.floating and part.width > 1 else self._codec

    def _views(self, run: Run, batch: tuple[Run, ...]) -> list[memoryview]:
        spans = [run.part.grid.span(i) for i in range(run.first, run.stop)]
        memory = self._sources[run.part.leaf].memory()
        if memory is None:
            start, stop = spans[0][0], spans[-1][1]
            memory = self._stage(run.part, start, stop, fresh=len(batch) > 1)
            spans = [(a - start, b - start) for a, b in spans]
        return [memory[a:b] for a, b in spans]

    def _stage(self, part: Part, start: int, stop: int, *, fresh: bool) -> memoryview:
        """Copy what cannot be read in place: into memory of this thread that is used again for the next batch, unless several runs share
        the batch."""
        if fresh:
            out = memoryview(bytearray(stop - start))
        else:
            if self._staging is None or len(self._staging) < stop - start:
                self._staging = memoryview(np.empty(max(RUN_BYTES, stop - start), np.uint8))
            out = self._staging[: stop - start]
        self._sources[part.leaf].stage(start, stop, out)
        return out
