"""Which chunks does a box of a leaf need, and where do their bytes go? Plans only; no I/O.

The destination is the box's row-major memory. A cell that is contiguous there is read in place; any
other is read into scratch memory and copied range by range.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptstore.core.geometry import Grid, byte_ranges, grid, intersect, within
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId
from ckptstore.core.model import Box, LeafContent, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ELEMENTS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Element types, by width, that numpy copies bit for bit."""


@dataclass(frozen=True, slots=True)
class Region:
    """The part `shared` of a cell, whose bytes are not contiguous in the memory of box `wanted`."""

    cell: Box
    shared: Box
    wanted: Box
    width: int

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Its half-open byte ranges in the destination."""
        return byte_ranges(self.wanted.lengths, within(self.shared, self.wanted), self.width)

    def copy(self, data: memoryview, memory: memoryview) -> None:
        """Copy it from the chunk to the destination's memory."""
        target = np.frombuffer(memory, _ELEMENTS[self.width]).reshape(self.wanted.lengths)
        target[_indices(within(self.shared, self.wanted))] = self._of(data)

    def parts(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Its bytes for each of `ranges`, with the start of the range."""
        together, at = memoryview(self._of(data).tobytes()), 0
        for start, stop in self.ranges():
            yield start, together[at : at + stop - start]
            at += stop - start

    def _of(self, data: memoryview) -> "NDArray[np.generic]":
        source = np.frombuffer(data, _ELEMENTS[self.width]).reshape(self.cell.lengths)
        found: NDArray[np.generic] = source[_indices(within(self.shared, self.cell))]
        return found


class ChunkTarget(NamedTuple):
    """One chunk of `raw_bytes` and its destination: either contiguous from byte `at` on, so that
    the chunk is read in place, or a region."""

    chunk: ChunkId
    raw_bytes: int
    at: int | None
    region: Region | None = None

    def land(self, data: memoryview, memory: memoryview) -> None:
        """Copy the chunk's bytes to their place in the destination's memory."""
        if self.region is not None:
            self.region.copy(data, memory)
        elif self.at is not None:
            memory[self.at : self.at + self.raw_bytes] = data

    def parts(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The chunk's bytes as contiguous parts of the destination, each with its start."""
        if self.region is not None:
            yield from self.region.parts(data)
        elif self.at is not None:
            yield self.at, data


def select(
    content: LeafContent,
    shape: Shape,
    width: int,
    chunk_bytes: int,
    wanted: Box | None = None,
    *,
    whole: Grid | None = None,
) -> Iterator[ChunkTarget]:
    """The pieces that box `wanted`, by default the whole leaf, needs: each chunk once, in stored
    order. A leaf that lies in a page is a piece without an id. `whole` is the grid of one held
    whole, if that is not a tensor's."""
    full = Box((0,) * len(shape), shape)
    wanted = wanted or full
    if content.boxes is None and wanted == full:
        for i, (start, stop) in enumerate((whole or grid(shape, width, chunk_bytes)).spans()):
            yield ChunkTarget(_id(content, i), stop - start, start)
        return
    first = 0
    for held in content.boxes or (full,):
        cells = whole or grid(shape, width, chunk_bytes, held)
        overlap = intersect(held, wanted)
        if overlap and len(cells):
            for i in range(*cells.covering(*_bounds(held, within(overlap, held), width))):
                cell = cells.cell(i)
                if shared := intersect(cell, wanted):
                    start, stop = cells.span(i)
                    region = Region(cell, shared, wanted, width)
                    yield _piece(_id(content, first + i), stop - start, region)
        first += len(cells)


def _piece(chunk: ChunkId, raw_bytes: int, region: Region) -> ChunkTarget:
    start, stop = next(region.ranges())
    if stop - start == raw_bytes:
        return ChunkTarget(chunk, raw_bytes, start)
    return ChunkTarget(chunk, raw_bytes, None, region)


def _bounds(held: Box, overlap: Box, width: int) -> tuple[int, int]:
    """The first and the last byte of `overlap` in `held`'s memory, as a half-open range."""
    if not held.lengths:
        return 0, width
    last = tuple(part.stop - 1 for part in _indices(overlap))
    first, stop = (np.ravel_multi_index(cell, held.lengths) for cell in (overlap.offsets, last))
    return int(first) * width, int(stop) * width + width


def _indices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + length)
        for offset, length in zip(box.offsets, box.lengths, strict=True)
    )


def _id(content: LeafContent, i: int) -> ChunkId:
    return ChunkId(content.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
