"""How do the boxes that ranks hold of one leaf become its chunks? Pure.

Some cells lie whole in one box; others are cut by box edges, and one rank assembles them. If the
boxes keep all dimensions after the grid's own, the leaf is cut as if it were held whole, so its
chunks do not depend on the number of ranks. Boxes that divide the dimensions after it are cut one
by one (docs/format.md §3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ckptstore.core.geometry import Grid, grid, intersect
from ckptstore.core.model import Box, Shape


class Span(NamedTuple):
    """Cells `first:stop` of box `box`'s own grid, which are the leaf's chunks from number `chunk`
    on.
    """

    box: int
    first: int
    stop: int
    chunk: int


class Fragment(NamedTuple):
    """Cell `cell` of box `box`'s own grid: a part of a chunk."""

    box: int
    cell: int


class Cell(NamedTuple):
    """Chunk number `chunk` of the leaf, with bytes in several boxes."""

    chunk: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """The chunks of a leaf: each of `spans` lies in one box, each of `cells` in several. With
    `whole`, the leaf is cut as if it were held whole; otherwise each box is cut alone, in order.
    """

    whole: bool
    chunks: int
    spans: tuple[Span, ...]
    cells: tuple[Cell, ...]


def misfit(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not tile a tensor of `shape` exactly once; None if they do."""
    held, wanted = sum(prod(box.lengths) for box in boxes), prod(shape)
    whole = Box.whole(shape)
    if any(0 not in box.lengths and intersect(box, whole) != box for box in boxes):
        return f"a box lies outside the shape {list(shape)}"
    if clash := next(overlapping(boxes), None):
        return f"{_text(clash[0])} and {_text(clash[1])} overlap"
    if held != wanted:
        return f"the boxes hold {held:,} of {wanted:,} elements"
    return None


def tile(
    shape: Shape, width: int, chunk_bytes: int, boxes: Sequence[Box], *, canonical: bool = True
) -> Tiling:
    """The chunks of a leaf of `shape` that `boxes` tile. Without `canonical`, every box is cut on
    its own.
    """
    whole = grid(shape, width, chunk_bytes)
    if len(boxes) == 1 or (
        canonical
        and (len(whole) <= 1 or all(_spans_behind(box, shape, whole.dim) for box in boxes))
    ):
        return _tile_whole(whole, [grid(shape, width, chunk_bytes, box) for box in boxes])
    spans, chunk = [], 0
    for i, box in enumerate(boxes):
        cells = len(grid(shape, width, chunk_bytes, box))
        spans.append(Span(i, 0, cells, chunk))
        chunk += cells
    return Tiling(False, chunk, tuple(spans), ())


def _spans_behind(box: Box, shape: Shape, dim: int) -> bool:
    return box.lengths[dim + 1 :] == shape[dim + 1 :]


def _tile_whole(whole: Grid, grids: Sequence[Grid]) -> Tiling:
    if len(grids) == 1:
        return Tiling(True, len(whole), (Span(0, 0, len(whole), 0),), ())
    spans: list[Span] = []
    cut: dict[int, list[Fragment]] = {}
    if len(whole) == 1:
        return Tiling(True, 1, (), (Cell(0, tuple(Fragment(i, 0) for i in range(len(grids)))),))
    for i, held in enumerate(grids):
        for first, stop, chunk, complete in _rows(whole, held):
            if not complete:
                cut.setdefault(chunk, []).append(Fragment(i, first))
            elif (
                spans
                and spans[-1].box == i
                and spans[-1].stop == first
                and spans[-1].chunk + first - spans[-1].first == chunk
            ):
                spans[-1] = spans[-1]._replace(stop=stop)
            else:
                spans.append(Span(i, first, stop, chunk))
    return Tiling(
        True,
        len(whole),
        tuple(spans),
        tuple(Cell(chunk, tuple(found)) for chunk, found in sorted(cut.items())),
    )


def _rows(whole: Grid, held: Grid) -> Iterator[tuple[int, int, int, bool]]:
    """Ranges of `held`'s cells within one index before the grid's dimension, the chunk number of
    the first, and whether each cell equals one of `whole`.
    """
    dim, rows, size = whole.dim, whole.rows, whole.box.lengths[whole.dim]
    start = held.box.offsets[dim]
    stop = start + held.box.lengths[dim]
    lines = -(-size // rows)
    first_line, last_line = start // rows, (stop - 1) // rows
    low = first_line + (start % rows != 0)
    high = last_line + (stop % rows == 0 or stop == size)
    per_prefix = last_line - first_line + 1
    # By each index before the grid's dimension, the number of its first chunk.
    bases = np.arange(0, lines * prod(prefix := whole.box.lengths[:dim]), lines).reshape(prefix)
    for i, base in enumerate(bases[held.box.slices[:dim]].ravel().tolist()):
        at = i * per_prefix - first_line
        if low > first_line:
            yield at + first_line, at + first_line + 1, base + first_line, False
        if low < high:
            yield at + low, at + high, base + low, True
        if high <= last_line and last_line >= low:
            yield at + last_line, at + last_line + 1, base + last_line, False


def overlapping(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of `boxes` that share an element. A box is compared only with those that it meets in
    the dimension with the most cuts.
    """
    dims = range(len(boxes[0].offsets)) if boxes else range(0)
    if not dims:
        return
    dim = max(dims, key=lambda i: len({box.offsets[i] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offsets[dim])
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.offsets[dim] >= a.offsets[dim] + a.lengths[dim]:
                break
            if intersect(a, b):
                yield a, b


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{each.start}:{each.stop}" for each in box.slices) + "]"
