"""Which chunks does a box of a leaf need, and where do their bytes go? Plans only; no I/O.

The destination is the box's row-major memory. A cell that is contiguous there is read in place; any
other is read into scratch memory and copied range by range.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ckptstore.core.geometry import byte_ranges, grid, intersect, within
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId
from ckptstore.core.model import Box, LeafContent, Shape

_ELEMENTS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Element types, by width, that numpy copies bit for bit."""

Move: TypeAlias = tuple[int, int, int]
"""Start in the chunk, start in the destination, bytes."""


@dataclass(frozen=True, slots=True)
class Moves(Iterable[Move]):
    """The moves of a cell that is not contiguous in the destination. Computed on demand, since
    there may be one per row."""

    cell: Box
    shared: Box
    wanted: Box
    width: int

    def __iter__(self) -> Iterator[Move]:
        return _moves(self.cell, self.shared, self.wanted, self.width)

    def copy(self, data: memoryview, memory: memoryview) -> None:
        """Copy all ranges from the chunk to the destination's memory."""
        source = np.frombuffer(data, _ELEMENTS[self.width]).reshape(self.cell.lengths)
        target = np.frombuffer(memory, _ELEMENTS[self.width]).reshape(self.wanted.lengths)
        target[_indices(within(self.shared, self.wanted))] = source[
            _indices(within(self.shared, self.cell))
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of `raw_bytes` and its destination. With `at`, it is contiguous there and can be
    read in place."""

    chunk: ChunkId
    raw_bytes: int
    at: int | None
    moves: Iterable[Move]

    @property
    def in_place(self) -> bool:
        return self.at is not None

    def land(self, data: memoryview, memory: memoryview) -> None:
        """Copy the chunk's bytes to their place in the destination's memory."""
        if self.at is not None:
            memory[self.at : self.at + self.raw_bytes] = data
        elif isinstance(self.moves, Moves):
            self.moves.copy(data, memory)


def whole(content: LeafContent, shape: Shape, width: int, chunk_bytes: int) -> Iterator[Piece]:
    """The pieces of a whole leaf that was stored whole."""
    for i, (start, stop) in enumerate(grid(shape, width, chunk_bytes).spans()):
        yield _landing(_id(content, i), stop - start, start)


def select(
    content: LeafContent, shape: Shape, width: int, chunk_bytes: int, wanted: Box | None = None
) -> Iterator[Piece]:
    """The pieces that box `wanted`, by default the whole leaf, needs: each chunk once, in stored
    order."""
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
                    yield _piece(
                        _id(content, first + i), stop - start, Moves(cell, shared, wanted, width)
                    )
        first += len(cells)


def _piece(chunk: ChunkId, raw_bytes: int, moves: Moves) -> Piece:
    _, target, nbytes = next(iter(moves))
    return (
        _landing(chunk, raw_bytes, target)
        if nbytes == raw_bytes
        else Piece(chunk, raw_bytes, None, moves)
    )


def _landing(chunk: ChunkId, raw_bytes: int, at: int) -> Piece:
    return Piece(chunk, raw_bytes, at, ((0, at, raw_bytes),))


def _bounds(held: Box, overlap: Box, width: int) -> tuple[int, int]:
    """The first and the last byte of `overlap` in `held`'s memory, as a half-open range."""
    start = stop = 0
    stride = width
    for offset, length, extent in zip(
        reversed(overlap.offsets), reversed(overlap.lengths), reversed(held.lengths), strict=True
    ):
        start += offset * stride
        stop += (offset + length - 1) * stride
        stride *= extent
    return start, stop + width


def _moves(cell: Box, shared: Box, wanted: Box, width: int) -> Iterator[Move]:
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


def _indices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + length)
        for offset, length in zip(box.offsets, box.lengths, strict=True)
    )


def _id(content: LeafContent, i: int) -> ChunkId:
    return ChunkId(content.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
