"""How do a plan's bytes get into packs? Hash each chunk, skip those the store has, pack the rest.

The invariant: the bytes hashed are the bytes written, even if the trainer writes to the state
meanwhile. A worker copies memory that others may change, then hashes and writes its copy
(docs/decisions/043-…). A chunk that still has the checksum that it had in the last commit, at the
same place, keeps its id: it is neither copied nor hashed by BLAKE3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import compress, pairwise, takewhile
from operator import eq
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptstore.commit.pending import Watch
from ckptstore.commit.plan import CommitPlan, Part, Run, is_floating, windows
from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId, checksum, digest
from ckptstore.core.statistics import is_measured, key_of
from ckptstore.errors import Conflict
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR, align
from ckptstore.repository.dedup import ChunkTable, Dedup, items_of
from ckptstore.repository.pack_writer import PackSet
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch, ThreadPool
from ckptstore.state.leaf_sources import NotCopied, Source, memory_of
from ckptstore.storage.direct_io_file import BLOCK_BYTES

COPIED_BY_NUMPY = 64 << 10
"""numpy copies this many bytes or more, and releases the GIL; for fewer, the call costs more than
the copy."""

PARALLEL_BYTES = 4 << 20
"""The calling thread writes a commit up to this size alone: into one pack, without hand-overs."""


Measured: TypeAlias = MutableMapping[bytes, bytes]
"""Moments of chunks by the catalog's key (`core.statistics`)."""


class _Hashed(NamedTuple):
    """A run's chunks: ids, checksums, and bytes that no other thread changes.

    None stands for the bytes of a chunk that the store probably has. `whole` is the memory that
    holds all of them together, if there is one.
    """

    ids: list[ChunkId]
    checksums: list[bytes]
    raws: list[memoryview | None]
    whole: memoryview | None


class _New(NamedTuple):
    """Chunks of `run` to be written; `first` is the number of the first."""

    run: Run
    first: int
    ids: list[ChunkId]
    checksums: list[bytes]
    raws: list[memoryview]
    whole: memoryview | None


def hash_chunks(
    plan: CommitPlan,
    sources: Sequence[Source],
    threads: ThreadPool,
    max_workers: int,
    hashed: Callable[[memoryview], bytes] = digest,
) -> dict[int, bytes]:
    """The ids of the chunks of each leaf of the plan, or their checksums if that is how they are
    `hashed`, by at most `max_workers` threads. Writes nothing."""
    nbytes = len(hashed(NO_MEMORY))
    ids = {part.leaf: bytearray(nbytes * len(part)) for part in plan.parts}

    def work(batch: Sequence[Run]) -> None:
        for run in batch:
            at = (run.first - run.part.first) * nbytes
            memory = memory_of(sources[run.part.leaf], run.cuts[0], run.cuts[-1])
            found = b"".join(map(hashed, _chunks(run, memory)))
            ids[run.part.leaf][at : at + len(found)] = found

    small = plan.logical_bytes <= PARALLEL_BYTES
    threads.spread(work, plan.batches, max_workers=1 if small else max_workers)
    return {leaf: bytes(each) for leaf, each in ids.items()}


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
                [chunk],
                [checksum(data)],
                [memoryview(data)],
                1,
                kind,
                codec=codecs.ZSTD,
                run_bytes=len(data),
            )
        pack_writer.flush()
        packs.close(pack_writer)
    except BaseException:
        pack_writer.discard()
        raise


