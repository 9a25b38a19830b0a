"""Which chunks a box of a leaf needs, and where their bytes go: wanted boxes cut with held pieces, no I/O.

The destination is the wanted box's own row-major memory. A cell that lands there in one piece is read straight into place; any other is
read aside and copied range by range.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ckptstore.core.geometry import byte_ranges, grid, intersect, within
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId
from ckptstore.core.model import Box, LeafContent, Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of `raw_bytes`: `moves` are (start in chunk, start in destination, bytes); one move of the whole chunk is read in place."""

    chunk: ChunkId
    raw_bytes: int
    moves: tuple[tuple[int, int, int], ...]

    @property
    def in_place(self) -> bool:
        return len(self.moves) == 1 and self.moves[0][2] == self.raw_bytes


def whole(content: LeafContent, shape: Shape, width: int, chunk_bytes: int) -> Iterator[Piece]:
    """The pieces of a leaf that is held whole, wanted whole."""
    for i, (start, stop) in enumerate(grid(shape, width, chunk_bytes).spans()):
        yield Piece(_id(content, i), stop - start, ((0, start, stop - start),))


def select(content: LeafContent, shape: Shape, width: int, chunk_bytes: int, wanted: Box | None = None) -> Iterator[Piece]:
    """The pieces that `wanted` (the whole leaf without it) needs, each chunk once, in the order in which they are held."""
    full = Box((0,) * len(shape), shape)
    wanted = wanted or full
    if content.boxes is None and wanted == full:
        yield from whole(content, shape, width, chunk_bytes)
        return
    first = 0
    for held in content.boxes or (full,):
        cells = grid(shape, width, chunk_bytes, held)
        overlap = intersect(held, wanted)
        if overlap and len(cells):
            for i in range(*cells.covering(*_bounds(held, within(overlap, held), width))):
                cell = cells.cell(i)
                if shared := intersect(cell, wanted):
                    start, stop = cells.span(i)
                    yield Piece(_id(content, first + i), stop - start, tuple(_moves(cell, shared, wanted, width)))
        first += len(cells)


def _bounds(held: Box, overlap: Box, width: int) -> tuple[int, int]:
    """The first and the last byte of `overlap` in `held`'s memory, as a half-open range."""
    start = stop = 0
    stride = width
    for offset, length, extent in zip(reversed(overlap.offsets), reversed(overlap.lengths), reversed(held.lengths), strict=True):
        start += offset * stride
        stop += (offset + length - 1) * stride
        stride *= extent
    return start, stop + width


def _moves(cell: Box, shared: Box, wanted: Box, width: int) -> Iterator[tuple[int, int, int]]:
    source = byte_ranges(cell.lengths, within(shared, cell), width)
    target = byte_ranges(wanted.lengths, within(shared, wanted), width)
    a, b = next(source), next(target)
    while True:
        n = min(a[1] - a[0], b[1] - b[0])
        yield a[0], b[0], n
        a, b = (a[0] + n, a[1]), (b[0] + n, b[1])
        if a[0] == a[1]:
            following = next(source, None)
            if following is None:
                return
            a = following
        if b[0] == b[1]:
            b = next(target)


def _id(content: LeafContent, i: int) -> ChunkId:
    return ChunkId(content.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
