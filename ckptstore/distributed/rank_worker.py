"""What does one rank do in a commit of many? It exchanges fragments, hashes and writes chunks, and
reports content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptstore.commit.hashing import hash_chunks
from ckptstore.commit.plan import CommitPlan, Extent, plan_chunks
from ckptstore.commit.write import read_all, write_chunks
from ckptstore.core.ids import SessionId
from ckptstore.core.model import INLINE_BYTES
from ckptstore.distributed.collective import Collective, Part
from ckptstore.distributed.describe import Report, encode_reports
from ckptstore.distributed.exchange_plan import (
    Boxes,
    ByteRange,
    Completion,
    Moves,
    Outgoing,
    Window,
)
from ckptstore.distributed.rank_plan import LeafRef, RankTask
from ckptstore.repository.dedup import Dedup
from ckptstore.repository.memory_budget import RankRoom
from ckptstore.repository.pack_writer import PackSet
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import Source

SAMPLE = 32
"""One in this many boxes that other ranks write is hashed here as well."""


class Sample(NamedTuple):
    """The id of a chunk that another rank writes, as computed here: cell `cell` of the task's
    shared box number `shared`.
    """

    shared: int
    cell: int
    id: bytes


@dataclass(slots=True)
class RankWritten:
    """Chunk ids of jobs, of completed cells and of content that was resolved later, each in task
    order.
    """

    jobs: bytes = b""
    cells: bytes = b""
    decided: bytes = b""
    chunks: int = 0
    new_chunks: int = 0
    sent_bytes: int = 0
    failures: list[BaseException] = field(default_factory=list)


class RankWorker:
    """One rank's attempt at a commit."""

    def __init__(
        self,
        boxes: Boxes,
        task: RankTask,
        moves: Moves,
        chunk_bytes: int,
        packs: PackSet,
        threads: ThreadPool,
        room: RankRoom,
    ) -> None:
        self._room = room
        self._boxes, self._task, self._moves, self._chunk_bytes = boxes, task, moves, chunk_bytes
        self._packs, self._threads = packs, threads
        self._dedup: Dedup | None = None
        self.written = RankWritten()

    def write(self, peers: Collective, look: Callable[[], Dedup]) -> Dedup | None:
        """Exchange fragments and write the planned chunks that the store lacks, by the lookup of
        `look`; returns that lookup.

        Peers get what they wait for even if something fails here.
        """
        ids: list[bytes] = []
        with self._failing_later():
            self._dedup = look()
        ready: list[tuple[Extent, Source]] = []
        size = batches = 0
        for extent, data in self._exchanged(peers):
            ready.append((extent, _Bytes(data, extent.width)))
            size += len(data)
            if size >= self._room.cells_bytes:
                with self._failing_later():
                    ids.extend(self._write(ready, f"cells {batches}"))
                ready, size, batches = [], 0, batches + 1
        if self.written.failures:
            raise self.written.failures[0]
        self.written.cells = b"".join((*ids, *self._write(ready, f"cells {batches}")))
        jobs = zip(
            self._moves.jobs, (self._boxes.source(job.ref) for job in self._task.jobs), strict=True
        )
        self.written.jobs = b"".join(self._write(list(jobs), "jobs"))
        return self._dedup

    def write_decided(self, decided: Sequence[tuple[int, int, int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop)."""
        spots = [self._task.reports[number] for number, _, _ in decided]
        extents = [
            self._boxes.cells(ref, first, stop)
            for ref, (_, first, stop) in zip(spots, decided, strict=True)
        ]
        jobs = zip(extents, map(self._boxes.source, spots), strict=True)
        self.written.decided = b"".join(self._write(list(jobs)))

    def reports(self) -> bytes:
        """This rank's content of the reported leaves."""
        found: list[Report | None] = []
        hashed: list[LeafRef] = []
        for ref in self._task.reports:
            pieces = self._boxes.pieces(ref)
            if self._boxes.global_bytes(ref) <= INLINE_BYTES:
                inline = b"".join(read_all(self._boxes.source(piece)) for piece in pieces)
                found.append(Report(inline, b"", len(inline)))
            else:
                found.append(None)
                hashed.extend(pieces)
        ids = iter(self._hash(hashed, [self._boxes.extent(ref) for ref in hashed]))
        for i, report in enumerate(found):
            if report is None:
                pieces = self._boxes.pieces(self._task.reports[i])
                joined = b"".join(next(ids) for _ in pieces)
                found[i] = Report(
                    None, joined, sum(self._boxes.extent(piece).raw_bytes for piece in pieces)
                )
        return encode_reports([report for report in found if report is not None])

    def samples(self, session: SessionId) -> list[Sample]:
        """Ids of chunks that other ranks write of boxes held here as well: a sample, or all if
        replicas are not trusted.
        """
        chosen = list(_chosen(self._task, session))
        spots = [self._task.shared[number][0] for number, _ in chosen]
        ids = self._hash(
            spots,
            [
                self._boxes.cells(ref, cell, cell + 1)
                for ref, (_, cell) in zip(spots, chosen, strict=True)
            ],
        )
        return [
            Sample(number, cell, chunk) for (number, cell), chunk in zip(chosen, ids, strict=True)
        ]

    def _hash(self, spots: Sequence[LeafRef], extents: Sequence[Extent]) -> list[bytes]:
        plan = plan_chunks(extents, self._chunk_bytes, self._room.write.run_bytes)
        return hash_chunks(
            plan, list(map(self._boxes.source, spots)), self._threads, self._room.write.threads
        )

    def _write(self, parts: Sequence[tuple[Extent, Source]], same: str = "") -> list[bytes]:
        """Write parts. Under the name `same`, the extents are equal in every attempt."""
        if not parts or self._dedup is None:
            return []

        def make() -> CommitPlan:
            return plan_chunks(
                [extent for extent, _ in parts], self._chunk_bytes, self._room.write.run_bytes
            )

        plan = self._moves.plan((same, self._room.write.run_bytes), make) if same else make()
        sources = [source for _, source in parts]
        written = write_chunks(
            plan,
            sources,
            self._dedup,
            self._packs,
            self._threads,
            max_workers=self._room.write.threads,
        )
        self.written.chunks += written.chunks
        self.written.new_chunks += written.new_chunks
        return [written.ids[i] for i in range(len(parts))]

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Keep an error until the exchange ends, since other ranks wait for this rank's data."""
        try:
            yield
        except BaseException as error:
            self.written.failures.append(error)

    def _exchanged(self, peers: Collective) -> Iterator[tuple[Extent, bytearray]]:
        """The completed cells, window by window. After a local failure, send and yield placeholders
        so that peers do not block.
        """
        for window in self._moves.windows:
            yield from self._in_window(
                peers, window
            )  # this window's memory is free again when the next one begins

    def _in_window(self, peers: Collective, window: Window) -> Iterator[tuple[Extent, bytearray]]:
        outgoing = [Part(rank, self._joined(found)) for rank, found in window.outgoing]
        incoming = [Part(rank, memoryview(bytearray(nbytes))) for rank, nbytes in window.incoming]
        with self._failing_later():
            peers.exchange(outgoing, incoming)
        self.written.sent_bytes += sum(len(part.memory) for part in outgoing)
        arrived = {part.rank: _Cursor(part.memory) for part in incoming}
        for completion in window.completions:
            yield completion.how.extent, self._complete(completion, arrived)

    def _joined(self, outgoing: Sequence[Outgoing]) -> memoryview:
        """One message with copies of the byte ranges, concatenated: the sources may be reused while
        it is sent.
        """
        message = memoryview(
            bytearray(sum(byte_range.stop - byte_range.start for _, _, byte_range in outgoing))
        )
        at = 0
        with self._failing_later():
            for tree, leaf, byte_range in outgoing:
                end = at + byte_range.stop - byte_range.start
                self._stage(tree, leaf, byte_range, message[at:end])
                at = end
        return message

    def _complete(self, completion: Completion, arrived: Mapping[int, "_Cursor"]) -> bytearray:
        tree, leaf, how = completion
        data = bytearray(how.extent.raw_bytes)
        memory = memoryview(data)
        for part in how.parts:
            if part.own is None:
                buffer = arrived[part.rank].take(part.nbytes)
            elif len(part.ranges) == 1:
                start, stop = part.ranges[0]
                with self._failing_later():
                    self._stage(tree, leaf, part.own, memory[start:stop])
                continue
            else:
                buffer = memoryview(bytearray(part.nbytes))
                with self._failing_later():
                    self._stage(tree, leaf, part.own, buffer)
            at = 0
            for start, stop in part.ranges:
                memory[start:stop] = buffer[at : at + stop - start]
                at += stop - start
        return data

    def _stage(self, tree: int, leaf: int, byte_range: ByteRange, out: memoryview) -> None:
        source = self._boxes.source(LeafRef(tree, leaf, byte_range.part))
        memory = source.view(byte_range.start, byte_range.stop)
        if memory is None:
            source.stage(byte_range.start, byte_range.stop, out)
        else:
            out[:] = memory


class _Cursor:
    """Memory that is taken in consecutive ranges."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def take(self, nbytes: int) -> memoryview:
        self._at += nbytes
        return self._memory[self._at - nbytes : self._at]


class _Bytes:
    """A completed chunk as a source."""

    known_ids: bytes | None = None
    still = True

    def __init__(self, data: bytearray, width: int) -> None:
        self._data = data
        self.nbytes, self.width = len(data), width

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = memoryview(self._data)[start:stop]


def _chosen(task: RankTask, session: SessionId) -> Iterator[tuple[int, int]]:
    """Shared boxes by their number in the task, and their chosen cells."""
    seed = int(session[:12], 16)
    for i, (_, cells) in enumerate(task.shared):
        if not task.trust_replicated:
            yield from ((i, cell) for cell in range(cells))
        elif (i + seed) % min(SAMPLE, len(task.shared)) == 0:
            yield i, (seed // SAMPLE + i) % cells