class ChunkWriter:
    """One thread that writes a commit's batches to its own packs. Its chunks go to the table
    `made`; `last` is that of the last commit of the same plan, if there was one."""

    def __init__(
        self,
        batches: Iterable[tuple[Run, ...]],
        sources: Sequence[Source],
        made: ChunkTable,
        last: ChunkTable | None,
        dedup: Dedup,
        packs: PackSet,
        watch: Watch,
        scratch: Scratch,
        measured: Measured | None,
    ) -> None:
        self.new_chunks = 0
        self._measured = measured
        self._batches, self._sources, self._made, self._last = batches, sources, made, last
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
                changed = [rest for run in batch if (rest := self._changed(run))]
                copied = not changed or any(map(self._copied, changed))
                for window in windows(changed) if copied else (changed,):
                    for new in self._new(window):
                        self._add(new)
                    self._pack_writer.flush()
                self._watch.worked(batch)
            self._packs.close_aside(self._pack_writer)
        except BaseException:
            self._pack_writer.discard()
            raise
        finally:
            self._scratch.give(self._memory)
            self._memory = NO_MEMORY

    def _add(self, new: _New) -> None:
        """Queue new chunks. A piece whose predecessor was just written follows it directly."""
        run = new.run
        follows = run.lead and self._written == (run.part.leaf, new.first)
        self._pack_writer.add(
            new.ids,
            new.checksums,
            new.raws,
            run.part.width,
            TENSOR,
            codec=self._codec_of(run.part),
            run_bytes=0 if follows else sum(map(len, new.raws)) + run.rest,
            whole=new.whole,
        )
        self.new_chunks += len(new.ids)
        self._written = run.part.leaf, new.first + len(new.ids)

    def _changed(self, run: Run) -> Run | None:
        """What is left of a run behind its first chunks that are as in the last commit; None if
        nothing is. Of all ways to write chunks, this one does least for each."""
        last, at = self._last, self._place(run)
        if last is None or not self._dedup.are_live(packs := last.packs[at]):
            return run
        if ids := self._known(run):
            same = map(eq, ids, last.ids_at(at))
        elif (live := self._sources[run.part.leaf].view(run.cuts[0], run.cuts[-1])) is not None:
            same = map(eq, map(checksum, _chunks(run, live)), last.checksums_at(at))
        else:
            return run
        unchanged = sum(takewhile(bool, same))
        if not unchanged:
            return run
        packs, at = packs[:unchanged], slice(at.start, at.start + unchanged)
        self._dedup.reused.update(packs)
        self._made.record(at, last.ids_at(at), last.checksums_at(at), packs)
        return run.behind(unchanged) if unchanged < len(run.cuts) - 1 else None

    def _place(self, run: Run) -> slice:
        """Where the chunks of a run are in a table."""
        return self._made.place(run.part.leaf, run.first - run.part.first, len(run.cuts) - 1)

    def _new(self, window: Sequence[Run]) -> Iterator[_New]:
        """Hash a window and look its chunks up; the chunks to write, run by run."""
        hashed = self._hashed(window)
        is_fresh, packs = self._dedup.look_up([chunk for found in hashed for chunk in found.ids])
        begin = 0
        for run, found in zip(window, hashed, strict=True):
            end = begin + len(found.ids)
            self._made.record(self._place(run), found.ids, found.checksums, packs[begin:end])
            if any(is_new := is_fresh[begin:end]):
                yield self._fetched(run, found, is_new)
            begin = end

    def _fetched(self, run: Run, found: _Hashed, is_new: Sequence[bool]) -> _New:
        """The new chunks of a run. The bytes of those that were recognised are compared with their
        ids now, since they may have changed."""
        ids, checksums, raws = list[ChunkId](), list[bytes](), list[memoryview]()
        whole = found.whole if all(is_new) else None
        for i in compress(range(len(is_new)), is_new):
            raw, summed = found.raws[i], found.checksums[i]
            if raw is None:
                raw = self._fetch(
                    self._sources[run.part.leaf], found.ids[i], run.cuts[i], run.cuts[i + 1]
                )
                summed, whole = checksum(raw), None
            ids.append(found.ids[i])
            checksums.append(summed)
            raws.append(raw)
        return _New(run, run.first + is_new.index(True), ids, checksums, raws, whole)

    def _hashed(self, window: Sequence[Run]) -> list[_Hashed]:
        """For each run, its chunks."""
        offsets, nbytes = self._copy_offsets(window)
        if len(self._memory) < nbytes:
            self._memory = self._scratch.take(nbytes)
        found: list[_Hashed] = []
        for run, offset in zip(window, offsets, strict=True):
            if offset is not None:
                found.append(self._hash(run, self._memory[offset : offset + run.raw_bytes]))
            elif ids := self._known(run):
                found.append(_Hashed(ids, self._summed(run, ids), [None] * len(ids), None))
            else:
                found.append(self._hash(run, None))
        return found

    def _hash(self, run: Run, out: memoryview | None) -> _Hashed:
        """The chunks of a run, one after the other while each is in the CPU's cache. Those that
        changed since the last commit are copied to `out`, unless it is None."""
        source, known = self._sources[run.part.leaf], self._before(run)
        live = source.view(run.cuts[0], run.cuts[-1])
        if live is None:
            assert out is not None  # a still source always has a view
            source.stage(run.cuts[0], run.cuts[-1], out)
            live, out = out, None
        found = _Hashed([], [], [], live if out is None else out)
        for i, here in enumerate(_chunks(run, live)):
            there = None if out is None else out[run.cuts[i] - run.cuts[0] :][: len(here)]
            if known and (summed := checksum(here)) == known[i][1]:
                chunk = known[i][0]
                raw = here if there is None else None
            else:
                raw = here if there is None else there
                if there is not None:
                    _copy(here, there)
                chunk, summed = ChunkId(digest(raw)), checksum(raw)
                self._measure(run.part.dtype, chunk, raw)
            found.ids.append(chunk)
            found.checksums.append(summed)
            found.raws.append(raw)
        return found

    def _measure(self, dtype: str, chunk: ChunkId, raw: memoryview) -> None:
        """Keep the moments of a chunk whose bytes are in the CPU's cache, if they are wanted."""
        if self._measured is None or not is_measured(dtype):
            return
        if (key := key_of(dtype, chunk)) not in self._measured:
            from ckptstore.state.measure import moments_of  # without torch unless it is wanted

            self._measured[key] = moments_of(raw, dtype).encode()

    def _before(self, run: Run) -> list[tuple[ChunkId, bytes]]:
        """Id and checksum of each chunk of a run in the last commit; nothing if there was none."""
        if self._last is None:
            return []
        at = self._place(run)
        return list(zip(self._last.ids_at(at), self._last.checksums_at(at), strict=True))

    def _summed(self, run: Run, ids: Sequence[ChunkId]) -> list[bytes]:
        """The checksums of chunks whose ids are known: those of the last commit, as far as it had
        the same chunks, else zeros, which no chunk is recognised by."""
        before = dict(self._before(run))
        return [before.get(chunk, bytes(CHECKSUM_BYTES)) for chunk in ids]

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

    def _known(self, run: Run) -> list[ChunkId]:
        """The run's chunk ids if its source knows them already, else none."""
        ids = self._sources[run.part.leaf].known_ids
        if ids is None:
            return []
        first = run.first - run.part.first
        own = ids[first * CHUNK_ID_BYTES : (first + len(run.cuts) - 1) * CHUNK_ID_BYTES]
        return list(map(ChunkId, items_of(own)))

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
        split = self._packs.codec == codecs.ZSTD and is_floating(part.dtype) and part.width > 1
        return codecs.SPLIT_ZSTD if split else self._packs.codec


def _chunks(run: Run, memory: memoryview) -> list[memoryview]:
    """The chunks of a run whose bytes are `memory`."""
    return [memory[start - run.cuts[0] : stop - run.cuts[0]] for start, stop in pairwise(run.cuts)]


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < COPIED_BY_NUMPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
