"""Where is a tensor cut into chunks, given its global shape and element width (docs/format.md
§3)?

Every holder cuts the same tensor in the same way. So the same state gives the same chunk ids from
any number of ranks, if shard edges lie on the grid's lines.

Element widths are listed by torch's dtype names without `torch.`, for code that does not import
torch. A sub-byte or packed dtype counts as torch stores it: one byte per stored element.
Quantized tensors are stored as their integers (docs/values.md).
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from ckptstore.core.model import Box, Shape
from ckptstore.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of one box: `rows` indices of dimension `dim` per cell, `suffix` bytes per index.

    Cell `i` of a box held contiguously in memory is the bytes `span(i)` of that memory.
    """

    box: Box
    dim: int
    rows: int
    suffix: int
    _prefixes: int
    _per_prefix: int

    def __len__(self) -> int:
        return self._prefixes * self._per_prefix

    def span(self, i: int) -> tuple[int, int]:
        """The half-open byte range of cell `i` in the box's own row-major memory."""
        start, stop = self._row_range(i % self._per_prefix)
        base = (i // self._per_prefix) * self.box.lengths[self.dim] if self.box.lengths else 0
        return (base + start) * self.suffix, (base + stop) * self.suffix

    def cell(self, i: int) -> Box:
        """Cell `i` as a box in global indices."""
        if not self.box.lengths:
            return self.box
        start, stop = self._row_range(i % self._per_prefix)
        before = _unravel(i // self._per_prefix, self.box, self.dim)
        first = self.box.offsets[self.dim] + start
        return Box(
            (*before, first, *self.box.offsets[self.dim + 1 :]),
            (*(1 for _ in before), stop - start, *self.box.lengths[self.dim + 1 :]),
        )

    def covering(self, start: int, stop: int) -> tuple[int, int]:
        """The half-open range of cells that hold any of the bytes `start:stop` of the box's memory;
        `start < stop`."""
        return self._cell_at(start), self._cell_at(stop - 1) + 1

    def spans(self) -> Iterator[tuple[int, int]]:
        """Every cell's `span`, in order."""
        stop = 0
        # All rows of cells but the first and the last are whole.
        ends = [
            (b - a) * self.suffix
            for a, b in map(self._row_range, sorted({0, self._per_prefix - 1}))
        ]
        rows = [*ends[:1], *[self.rows * self.suffix] * (self._per_prefix - 2), *ends[1:]]
        for _ in range(self._prefixes):
            for nbytes in rows:
                start, stop = stop, stop + nbytes
                yield start, stop

    def _row_range(self, j: int) -> tuple[int, int]:
        if not self.box.lengths:
            return 0, 1
        offset, length = self.box.offsets[self.dim], self.box.lengths[self.dim]
        line = (offset // self.rows + j) * self.rows - offset
        return max(line, 0), min(line + self.rows, length)

    def _cell_at(self, byte: int) -> int:
        if not self.box.lengths:
            return 0
        offset, length = self.box.offsets[self.dim], self.box.lengths[self.dim]
        prefix, row = divmod(byte // self.suffix, length)
        return prefix * self._per_prefix + (offset + row) // self.rows - offset // self.rows


def grid(shape: Shape, width: int, chunk_bytes: int, box: Box | None = None) -> Grid:
    """The grid of `box` of a tensor of `shape` with `width` bytes per element; of the whole
    tensor without `box`."""
    box = box or Box.whole(shape)
    lengths = box.lengths
    if not lengths:
        return Grid(box, 0, 1, width, 1, 1)
    if 0 in lengths:
        return Grid(box, 0, 1, width, 0, 0)
    dim = next(i for i in range(len(shape)) if width * prod(shape[i + 1 :]) <= chunk_bytes)
    suffix = width * prod(lengths[dim + 1 :])
    rows = 1 << ((chunk_bytes // suffix).bit_length() - 1)
    first, last = box.offsets[dim] // rows, (box.offsets[dim] + lengths[dim] - 1) // rows
    return Grid(box, dim, rows, suffix, prod(lengths[:dim]), last - first + 1)


@dataclass(frozen=True, slots=True)
class _TaperedGrid(Grid):
    """The cells of bytes, cell `i` being `cuts[i]:cuts[i + 1]`."""

    cuts: tuple[int, ...]

    def spans(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.cuts)

    def _row_range(self, j: int) -> tuple[int, int]:
        return self.cuts[j], self.cuts[j + 1]

    def _cell_at(self, byte: int) -> int:
        return bisect_right(self.cuts, byte) - 1


TAPERED_BYTES_MIN = 4 << 10
"""Bytes that grow are one chunk up to this size."""


def _tapered_cells(nbytes: int, chunk_bytes: int) -> int:
    """How many cells `tapered_grid` has."""
    cells, left, size = 0, nbytes, chunk_bytes
    while size >= TAPERED_BYTES_MIN >> 2 and nbytes > TAPERED_BYTES_MIN:
        cells, left, size = cells + left // size, left % size, size >> 2
    return cells + bool(left)


def tapered_grid(nbytes: int, chunk_bytes: int) -> Grid:
    """The grid of bytes that grow at their end: chunks of `chunk_bytes`, and then as many as fit of
    a quarter of that, and so on, down to one below 1 KiB. So what is appended changes few bytes'
    chunks, and there are few chunks."""
    cuts, size = [0], chunk_bytes
    while size >= TAPERED_BYTES_MIN >> 2 and nbytes > TAPERED_BYTES_MIN:
        cuts += range(cuts[-1] + size, nbytes + 1, size)
        size >>= 2
    if cuts[-1] < nbytes:
        cuts.append(nbytes)
    return _TaperedGrid(Box.whole((nbytes,)), 0, chunk_bytes, 1, 1, len(cuts) - 1, tuple(cuts))


def grid_of_bytes(nbytes: int, chunk_bytes: int, chunks: int) -> Grid:
    """The grid of a leaf that is no tensor, which is stored as so many chunks: more of them than
    the grid of a tensor has cells are those of a tapered one. Where both have as many, they are
    cut alike."""
    even = grid((nbytes,), 1, chunk_bytes)
    if len(even) != chunks and _tapered_cells(nbytes, chunk_bytes) == chunks:
        return tapered_grid(nbytes, chunk_bytes)
    return even  # of a number that is none of the two, readers say what is wrong


def byte_ranges(outer: Shape, inner: Box, width: int) -> Iterator[tuple[int, int]]:
    """The half-open byte ranges of box `inner` in the row-major memory of a tensor of shape
    `outer`, in order, each as long as possible."""
    if 0 in inner.lengths:
        return
    whole = len(outer)
    while whole and inner.lengths[whole - 1] == outer[whole - 1]:
        whole -= 1
    if not whole:
        yield 0, width * prod(outer)
        return
    steps = []
    for i in range(whole):
        stride, offset = width * prod(outer[i + 1 :]), inner.offsets[i]
        steps.append(range(offset * stride, (offset + inner.lengths[i]) * stride, stride))
    run = steps.pop()
    for before in product(*steps):
        start = sum(before)
        yield start + run.start, start + run.stop


def intersect(a: Box, b: Box) -> Box | None:
    """The box that `a` and `b` share, or None."""
    spans = [(max(x, y), min(x + n, y + m)) for x, n, y, m in a.beside(b)]
    if any(start >= stop for start, stop in spans):
        return None
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


def within(inner: Box, outer: Box) -> Box:
    """`inner` in the indices of `outer`."""
    return Box(tuple(x - y for x, _, y, _ in inner.beside(outer)), inner.lengths)


def box_of_region(shape: Shape, region: tuple[slice | int, ...]) -> tuple[Box, Shape]:
    """The box that `region` names in a tensor of `shape`, and the shape of the result (integers
    drop their dimension).

    Raises ValueError for more dimensions than `shape` has, for a step other than 1, and IndexError
    for an integer out of range.
    """
    if len(region) > len(shape):
        raise ValueError(f"a region of {len(region)} dimensions for a tensor of shape {shape}")
    offsets, lengths, result = [], [], []
    for i, n in enumerate(shape):
        part = region[i] if i < len(region) else slice(None)
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise ValueError(f"step {step} in dimension {i}; only whole ranges can be read")
            length = max(stop - start, 0)
            result.append(length)
        else:
            if not -n <= part < n:
                raise IndexError(f"index {part} is out of range for dimension {i} of {n}")
            start, length = part % n, 1
        offsets.append(start)
        lengths.append(length)
    return Box(tuple(offsets), tuple(lengths)), tuple(result)


def _unravel(i: int, box: Box, dim: int) -> Shape:
    """Index number `i` of the dimensions of `box` before `dim`, in those of the tensor."""
    index = []
    for offset, length in reversed(list(zip(*box, strict=True))[:dim]):
        i, r = divmod(i, length)
        index.append(offset + r)
    return tuple(reversed(index))


_NAMES = {
    1: "bool uint8 int8 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 "
    "int7 bits8 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32 bcomplex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
WIDTHS: dict[str, int] = {name: width for width, names in _NAMES.items() for name in names.split()}


def width_of(dtype: str) -> int:
    """Bytes per element. Raises `Corrupt` for a dtype that this version does not know."""
    try:
        return WIDTHS[dtype]
    except KeyError:
        raise Corrupt(
            f"unknown dtype {dtype!r}: the commit is damaged or was written by a newer ckptstore; "
            "run `ckptstore fsck`"
        ) from None


def nbytes_of(dtype: str, shape: Shape) -> int:
    """Raw bytes of a tensor."""
    return width_of(dtype) * prod(shape)
