"""Which bytes of a rank's boxes are sent where? Pure.

The plan is a rank's task with all geometry computed, to the byte. It holds as long as the task
does, so a commit like the last one moves bytes and computes nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple

from ckptstore.commit.plan import CommitPlan, Extent
from ckptstore.core import geometry
from ckptstore.core.geometry import Grid, byte_ranges, grid, within
from ckptstore.distributed.rank_plan import CellTask, Completing, LeafRef, RankTask, SendTask
from ckptstore.state.leaf_sources import FlatState, Source


class ByteRange(NamedTuple):
    """Bytes `start:stop` of a box's own memory."""

    part: int
    start: int
    stop: int


class Outgoing(NamedTuple):
    """A byte range of a leaf to send."""

    tree: int
    leaf: int
    byte_range: ByteRange


class Incoming(NamedTuple):
    """A part of a chunk: a byte range of this rank, or the next `nbytes` that `rank` sends. It
    fills `ranges` of the chunk, in order.
    """

    rank: int
    own: ByteRange | None
    nbytes: int
    ranges: tuple[tuple[int, int], ...]


class Assembly(NamedTuple):
    """The parts of a chunk that this rank assembles."""

    extent: Extent
    parts: tuple[Incoming, ...]


class Completion(NamedTuple):
    """A chunk of a leaf that this rank assembles."""

    tree: int
    leaf: int
    how: Assembly


@dataclass(frozen=True, slots=True)
class Window:
    """What is in transfer at a time: the concatenated byte ranges to each rank, and the number of
    bytes from each rank.
    """

    outgoing: tuple[tuple[int, tuple[Outgoing, ...]], ...]
    incoming: tuple[tuple[int, int], ...]
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """The exchange, window by window, and the extents of the task's jobs. `plan` caches plans made
    of these extents.
    """

    windows: tuple[Window, ...]
    jobs: tuple[Extent, ...]
    _plans: dict[Hashable, CommitPlan] = field(default_factory=dict)

    def plan(self, of: Hashable, make: Callable[[], CommitPlan]) -> CommitPlan:
        if of not in self._plans:
            self._plans[of] = make()
        return self._plans[of]


