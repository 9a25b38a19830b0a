"""The bytes of files as sources of leaves: ranges read on demand, so that memory stays bounded."""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.files import transfer
from ckptstore.plugin.leaves import Source, StagedSource
from ckptstore.plugin.model import (
    CHUNK_BYTES,
    Box,
    Shape,
    byte_ranges,
    grid,
    intersect,
    nbytes_of,
    within,
)
from ckptstore.plugin.tiling import misfit
from ckptstore.plugins.foreign.strides import gather, span_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: torch's dtype and shape, its byte range after the header, and, in a DCP shard, its
    position in the global tensor.
    """

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int
    saved_offsets: Shape | None = None
    strides: Shape | None = None
    """Where its elements lie (`foreign.strides`), if not row by row."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file, with what lies between its elements."""
        if self.strides is None:
            return nbytes_of(self.dtype, self.shape)
        return span_bytes(self.dtype, self.shape, self.strides)

    @property
    def box(self) -> Box:
        """The box in its global tensor; the whole tensor if it is not a shard."""
        return Box(self.saved_offsets or (0,) * len(self.shape), self.shape)


ReadRange: TypeAlias = Callable[[int, memoryview], None]


class Window(io.RawIOBase):
    """`size` bytes of a file from `start` on, as a file of their own. `read` fills memory with the
    bytes of the file from an offset on."""

    def __init__(self, read: ReadRange, start: int, size: int) -> None:
        super().__init__()
        self._read, self._start, self._position = read, start, 0
        self.size = size

    def reader(self) -> io.BufferedReader:
        """The window from its beginning, read ahead."""
        return io.BufferedReader(Window(self._read, self._start, self.size), 1 << 16)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"offset {base + offset} lies before the file")
        self._position = base + offset
        return self._position

    def readinto(self, out: Any) -> int:
        nbytes = max(self.size - self._position, 0)
        # Released even if the read fails: its error must not keep the caller's memory in use.
        with memoryview(out).cast("B") as memory, memory[:nbytes] as here:
            if len(here):
                self._read(self._start + self._position, here)
                self._position += len(here)
            return len(here)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes `offset:offset + nbytes`. Raises `ValueError` if they do not lie in the window."""
        data = bytearray(self.part(offset, nbytes).size)
        self._read(self._start + offset, memoryview(data))
        return bytes(data)

    def part(self, offset: int, nbytes: int) -> "Window":
        """A window on a part of this one. Raises `ValueError` if it does not lie in it."""
        if min(offset, nbytes) < 0 or offset + nbytes > self.size:
            raise ValueError(f"{nbytes} bytes at {offset} are not in {self.size} bytes")
        return Window(self._read, self._start + offset, nbytes)


class FileRange(StagedSource):
    """`nbytes` bytes of a file from `offset` on."""

    __slots__ = ("_offset", "_path")

    def __init__(self, path: Path, offset: int, nbytes: int, width: int = 1) -> None:
        super().__init__(nbytes, width)
        self._path, self._offset = path, offset

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        read_range(self._path, self._offset + start, out[: stop - start])


class Strided(StagedSource):
    """The elements of a tensor with strides, row by row, out of the bytes `span` that it takes in
    its file."""

    __slots__ = ("_entry", "_span")

    def __init__(self, span: Source, entry: Entry) -> None:
        super().__init__(nbytes_of(entry.dtype, entry.shape), span.width)
        self._span, self._entry = span, entry

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        entry, span = self._entry, memoryview(bytearray(self._span.nbytes))
        assert entry.strides is not None
        self._span.stage(0, len(span), span)
        out[: stop - start] = gather(entry.dtype, entry.shape, entry.strides, span)[start:stop]


class Joined(StagedSource):
    """A tensor of `shape` made of boxes that tile it; each box has its own source. Bytes are put
    together cell by cell of the grid that cuts chunks of the default size."""

    __slots__ = ("_grid", "_pieces")

    def __init__(self, shape: Shape, width: int, pieces: Sequence[tuple[Box, Source]]) -> None:
        super().__init__(width * prod(shape), width)
        self._grid, self._pieces = grid(shape, width, CHUNK_BYTES), pieces

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        if start == stop:
            return
        for i in range(*self._grid.covering(start, stop)):
            first, end = self._grid.span(i)
            cell = self._cell(self._grid.cell(i))
            place = slice(max(first - start, 0), min(end, stop) - start)
            out[place] = cell[max(start - first, 0) : stop - first]

    def _cell(self, cell: Box) -> memoryview:
        """The bytes of one cell of the grid, from the boxes that it overlaps."""
        import numpy as np

        joined = np.empty((*cell.lengths, self.width), np.uint8)
        for box, source in self._pieces:
            if shared := intersect(box, cell):
                # All later dimensions are whole, so the cell's overlap with a box is one range of
                # the box's bytes.
                ((begin, end),) = byte_ranges(box.lengths, within(shared, box), self.width)
                data = np.empty((*shared.lengths, self.width), np.uint8)
                source.stage(begin, end, data.reshape(-1).data)
                joined[within(shared, cell).slices] = data
        return joined.reshape(-1).data


def read_range(path: Path, offset: int, out: memoryview) -> None:
    """Fill `out` from byte `offset` of a file. Raises `Unavailable` if the file is shorter or
    cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            if missing := transfer(os.preadv, file.fileno(), offset, [out]):
                raise Unavailable(
                    f"{path} ends at byte {offset + len(out) - missing}; wanted {missing} more: it "
                    "changed while it was read"
                )
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error}") from error


def shape_around(boxes: Iterable[Box]) -> Shape:
    """The shape of the tensor that `boxes` make up."""
    ends = (map(sum, zip(*box, strict=True)) for box in boxes)
    return tuple(map(max, zip(*ends, strict=True)))


def check_tiling(where: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise `InvalidInput` unless the boxes tile a tensor of `shape` exactly once."""
    if any(len(box.offsets) != len(shape) or len(box.lengths) != len(shape) for box in boxes):
        problem: str | None = "a piece has other dimensions"
    else:
        problem = misfit(shape, [box for box in boxes if prod(box.lengths)])
    if problem:
        raise InvalidInput(
            f"{where}: the stored pieces do not make up {list(shape)}, each element once: {problem}"
        )
