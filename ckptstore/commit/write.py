"""How do a plan's bytes get into packs? Hash each chunk, skip those the store has, pack the rest.

The invariant: the bytes hashed are the bytes written, even if the trainer writes to the state
meanwhile. A worker copies memory that others may change, then hashes and writes its copy
(docs/decisions/043-…). A chunk whose checksum equals that of the chunk at the same place in the
last commit keeps its id: it is neither copied nor hashed by BLAKE3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptstore.commit.masters import Rounder
from ckptstore.commit.patching import Patcher
from ckptstore.commit.pending import Watch
from ckptstore.commit.plan import ChunkRun, CommitPlan, Cut, PlanPart, is_floating, windows
from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId, checksum, digest
from ckptstore.core.statistics import is_measured, key_of
from ckptstore.errors import Conflict
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR, align
from ckptstore.repository.dedup import ChunkTable, Dedup, Known
from ckptstore.repository.pack_writer import NewChunk, NewPatch, PackSet, PackWriter, new_chunk
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch, ThreadPool
from ckptstore.state.leaf_sources import NotCopied, Source, memory_of
from ckptstore.state.staging_buffers import BufferSource
from ckptstore.storage.direct_io_file import BLOCK_BYTES

COPIED_BY_NUMPY = 64 << 10
"""numpy copies this many bytes or more, and releases the GIL; for fewer, the call costs more than
the copy."""

PARALLEL_BYTES = 4 << 20
"""The calling thread writes a commit up to this size alone: into one pack, without hand-overs."""


Measured: TypeAlias = MutableMapping[bytes, bytes]
"""Moments of chunks by the catalog's key (`core.statistics`)."""


class _Hashed(NamedTuple):
    """A chunk: its place, id, checksum, and bytes that no other thread changes.

    The bytes are None for a chunk that the store probably has.
    """

    cut: Cut
    id: ChunkId
    checksum: bytes
    raw: memoryview | None


class _HashedRun(NamedTuple):
    """The chunks of a run. `whole` is the memory that holds all of them together, if there is
    one."""

    run: ChunkRun
    chunks: list[_Hashed]
    whole: memoryview | None


class _New(NamedTuple):
    """Chunks of a run to be written next to each other, with the run's bytes as `PackWriter.add`
    takes them."""

    part: PlanPart
    chunks: list[NewChunk]
    run_bytes: int
    whole: memoryview | None


def hash_chunks(
    plan: CommitPlan,
    sources: Sequence[Source],
    threads: ThreadPool,
    max_workers: int,
    hashed: Callable[[memoryview], bytes] = digest,
) -> dict[int, bytes]:
    """The ids of the chunks of each leaf of the plan, or whatever else `hashed` computes, such as
    checksums; on at most `max_workers` threads. Writes nothing."""
    nbytes = len(hashed(NO_MEMORY))
    ids = {part.leaf: bytearray(nbytes * len(part)) for part in plan.parts}

    def work(batch: Sequence[ChunkRun]) -> None:
        for run in batch:
            at = (run.first - run.part.first) * nbytes
            memory = memory_of(sources[run.part.leaf], run.cuts[0], run.cuts[-1])
            found = b"".join(hashed(run.memory(cut, memory)) for cut in run.chunks())
            ids[run.part.leaf][at : at + len(found)] = found

    small = plan.logical_bytes <= PARALLEL_BYTES
    threads.spread(work, plan.batches, max_workers=1 if small else max_workers)
    return {leaf: bytes(each) for leaf, each in ids.items()}


def write_metadata(
    chunks: Mapping[ChunkId, tuple[bytes, int]], dedup: Dedup, packs: PackSet
) -> None:
    """Write those of `chunks` (bytes and kind) that are new to a metadata pack, and close it."""
    if not (fresh := dedup.fresh(chunks)):
        return
    with packs.writing(metadata=True) as pack_writer:
        for chunk in fresh:
            data, kind = chunks[chunk]
            new = [new_chunk(chunk, memoryview(data))]
            pack_writer.add(new, 1, kind, codec=codecs.ZSTD, run_bytes=len(data))


