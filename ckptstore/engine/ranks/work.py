"""What a rank does for a commit of many: exchange fragments, hash, write, and report what it has. The part that moves bytes."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptstore.core.config import MIB
from ckptstore.core.ids import CHUNK_ID_BYTES, SessionId
from ckptstore.core.model import INLINE_BYTES
from ckptstore.engine.plan import CommitPlan, Extent, plan_chunks
from ckptstore.engine.ranks.hashing import hash_chunks
from ckptstore.engine.ranks.moves import Boxes, Completion, Moves, Stretch
from ckptstore.engine.ranks.tasks import RankTask, Spot
from ckptstore.engine.transfer import Threads
from ckptstore.engine.write import Dedup, SessionPacks, read_all, write_chunks
from ckptstore.errors import Corrupt
from ckptstore.state.flat import Source
from ckptstore.state.ranks.peers import Part, Peers

CELL_BYTES = 128 * MIB
"""Completed chunks are written when there are so many bytes of them."""

SAMPLE = 32
"""Of so many boxes that others write, one is hashed here as well."""

_REPORT = struct.Struct("<BQQ")
_INLINE, _IDS = range(2)


class Report(NamedTuple):
    """What a rank has of a leaf: its bytes, or the ids of its chunks. `raw_bytes` is the length."""

    inline: bytes | None
    ids: bytes
    raw_bytes: int


class Sample(NamedTuple):
    """The id of a chunk that another rank writes: cell `cell` of a box, as it is here."""

    spot: Spot
    cell: int
    id: bytes


@dataclass(slots=True)
class RankWritten:
    """Chunk ids of jobs, of completed cells and of what was decided by content, each in the order of its tasks."""

    jobs: bytes = b""
    cells: bytes = b""
    decided: bytes = b""
    chunks: int = 0
    new_chunks: int = 0
    sent_bytes: int = 0
    failures: list[BaseException] = field(default_factory=list)


class RankWork:
    """One attempt of one rank."""

    def __init__(self, boxes: Boxes, task: RankTask, moves: Moves, chunk_bytes: int, packs: SessionPacks, threads: Threads) -> None:
        self._boxes, self._task, self._moves, self._chunk_bytes = boxes, task, moves, chunk_bytes
        self._packs, self._threads = packs, threads
        self._dedup: Dedup | None = None
        self.written = RankWritten()

    def write(self, peers: Peers, look: Callable[[], Dedup]) -> Dedup | None:
        """Exchange fragments and write what is planned and what the store, as `look` finds it, does not have; returns what that found.

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
            if size >= CELL_BYTES:
                with self._failing_later():
                    ids.extend(self._write(ready, f"cells {batches}"))
                ready, size, batches = [], 0, batches + 1
        if self.written.failures:
            raise self.written.failures[0]
        self.written.cells = b"".join((*ids, *self._write(ready, f"cells {batches}")))
        jobs = zip(self._moves.jobs, (self._boxes.source(job.spot) for job in self._task.jobs), strict=True)
        self.written.jobs = b"".join(self._write(list(jobs), "jobs"))
        return self._dedup

    def write_decided(self, decided: Sequence[tuple[int, int, int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop)."""
        spots = [self._task.reports[number] for number, _, _ in decided]
        extents = [self._boxes.cells(spot, first, stop) for spot, (_, first, stop) in zip(spots, decided, strict=True)]
        jobs = zip(extents, map(self._boxes.source, spots), strict=True)
        self.written.decided = b"".join(self._write(list(jobs)))

    def reports(self) -> bytes:
        """What this rank has of the leaves that were asked for."""
        found: list[Report | None] = []
        hashed: list[Spot] = []
        for spot in self._task.reports:
            pieces = self._boxes.pieces(spot)
            if self._boxes.global_bytes(spot) <= INLINE_BYTES:
                inline = b"".join(read_all(self._boxes.source(piece)) for piece in pieces)
                found.append(Report(inline, b"", len(inline)))
            else:
                found.append(None)
                hashed.extend(pieces)
        ids = iter(self._hash(hashed, [self._boxes.extent(spot) for spot in hashed]))
        for i, report in enumerate(found):
            if report is None:
                pieces = self._boxes.pieces(self._task.reports[i])
                joined = b"".join(next(ids) for _ in pieces)
                found[i] = Report(None, joined, sum(self._boxes.extent(piece).raw_bytes for piece in pieces))
        return encode_reports([report for report in found if report is not None])

    def samples(self, session: SessionId) -> list[Sample]:
        """Chunks that others write of boxes that this rank has as well: some, or all if replicas are not trusted."""
        chosen = list(_chosen(self._task, session))
        ids = self._hash([spot for spot, _ in chosen], [self._boxes.cells(spot, cell, cell + 1) for spot, cell in chosen])
        return [Sample(spot, cell, chunk) for (spot, cell), chunk in zip(chosen, ids, strict=True)]

    def _hash(self, spots: Sequence[Spot], extents: Sequence[Extent]) -> list[bytes]:
        return hash_chunks(plan_chunks(extents, self._chunk_bytes), list(map(self._boxes.source, spots)), self._threads)

    def _write(self, parts: Sequence[tuple[Extent, Source]], same: str = "") -> list[bytes]:
        """Write parts of which the extents are those of every attempt under the name `same`."""
        if not parts or self._dedup is None:
            return []

        def make() -> CommitPlan:
            return plan_chunks([extent for extent, _ in parts], self._chunk_bytes)

        plan = self._moves.plan(same, make) if same else make()
        written = write_chunks(plan, [source for _, source in parts], self._dedup, self._packs, self._threads)
        self.written.chunks += written.chunks
        self.written.new_chunks += written.new_chunks
        return [written.ids[i] for i in range(len(parts))]

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Others wait for what this rank sends: what fails within is raised when all has been exchanged."""
        try:
            yield
        except BaseException as error:
            self.written.failures.append(error)

    def _exchanged(self, peers: Peers) -> Iterator[tuple[Extent, bytearray]]:
        """The completed cells, window by window. After a failure of this rank what it sends and yields is of no worth, but it is sent."""
        for window in self._moves.windows:
            outgoing = [Part(rank, self._joined(stretches)) for rank, stretches in window.outgoing]
            incoming = [Part(rank, memoryview(bytearray(nbytes))) for rank, nbytes in window.incoming]
            peers.exchange(outgoing, incoming)
            self.written.sent_bytes += sum(len(part.memory) for part in outgoing)
            arrived = {part.rank: _Cursor(part.memory) for part in incoming}
            for completion in window.completions:
                yield completion.extent, self._complete(completion, arrived)

    def _joined(self, stretches: Sequence[Stretch]) -> memoryview:
        """One message: the stretches one behind the other, copied, since they are sent while others are staged."""
        message = memoryview(bytearray(sum(stop - start for _, start, stop in stretches)))
        at = 0
        with self._failing_later():
            for stretch in stretches:
                end = at + stretch.stop - stretch.start
                self._stage(stretch, message[at:end])
                at = end
        return message

    def _complete(self, completion: Completion, arrived: Mapping[int, "_Cursor"]) -> bytearray:
        data = bytearray(completion.extent.raw_bytes)
        memory = memoryview(data)
        for part in completion.parts:
            if part.own is None:
                buffer = arrived[part.rank].take(part.nbytes)
            elif len(part.ranges) == 1:
                start, stop = part.ranges[0]
                with self._failing_later():
                    self._stage(part.own, memory[start:stop])
                continue
            else:
                buffer = memoryview(bytearray(part.nbytes))
                with self._failing_later():
                    self._stage(part.own, buffer)
            at = 0
            for start, stop in part.ranges:
                memory[start:stop] = buffer[at : at + stop - start]
                at += stop - start
        return data

    def _stage(self, stretch: Stretch, out: memoryview) -> None:
        source = self._boxes.source(stretch.spot)
        memory = source.view(stretch.start, stretch.stop)
        if memory is None:
            source.stage(stretch.start, stretch.stop, out)
        else:
            out[:] = memory


class _Cursor:
    """Memory that is taken piece by piece, in order."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def take(self, nbytes: int) -> memoryview:
        self._at += nbytes
        return self._memory[self._at - nbytes : self._at]


class _Bytes:
    """A completed chunk as a source."""

    known_ids: bytes | None = None

    def __init__(self, data: bytearray, width: int) -> None:
        self._data = data
        self.nbytes, self.width = len(data), width

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = memoryview(self._data)[start:stop]


def encode_reports(reports: Sequence[Report]) -> bytes:
    heads = [
        _REPORT.pack(_INLINE, report.raw_bytes, len(report.inline))
        if report.inline is not None
        else _REPORT.pack(_IDS, report.raw_bytes, len(report.ids))
        for report in reports
    ]
    return b"".join((*heads, *(report.ids if report.inline is None else report.inline for report in reports)))


def decode_reports(data: bytes, count: int) -> list[Report]:
    """The inverse of `encode_reports` for `count` reports; raises `Corrupt`."""
    at = count * _REPORT.size
    heads = list(_REPORT.iter_unpack(data[:at])) if len(data) >= at else []
    if len(heads) != count or at + sum(size for _, _, size in heads) != len(data):
        raise Corrupt(f"a rank's {count} reports do not fit {len(data)} bytes; do all ranks run one version of ckptstore?")
    found = []
    for kind, raw_bytes, size in heads:
        part, at = data[at : at + size], at + size
        found.append(Report(part, b"", raw_bytes) if kind == _INLINE else Report(None, part, raw_bytes))
    return found


def split_ids(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_ID_BYTES] for i in range(0, len(data), CHUNK_ID_BYTES)]


def _chosen(task: RankTask, session: SessionId) -> Iterator[tuple[Spot, int]]:
    seed = int(session[:12], 16)
    for i, (spot, cells) in enumerate(task.shared):
        if not task.trust_replicated:
            yield from ((spot, cell) for cell in range(cells))
        elif (i + seed) % min(SAMPLE, len(task.shared)) == 0:
            yield spot, (seed // SAMPLE + i) % cells
