"""The chunks of a leaf held in boxes have the same bytes as those of the leaf held whole, each
once.
"""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.geometry import byte_ranges, grid
from ckptstore.core.model import Box
from ckptstore.core.tiling import Tiling, misfit, tile
from ckptstore.state.shards import Cut, rank_part

CHUNK = 64 << 10
WIDTH = 4


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape of some cells, and the boxes of a mesh that divides it."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 90_000)),
            st.tuples(st.integers(1, 400), st.integers(1, 300)),
            st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 900)),
        )
    )
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    cuts = [
        (draw(st.integers(0, len(shape) - 1)), parts, draw(st.integers(1, 3))) for parts in mesh
    ]
    boxes = set()
    for at in product(*(range(parts) for parts in mesh)):
        part = rank_part(
            shape,
            [Cut(dim, parts, i, factor) for (dim, parts, factor), i in zip(cuts, at, strict=True)],
        )
        boxes |= set(part.boxes)
    return shape, sorted(boxes)


def part_of(data: bytes, shape: tuple[int, ...], box: Box) -> bytes:
    return b"".join(data[start:stop] for start, stop in byte_ranges(shape, box, WIDTH))


def chunk_boxes(shape: tuple[int, ...], boxes: list[Box], tiling: Tiling) -> dict[int, list[Box]]:
    """The boxes of each chunk."""
    grids = [grid(shape, WIDTH, CHUNK, box) for box in boxes]
    found: dict[int, list[Box]] = {}
    for span in tiling.spans:
        for i in range(span.first, span.stop):
            assert span.chunk + i - span.first not in found
            found[span.chunk + i - span.first] = [grids[span.box].cell(i)]
    for cell in tiling.cells:
        assert cell.chunk not in found
        found[cell.chunk] = [grids[each.box].cell(each.cell) for each in cell.fragments]
    return found


@given(shards())
def test_chunks_of_boxes_that_keep_the_rows_whole_are_those_of_the_whole_leaf(
    layout: tuple,
) -> None:
    shape, boxes = layout
    assert misfit(shape, boxes) is None
    tiling = tile(shape, WIDTH, CHUNK, boxes)
    found = chunk_boxes(shape, boxes, tiling)
    assert sorted(found) == list(range(tiling.chunks))
    whole = grid(shape, WIDTH, CHUNK)
    if not tiling.whole:
        assert len(whole) > 1 and any(
            box.lengths[whole.dim + 1 :] != shape[whole.dim + 1 :] for box in boxes
        )
        return
    data = np.arange(prod(shape), dtype="<u4").tobytes()
    for i in range(tiling.chunks):
        start, stop = whole.span(i)
        assert sum(prod(box.lengths) for box in found[i]) * WIDTH == stop - start
        if len(whole) > 1:  # rows of one chunk are adjacent
            assert (
                b"".join(part_of(data, shape, box) for box in sorted(found[i])) == data[start:stop]
            )


@given(shards())
def test_without_canonical_each_box_is_cut_by_itself(layout: tuple) -> None:
    shape, boxes = layout
    tiling = tile(shape, WIDTH, CHUNK, boxes, canonical=False)
    assert tiling.whole == (len(boxes) == 1) and not tiling.cells
    assert tiling.chunks == sum(len(grid(shape, WIDTH, CHUNK, box)) for box in boxes)


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([Box((0, 0), (4, 4)), Box((3, 0), (5, 4))], "overlap"),
        ([Box((0, 0), (4, 4)), Box((5, 0), (3, 4))], "28 of 32"),
        ([Box((0, 0), (4, 2)), Box((0, 2), (4, 2)), Box((2, 0), (6, 4))], "overlap"),
        ([Box((0, 0), (4, 4)), Box((4, 0), (5, 4))], "outside"),
        ([], "0 of 32"),
    ],
)
def test_boxes_that_do_not_tile_are_told_apart(boxes: list[Box], why: str) -> None:
    assert why in (misfit((8, 4), boxes) or "")


def test_the_rows_of_an_embedding_on_four_ranks_cut_three_cells() -> None:
    shape = (50257, 768)
    boxes = sorted(box for i in range(4) for box in rank_part(shape, [Cut(0, 4, i)]).boxes)
    tiling = tile(shape, 4, 1 << 20, boxes)
    assert tiling.whole and len(tiling.cells) == 3 and len(tiling.spans) == 4
