"""How do a plan's bytes get into packs? Hash each chunk, skip those the store has, pack the rest.

The invariant: the bytes hashed are the bytes written, even if the trainer writes to the state
meanwhile. A worker copies memory that others may change, then hashes and writes its copy
(docs/decisions/043-…).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, pairwise
from typing import TypeAlias

import numpy as np

from ckptstore.commit.pending import Watch
from ckptstore.commit.plan import CommitPlan, Part, Run, windows
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, digest
from ckptstore.errors import Conflict
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR, align
from ckptstore.repository.dedup import Dedup
from ckptstore.repository.pack_writer import PackSet
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch, ThreadPool
from ckptstore.state.leaf_sources import NotCopied, Source, memory_of
from ckptstore.storage.direct_io_file import BLOCK_BYTES

COPIED_BY_NUMPY = 64 << 10
"""numpy copies this many bytes or more, and releases the GIL; for fewer, the call costs more than
the copy."""

PARALLEL_BYTES = 4 << 20
"""The calling thread writes a commit up to this size alone: into one pack, without hand-overs."""


_New: TypeAlias = tuple[Run, int, list[ChunkId], list[memoryview], memoryview | None]
"""Chunks to be written: their run, the number of the first, ids, bytes, and the memory that holds
all of them together."""


def hash_chunks(
    plan: CommitPlan, sources: Sequence[Source], threads: ThreadPool, max_workers: int
) -> list[bytes]:
    """The chunk ids of each part of the plan, computed by at most `max_workers` threads. Writes
    nothing."""
    ids = [bytearray(CHUNK_ID_BYTES * len(part)) for part in plan.parts]

    def work(batch: Sequence[Run]) -> None:
        for run in batch:
            at = (run.first - run.part.first) * CHUNK_ID_BYTES
            memory = memory_of(sources[run.part.leaf], run.cuts[0], run.cuts[-1])
            found = b"".join(map(digest, _chunks(run, memory)))
            ids[run.part.leaf][at : at + len(found)] = found

    small = plan.logical_bytes <= PARALLEL_BYTES
    threads.spread(work, plan.batches, max_workers=1 if small else max_workers)
    return [bytes(each) for each in ids]


def write_metadata(
    chunks: Mapping[ChunkId, tuple[bytes, int]], dedup: Dedup, packs: PackSet
) -> None:
    """Write the new ones of `chunks` (bytes and kind) to a metadata pack, and close it."""
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


class ChunkWriter:
    """One thread that writes a commit's batches to its own packs. Chunk ids go to `ids`, by leaf,
    in grid order."""

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
        self._scratch = scratch
        self._memory = NO_MEMORY
        """Private to this thread; each window overwrites it."""
        self._written = (-1, -1)
        """The leaf of the chunks queued last, and the number of the chunk behind them."""

    def work(self) -> None:
        """Write batches until none is left. The last pack is then closing."""
        try:
            for batch in self._batches:
                for window in windows(batch) if any(map(self._copied, batch)) else (batch,):
                    for new in self._new(window):
                        self._add(*new)
                    self._pack_writer.flush()
                self._watch.worked(batch)
            self._packs.close_aside(self._pack_writer)
        except BaseException:
            self._pack_writer.discard()
            raise
        finally:
            self._scratch.give(self._memory)
            self._memory = NO_MEMORY

    def _add(
        self,
        run: Run,
        first: int,
        ids: list[ChunkId],
        raws: list[memoryview],
        whole: memoryview | None,
    ) -> None:
        """Queue new chunks. A piece whose predecessor was just written follows it directly."""
        follows = run.lead and self._written == (run.part.leaf, first)
        self._pack_writer.add(
            ids,
            raws,
            run.part.width,
            TENSOR,
            codec=self._codec_of(run.part),
            run_bytes=0 if follows else sum(map(len, raws)) + run.rest,
            whole=whole,
        )
        self.new_chunks += len(ids)
        self._written = run.part.leaf, first + len(ids)

    def _new(self, window: Sequence[Run]) -> Iterator[_New]:
        """Hash a window and look its chunks up; the chunks to write, run by run."""
        hashed = self._hashed(window)
        fresh = self._dedup.fresh_runs(
            [(run.key, ids) for run, (ids, _) in zip(window, hashed, strict=True)]
        )
        for run, (ids, memory), is_new in zip(window, hashed, fresh, strict=True):
            at = (run.first - run.part.first) * CHUNK_ID_BYTES
            self._ids[run.part.leaf][at : at + len(ids) * CHUNK_ID_BYTES] = b"".join(ids)
            if any(is_new):
                raws = (
                    self._fetch_chunks(run, ids, is_new)
                    if memory is None
                    else list(compress(_chunks(run, memory), is_new))
                )
                whole = memory if all(is_new) else None
                first = run.first + is_new.index(True)
                yield run, first, list(compress(ids, is_new)), raws, whole

    def _hashed(self, window: Sequence[Run]) -> list[tuple[list[ChunkId], memoryview | None]]:
        """For each run, its chunk ids and its bytes in memory that no other thread changes. None
        stands for the bytes of a run that probably holds nothing new."""
        offsets, nbytes = self._copy_offsets(window)
        if len(self._memory) < nbytes:
            self._memory = self._scratch.take(nbytes)
        found: list[tuple[list[ChunkId], memoryview | None]] = []
        for run, offset in zip(window, offsets, strict=True):
            if offset is not None:
                memory = self._memory[offset : offset + run.raw_bytes]
                unchanged = self._unchanged(run)
                found.append(
                    (unchanged, None) if unchanged else (self._copy_and_hash(run, memory), memory)
                )
            elif ids := self._known(run):
                found.append((ids, None))
            else:
                still = self._sources[run.part.leaf].view(run.cuts[0], run.cuts[-1])
                assert still is not None  # a still source always has a view
                found.append((list(map(self._dedup.hash, _chunks(run, still))), still))
        return found

    def _copy_offsets(self, window: Sequence[Run]) -> tuple[list[int | None], int]:
        """Offsets in this thread's memory for the runs to be copied, and the total size. They are
        aligned as in a pack, so that the copies can be written from there."""
        offsets: list[int | None] = []
        end = 0
        for run in window:
            if self._copied(run):
                start = align(end, run.raw_bytes) + run.lead % BLOCK_BYTES
                offsets.append(start)
                end = start + run.raw_bytes
            else:
                offsets.append(None)
        return offsets, end

    def _copied(self, run: Run) -> bool:
        """Whether the run's memory may change while it is hashed and written."""
        source = self._sources[run.part.leaf]
        return not source.still and source.known_ids is None

    def _unchanged(self, run: Run) -> list[ChunkId]:
        """The run's chunk ids, hashed in place, if they equal those of the last commit; else none.

        Hashing in place is safe: such a run is written only if its pack has gone, and then its
        bytes are copied and compared first.
        """
        expected = self._dedup.runs.ids_of(run.key)
        live = self._sources[run.part.leaf].view(run.cuts[0], run.cuts[-1]) if expected else None
        ids: list[ChunkId] = []
        for i, chunk in enumerate(_chunks(run, live) if live is not None else ()):
            ids.append(ChunkId(digest(chunk)))
            if ids[-1] != expected[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]:
                self._dedup.runs.forget(run.key)
                return []
        return ids

    def _copy_and_hash(self, run: Run, out: memoryview) -> list[ChunkId]:
        """Copy a run and hash the copy, chunk by chunk while each is in the CPU's cache."""
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
        """The run's chunk ids if its source knows them already, else none."""
        ids = self._sources[run.part.leaf].known_ids
        if ids is None:
            return []
        first = run.first - run.part.first
        return [
            ChunkId(ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
            for i in range(first, first + len(run.cuts) - 1)
        ]

    def _fetch_chunks(
        self, run: Run, ids: list[ChunkId], wanted: Sequence[bool]
    ) -> list[memoryview]:
        """The bytes of chunks hashed without a copy that no live pack holds. They are compared with
        their ids, since they may have changed."""
        source = self._sources[run.part.leaf]
        return [
            self._fetch(source, chunk, start, stop)
            for chunk, (start, stop) in compress(zip(ids, pairwise(run.cuts), strict=True), wanted)
        ]

    def _fetch(self, source: Source, chunk: ChunkId, start: int, stop: int) -> memoryview:
        try:
            data = source.view(start, stop) if source.still else None
            if data is None:
                # A copy, since it is compared and then written. `_memory` is in use.
                data = memoryview(bytearray(stop - start))
                source.stage(start, stop, data)
        except NotCopied:
            return self._dedup.read_back(chunk, stop - start)
        if digest(data) != chunk:
            raise Conflict(
                f"bytes {start}:{stop} of a tensor changed after they were hashed as "
                f"{chunk.hex()[:12]}; repeat the commit"
            )
        return data

    def _codec_of(self, part: Part) -> int:
        """Floats compress better split into byte planes."""
        split = self._packs.codec == codecs.ZSTD and part.floating and part.width > 1
        return codecs.SPLIT_ZSTD if split else self._packs.codec


def _chunks(run: Run, memory: memoryview) -> list[memoryview]:
    """The chunks of a run whose bytes are `memory`."""
    return [memory[start - run.cuts[0] : stop - run.cuts[0]] for start, stop in pairwise(run.cuts)]


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < COPIED_BY_NUMPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