class Boxes:
    """A rank's part of the state, box by box."""

    def __init__(self, flats: Sequence[FlatState], chunk_bytes: int) -> None:
        self._flats, self._chunk_bytes = flats, chunk_bytes

    def source(self, ref: LeafRef) -> Source:
        flat, leaf = self.resolved(ref)
        return flat.held[leaf].parts[ref.part][1] if leaf in flat.held else flat.leaves[leaf]

    def extent(self, ref: LeafRef) -> Extent:
        """The extent of a whole box."""
        flat, leaf = self.resolved(ref)
        source = self.source(ref)
        if flat.schema.kinds[leaf] != "tensor":
            return Extent((source.nbytes,), 1, source.nbytes, False)
        dtype = flat.schema.dtypes[leaf]
        box = flat.held[leaf].parts[ref.part][0] if leaf in flat.held else None
        return Extent(
            flat.schema.shapes[leaf],
            geometry.width_of(dtype),
            source.nbytes,
            dtype.startswith(("float", "bfloat")),
            box,
        )

    def cells(self, ref: LeafRef, first: int, stop: int) -> Extent:
        """Cells `first:stop` of a box."""
        extent = self.extent(ref)
        cells = self._grid(extent)
        return extent._replace(
            cells=(first, stop), raw_bytes=cells.span(stop - 1)[1] - cells.span(first)[0]
        )

    def pieces(self, ref: LeafRef) -> list[LeafRef]:
        """All boxes of a leaf."""
        flat, leaf = self.resolved(ref)
        return (
            [LeafRef(ref.tree, ref.leaf, part) for part in range(len(flat.held[leaf].parts))]
            if leaf in flat.held
            else [ref]
        )

    def global_bytes(self, ref: LeafRef) -> int:
        """Raw bytes of the whole leaf, on all ranks."""
        flat, leaf = self.resolved(ref)
        if leaf not in flat.held:
            return flat.leaves[leaf].nbytes
        return geometry.width_of(flat.schema.dtypes[leaf]) * prod(flat.schema.shapes[leaf])

    def resolved(self, ref: LeafRef) -> tuple[FlatState, int]:
        """The leaf with the bytes: an alias on this rank may be no alias in the whole state, so it
        resolves to the leaf it shares memory with.
        """
        flat = self._flats[ref.tree]
        alias = flat.schema.aliases[ref.leaf]
        return flat, ref.leaf if alias < 0 else alias

    def byte_range(self, ref: LeafRef, cell: int) -> ByteRange:
        return ByteRange(ref.part, *self._grid(self.extent(ref)).span(cell))

    def assembly(self, tree: int, leaf: int, how: Completing, rank: int) -> Assembly:
        """What rank `rank` has to assemble for a cell of a leaf."""
        extent = self.extent(LeafRef(tree, leaf, how.part))
        cell = grid(extent.shape, extent.width, self._chunk_bytes).cell(how.chunk)
        alone = len(how.fragments) == 1
        parts = []
        for fragment in how.fragments:
            own = (
                self.byte_range(LeafRef(tree, leaf, fragment.part), fragment.cell)
                if fragment.rank == rank
                else None
            )
            nbytes = extent.width * prod(fragment.box.lengths)
            # Most fragments are contiguous; columns of a small leaf are not.
            ranges = (
                ((0, nbytes),)
                if alone
                else tuple(byte_ranges(cell.lengths, within(fragment.box, cell), extent.width))
            )
            parts.append(Incoming(fragment.rank, own, nbytes, ranges))
        nbytes = sum(part.nbytes for part in parts)
        return Assembly(
            Extent((nbytes // extent.width,), extent.width, nbytes, extent.floating), tuple(parts)
        )

    def _grid(self, extent: Extent) -> Grid:
        return grid(extent.shape, extent.width, self._chunk_bytes, extent.box)


def moves_of(task: RankTask, boxes: Boxes, rank: int) -> Moves:
    """The moves of rank `rank`, computed once for leaves that share a plan."""
    sends = {window: list(found) for window, found in groupby(task.sends, lambda send: send.window)}
    cells = {window: list(found) for window, found in groupby(task.cells, lambda cell: cell.window)}
    ranges: dict[int, ByteRange] = {}
    assemblies: dict[int, Assembly] = {}

    def outgoing(send: SendTask) -> Outgoing:
        _, tree, leaf, how = send
        if id(how) not in ranges:
            ranges[id(how)] = boxes.byte_range(LeafRef(tree, leaf, how.part), how.cell)
        return Outgoing(tree, leaf, ranges[id(how)])

    def completion(cell: CellTask) -> Completion:
        _, tree, leaf, how = cell
        if id(how) not in assemblies:
            assemblies[id(how)] = boxes.assembly(tree, leaf, how, rank)
        return Completion(tree, leaf, assemblies[id(how)])

    def window(number: int) -> Window:
        to: dict[int, list[Outgoing]] = {}
        for send in sends.get(number, ()):
            to.setdefault(send.how.to, []).append(outgoing(send))
        completions = tuple(map(completion, cells.get(number, ())))
        return Window(
            tuple((to_rank, tuple(found)) for to_rank, found in sorted(to.items())),
            _incoming(completions),
            completions,
        )

    windows = tuple(map(window, sorted(sends.keys() | cells.keys())))
    return Moves(windows, tuple(boxes.cells(job.ref, job.first, job.stop) for job in task.jobs))


def _incoming(completions: Sequence[Completion]) -> tuple[tuple[int, int], ...]:
    """The number of bytes from each rank."""
    incoming: dict[int, int] = {}
    for _, _, how in completions:
        for rank, own, nbytes, _ in how.parts:
            if own is None:
                incoming[rank] = incoming.get(rank, 0) + nbytes
    return tuple(sorted(incoming.items()))
