"""What a rank does for a commit of many: exchange fragments, hash, write, and report what it has. The part that moves bytes."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple

from ckptstore.core import dtypes
from ckptstore.core.config import MIB
from ckptstore.core.geometry import Grid, byte_ranges, grid, within
from ckptstore.core.ids import CHUNK_ID_BYTES, SessionId
from ckptstore.core.model import INLINE_BYTES, Box, Schema
from ckptstore.engine.plan import Extent, plan_chunks
from ckptstore.engine.ranks.hashing import hash_chunks
from ckptstore.engine.ranks.tasks import CellTask, FragmentTask, RankTask, SendTask, Spot
from ckptstore.engine.transfer import Threads
from ckptstore.engine.write import Dedup, SessionPacks, read_all, write_chunks
from ckptstore.errors import Corrupt
from ckptstore.state.flat import Flat, Source
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

    def __init__(self, flats: Sequence[Flat], task: RankTask, chunk_bytes: int, packs: SessionPacks, threads: Threads) -> None:
        self._flats, self._task, self._chunk_bytes = flats, task, chunk_bytes
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
        size = 0
        for task, data in self._exchanged(peers):
            extent = self._extent(task.spot)
            ready.append((Extent((len(data) // extent.width,), extent.width, len(data), extent.floating), _Bytes(data, extent.width)))
            size += len(data)
            if size >= CELL_BYTES:
                with self._failing_later():
                    ids.extend(self._write(ready))
                ready, size = [], 0
        if self.written.failures:
            raise self.written.failures[0]
        self.written.cells = b"".join((*ids, *self._write(ready)))
        jobs = [(self._cells(job.spot, job.first, job.stop), self._source(job.spot)) for job in self._task.jobs]
        self.written.jobs = b"".join(self._write(jobs))
        return self._dedup

    def write_decided(self, decided: Sequence[tuple[int, int, int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop)."""
        jobs = [
            (self._cells(self._task.reports[number], first, stop), self._source(self._task.reports[number]))
            for number, first, stop in decided
        ]
        self.written.decided = b"".join(self._write(jobs))

    def reports(self) -> bytes:
        """What this rank has of the leaves that were asked for."""
        found: list[Report | None] = []
        parts: list[tuple[Extent, Source]] = []
        for spot in self._task.reports:
            pieces = self._pieces(spot)
            raw_bytes = sum(extent.raw_bytes for extent, _ in pieces)
            if self._global_bytes(spot) <= INLINE_BYTES:
                found.append(Report(b"".join(read_all(source) for _, source in pieces), b"", raw_bytes))
            else:
                found.append(None)
                parts.extend(pieces)
        hashed = iter(hash_chunks(plan_chunks([extent for extent, _ in parts], self._chunk_bytes), [s for _, s in parts], self._threads))
        for i, report in enumerate(found):
            if report is None:
                pieces = self._pieces(self._task.reports[i])
                ids = b"".join(next(hashed) for _ in pieces)
                found[i] = Report(None, ids, sum(extent.raw_bytes for extent, _ in pieces))
        return encode_reports([report for report in found if report is not None])

    def samples(self, session: SessionId) -> list[Sample]:
        """Chunks that others write of boxes that this rank has as well: some, or all if replicas are not trusted."""
        chosen = list(_chosen(self._task, session))
        parts = [(self._cells(spot, cell, cell + 1), self._source(spot)) for spot, cell in chosen]
        ids = hash_chunks(plan_chunks([extent for extent, _ in parts], self._chunk_bytes), [s for _, s in parts], self._threads)
        return [Sample(spot, cell, chunk) for (spot, cell), chunk in zip(chosen, ids, strict=True)]

    def _write(self, parts: Sequence[tuple[Extent, Source]]) -> list[bytes]:
        if not parts or self._dedup is None:
            return []
        plan = plan_chunks([extent for extent, _ in parts], self._chunk_bytes)
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

    def _exchanged(self, peers: Peers) -> Iterator[tuple[CellTask, bytearray]]:
        """The completed cells, window by window. After a failure of this rank what it sends and yields is of no worth, but it is sent."""
        sends = {window: list(found) for window, found in groupby(self._task.sends, lambda send: send.window)}
        cells = {window: list(found) for window, found in groupby(self._task.cells, lambda cell: cell.window)}
        for window in sorted(sends.keys() | cells.keys()):
            outgoing = self._outgoing(sends.get(window, ()))
            incoming = self._incoming(cells.get(window, ()), peers.rank)
            peers.exchange(outgoing, incoming)
            self.written.sent_bytes += sum(len(part.memory) for part in outgoing)
            arrived = {part.rank: _Cursor(part.memory) for part in incoming}
            for cell in cells.get(window, ()):
                yield cell, self._complete(cell, [self._arrived(cell, each, arrived, peers.rank) for each in cell.fragments])

    def _outgoing(self, sends: Sequence[SendTask]) -> list[Part]:
        """One message to each rank, its fragments one behind the other."""
        found: dict[int, bytearray] = {}
        for send in sends:
            found.setdefault(send.to, bytearray()).extend(self._fragment(send.spot, send.cell))
        return [Part(rank, memoryview(data)) for rank, data in sorted(found.items())]

    def _incoming(self, cells: Sequence[CellTask], rank: int) -> list[Part]:
        sizes: dict[int, int] = {}
        for cell in cells:
            for fragment in cell.fragments:
                if fragment.rank != rank:
                    sizes[fragment.rank] = sizes.get(fragment.rank, 0) + self._fragment_bytes(cell, fragment)
        return [Part(sender, memoryview(bytearray(size))) for sender, size in sorted(sizes.items())]

    def _fragment_bytes(self, cell: CellTask, fragment: FragmentTask) -> int:
        return prod(fragment.box.lengths) * self._extent(cell.spot).width

    def _arrived(self, cell: CellTask, fragment: FragmentTask, arrived: Mapping[int, "_Cursor"], rank: int) -> memoryview:
        if fragment.rank == rank:
            return self._fragment(Spot(cell.spot.tree, cell.spot.leaf, fragment.part), fragment.cell)
        return arrived[fragment.rank].take(self._fragment_bytes(cell, fragment))

    def _fragment(self, spot: Spot, cell: int) -> memoryview:
        """The bytes of a cell of a box, copied: they are sent while others are staged."""
        start, stop = self._grid(spot).span(cell)
        buffer = bytearray(stop - start)
        with self._failing_later():
            self._source(spot).stage(start, stop, memoryview(buffer))
        return memoryview(buffer)

    def _complete(self, task: CellTask, buffers: Sequence[memoryview]) -> bytearray:
        extent = self._extent(task.spot)
        cell = grid(extent.shape, extent.width, self._chunk_bytes).cell(task.chunk)
        if len(buffers) == 1:
            return bytearray(buffers[0])
        data = bytearray(sum(map(len, buffers)))
        for fragment, buffer in zip(task.fragments, buffers, strict=True):
            at = 0
            for start, stop in byte_ranges(cell.lengths, within(fragment.box, cell), extent.width):
                data[start:stop] = buffer[at : at + stop - start]
                at += stop - start
        return data

    def _pieces(self, spot: Spot) -> list[tuple[Extent, Source]]:
        """All that this rank has of a leaf."""
        flat, leaf = self._resolved(spot)
        if leaf in flat.held:
            return [
                (self._extent(place := Spot(spot.tree, spot.leaf, part)), self._source(place)) for part in range(len(flat.held[leaf].parts))
            ]
        return [(self._extent(spot), self._source(spot))]

    def _global_bytes(self, spot: Spot) -> int:
        flat, leaf = self._resolved(spot)
        if leaf not in flat.held:
            return flat.leaves[leaf].nbytes
        nbytes = _width(flat.schema, leaf)
        for n in flat.schema.shapes[leaf]:
            nbytes *= n
        return nbytes

    def _cells(self, spot: Spot, first: int, stop: int) -> Extent:
        cells = self._grid(spot)
        return self._extent(spot)._replace(cells=(first, stop), raw_bytes=cells.span(stop - 1)[1] - cells.span(first)[0])

    def _grid(self, spot: Spot) -> Grid:
        extent = self._extent(spot)
        return grid(extent.shape, extent.width, self._chunk_bytes, extent.box)

    def _extent(self, spot: Spot) -> Extent:
        flat, leaf = self._resolved(spot)
        source = self._source(spot)
        if flat.schema.kinds[leaf] != "tensor":
            return Extent((source.nbytes,), 1, source.nbytes, False)
        floating = flat.schema.dtypes[leaf].startswith(("float", "bfloat"))
        return Extent(flat.schema.shapes[leaf], _width(flat.schema, leaf), source.nbytes, floating, self._box(flat, leaf, spot.part))

    def _source(self, spot: Spot) -> Source:
        flat, leaf = self._resolved(spot)
        return flat.held[leaf].parts[spot.part][1] if leaf in flat.held else flat.leaves[leaf]

    def _box(self, flat: Flat, leaf: int, part: int) -> Box | None:
        return flat.held[leaf].parts[part][0] if leaf in flat.held else None

    def _resolved(self, spot: Spot) -> tuple[Flat, int]:
        """An alias here may be none of the whole state: its bytes are those of the leaf it shares memory with."""
        flat = self._flats[spot.tree]
        alias = flat.schema.aliases[spot.leaf]
        return flat, spot.leaf if alias < 0 else alias


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


def _width(schema: Schema, leaf: int) -> int:
    return dtypes.width_of(schema.dtypes[leaf])