class ChunkWriter:
    """One thread that writes a commit's batches to its own packs. Its chunks go to the table
    `made`; `last` is that of the last commit of the same plan, if there was one. What replaces
    chunks of it may be stored as patches, by the `patcher`, and so may weights that round their
    masters, by the `rounder`."""

    def __init__(
        self,
        batches: Iterable[tuple[ChunkRun, ...]],
        sources: Sequence[Source],
        made: ChunkTable,
        last: ChunkTable | None,
        dedup: Dedup,
        packs: PackSet,
        watch: Watch,
        scratch: Scratch,
        measured: Measured | None,
        patcher: Patcher | None,
        rounder: Rounder | None,
    ) -> None:
        self.new_chunks = 0
        self._measured, self._patcher, self._rounder = measured, patcher, rounder
        self._batches, self._sources, self._made, self._last = batches, sources, made, last
        self._dedup, self._packs, self._watch = dedup, packs, watch
        self._pack_writer: PackWriter
        self._scratch = scratch
        self._memory = NO_MEMORY
        """Private to this thread; each window overwrites it."""
        self._made_patches: list[NewPatch] = []
        self._written = (-1, -1)
        """The leaf of the chunks queued last, and the number of the chunk behind them."""

    def work(self) -> None:
        """Write batches until none is left. The last pack is then closing."""
        try:
            with self._packs.writing() as self._pack_writer:
                for batch in self._batches:
                    changed = [rest for run in batch if (rest := self._changed(run))]
                    if self._rounder:
                        self._rounder.begin(changed)
                    copied = not changed or any(map(self._copied, changed))
                    for window in windows(changed) if copied else (changed,):
                        for new in self._new(window):
                            self._pack_writer.add(
                                new.chunks,
                                new.part.width,
                                TENSOR,
                                codec=self._codec_of(new.part),
                                run_bytes=new.run_bytes,
                                whole=new.whole,
                            )
                        if self._made_patches:
                            self._pack_writer.add_patches(self._made_patches)
                            self._made_patches = []
                        self._pack_writer.flush()
                    self._watch.worked(batch)
        finally:
            self._scratch.give(self._memory)
            self._memory = NO_MEMORY
            if self._rounder:
                self._rounder.close()

    def _changed(self, run: ChunkRun) -> ChunkRun | None:
        """The rest of a run after its leading chunks that equal those of the last commit; None if
        all do. This is the cheapest path for an unchanged chunk."""
        last, at = self._last, self._place(run)
        if last is None or not self._dedup.are_live(last.packs(at)):
            return run
        leaf, source = run.part.leaf, self._sources[run.part.leaf]
        live = source.view(run.cuts[0], run.cuts[-1]) if source.known_ids is None else None

        def is_same(cut: Cut) -> bool:
            known = last.known(leaf, cut.number)
            if live is not None:
                return self._is_same(source, cut, run.memory(cut, live), known)
            return source.known_ids is not None and self._known_id(run, cut) == known.id

        unchanged = sum(1 for _ in takewhile(is_same, run.chunks()))
        if not unchanged:
            return run
        at = slice(at.start, at.start + unchanged)
        self._dedup.reuse(last.packs(at))
        self._made.take(at, last)
        return run.behind(unchanged) if unchanged < len(run.cuts) - 1 else None

    def _place(self, run: ChunkRun) -> slice:
        """The rows of a run's chunks in a table of the plan."""
        return self._made.place(run.part.leaf, run.first, len(run.cuts) - 1)

    def _new(self, window: Sequence[ChunkRun]) -> Iterator[_New]:
        """Hash a window and look its chunks up; the chunks to write, run by run."""
        hashed = self._hashed(window)
        packs = self._dedup.look_up(chunk.id for found in hashed for chunk in found.chunks)
        for found in hashed:
            rows = [Known(chunk.id, chunk.checksum, packs[chunk.id]) for chunk in found.chunks]
            self._made.record(self._place(found.run), rows)
            new = [c for c in found.chunks if not packs[c.id] and self._dedup.take(c.id)]
            if new and self._rounder is not None:
                new = self._unrounded(self._rounder, found.run.part, new)
            if new and self._patcher and self._patcher.begin(found.run.part, _span(new)):
                new = self._unpatched(self._patcher, found.run.part, new)
            if self._rounder is not None:
                for chunk in new:
                    if chunk.raw is not None:
                        self._rounder.round(found.run.part, chunk.cut.number, chunk.id, chunk.raw)
            if new:
                yield self._fetched(found, new)

    def _unpatched(self, patcher: Patcher, part: PlanPart, new: Sequence[_Hashed]) -> list[_Hashed]:
        """Make patches of those new chunks of a leaf that differ little from what they replace;
        returns the others."""
        tried = list[NewPatch]()
        for chunk in new:
            if chunk.raw is None or not patcher.is_candidate(part, chunk.cut):
                continue
            if (old := patcher.replaced(part, chunk.cut.number)) is None:
                continue
            patch = patcher.make(part, chunk.cut, old, chunk.id, chunk.checksum, chunk.raw)
            if patch:
                tried.append(patch)
        if not tried:
            return list(new)
        made = self._dedup.allowed(tried)
        self._made_patches += made.values()
        self.new_chunks += len(made)
        return [chunk for chunk in new if chunk.id not in made]

    def _unrounded(self, rounder: Rounder, part: PlanPart, new: Sequence[_Hashed]) -> list[_Hashed]:
        """Make patches of those new chunks of a leaf that are the rounding of masters; returns the
        others."""
        left = list[_Hashed]()
        for chunk in new:
            patch = None
            if chunk.raw is not None and not self._dedup.is_distrusted(chunk.id):
                patch = rounder.make(part, chunk.cut, chunk.id, chunk.checksum, chunk.raw)
            if patch is None:
                left.append(chunk)
            else:
                self._made_patches.append(patch)
                self.new_chunks += 1
        return left

    def _fetched(self, found: _HashedRun, new: Sequence[_Hashed]) -> _New:
        """The new chunks of a run. Recognised chunks are compared with their ids now, because their
        bytes may have changed since. A piece whose predecessor was just written follows it
        directly."""
        run = found.run
        chunks, whole = list[NewChunk](), found.whole if len(new) == len(found.chunks) else None
        for chunk in new:
            raw, summed = chunk.raw, chunk.checksum
            if raw is None:
                raw = self._fetch(run.part.leaf, chunk)
                summed, whole = checksum(raw), None
            chunks.append(NewChunk(chunk.id, summed, raw))
        first = new[0].cut.number
        follows = run.lead and self._written == (run.part.leaf, first)
        self._written = run.part.leaf, first + len(new)
        self.new_chunks += len(new)
        run_bytes = 0 if follows else sum(len(chunk.raw) for chunk in chunks) + run.rest
        return _New(run.part, chunks, run_bytes, whole)

    def _hashed(self, window: Sequence[ChunkRun]) -> list[_HashedRun]:
        """For each run, its chunks."""
        places, nbytes = self._copy_places(window)
        if len(self._memory) < nbytes:
            self._memory = self._scratch.take(nbytes)
        found: list[_HashedRun] = []
        for run, place in places:
            if place is not None:
                found.append(self._hash(run, self._memory[place]))
            elif self._sources[run.part.leaf].known_ids is not None:
                found.append(_HashedRun(run, list(self._recognised(run)), None))
            else:
                found.append(self._hash(run, None))
        return found

    def _recognised(self, run: ChunkRun) -> Iterator[_Hashed]:
        """The chunks of a run whose ids are known. Their checksums come from the last commit where
        it had the same chunks. Other checksums are zeros, which match no chunk."""
        last = (self._before(run, cut) for cut in run.chunks())
        before = {known.id: known.checksum for known in last if known}
        for cut in run.chunks():
            chunk = self._known_id(run, cut)
            yield _Hashed(cut, chunk, before.get(chunk, bytes(CHECKSUM_BYTES)), None)

    def _hash(self, run: ChunkRun, out: memoryview | None) -> _HashedRun:
        """Hash the chunks of a run, each while it is in the CPU's cache. Those that changed since
        the last commit are copied to `out`, unless it is None."""
        source = self._sources[run.part.leaf]
        live = source.view(run.cuts[0], run.cuts[-1])
        if live is None:
            assert out is not None  # a still source always has a view
            source.stage(run.cuts[0], run.cuts[-1], out)
            live, out = out, None
        found = _HashedRun(run, [], live if out is None else out)
        for cut in run.chunks():
            here = run.memory(cut, live)
            there = None if out is None else run.memory(cut, out)
            known = self._before(run, cut)
            if known and self._is_same(source, cut, here, known):
                raw = here if there is None else None
                found.chunks.append(_Hashed(cut, known.id, known.checksum, raw))
                continue
            raw = here if there is None else there
            if there is not None:
                _copy(here, there)
            chunk = ChunkId(digest(raw))
            found.chunks.append(_Hashed(cut, chunk, checksum(raw), raw))
            self._measure(run.part.dtype, chunk, raw)
        return found

    def _measure(self, dtype: str, chunk: ChunkId, raw: memoryview) -> None:
        """Keep the moments of a chunk whose bytes are in the CPU's cache, if they are wanted."""
        if self._measured is None or not is_measured(dtype):
            return
        if (key := key_of(dtype, chunk)) not in self._measured:
            from ckptstore.plugins.analysis.measure import moments_of

            self._measured[key] = moments_of(raw, dtype).encode()

    def _is_same(self, source: Source, cut: Cut, memory: memoryview, known: Known) -> bool:
        """Whether a chunk, which lies in `memory`, is the `known` one of the last commit."""
        if isinstance(source, BufferSource) and source.is_as_hashed(
            self._last, cut.start, cut.stop
        ):
            return True
        return checksum(memory) == known.checksum

    def _before(self, run: ChunkRun, cut: Cut) -> Known | None:
        """A chunk of a run in the last commit, if there was one."""
        return self._last.known(run.part.leaf, cut.number) if self._last else None

    def _copy_places(
        self, window: Sequence[ChunkRun]
    ) -> tuple[list[tuple[ChunkRun, slice | None]], int]:
        """The runs, with a range of this thread's memory for each run to be copied, and the total
        size. The ranges are aligned as in a pack, so that packs can be written from them."""
        places: list[tuple[ChunkRun, slice | None]] = []
        end = 0
        for run in window:
            if self._copied(run):
                start = align(end, run.raw_bytes) + run.lead % BLOCK_BYTES
                end = start + run.raw_bytes
                places.append((run, slice(start, end)))
            else:
                places.append((run, None))
        return places, end

    def _copied(self, run: ChunkRun) -> bool:
        """Whether the run's memory may change while it is hashed and written."""
        source = self._sources[run.part.leaf]
        return not source.still and source.known_ids is None

    def _known_id(self, run: ChunkRun, cut: Cut) -> ChunkId:
        """The id of a run's chunk whose source knows it already."""
        ids = self._sources[run.part.leaf].known_ids or b""
        at = (cut.number - run.part.first) * CHUNK_ID_BYTES
        return ChunkId(ids[at : at + CHUNK_ID_BYTES])

    def _fetch(self, leaf: int, chunk: _Hashed) -> memoryview:
        source, (_, start, stop) = self._sources[leaf], chunk.cut
        try:
            data = source.view(start, stop) if source.still else None
            if data is None:
                # A copy, since it is compared and then written. `_memory` is in use.
                data = memoryview(bytearray(stop - start))
                source.stage(start, stop, data)
        except NotCopied:
            return self._dedup.read_back(chunk.id, stop - start)
        if digest(data) != chunk.id:
            raise Conflict(
                f"bytes {start}:{stop} of a tensor changed after they were hashed as "
                f"{chunk.id.hex()[:12]}; repeat the commit"
            )
        return data

    def _codec_of(self, part: PlanPart) -> int:
        """Floats compress better split into byte planes."""
        split = self._packs.codec == codecs.ZSTD and is_floating(part.dtype) and part.width > 1
        return codecs.SPLIT_ZSTD if split else self._packs.codec


def _span(chunks: Sequence[_Hashed]) -> int:
    """The bytes from the first of some chunks of a run to the end of the last."""
    return chunks[-1].cut.stop - chunks[0].cut.start


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < COPIED_BY_NUMPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
