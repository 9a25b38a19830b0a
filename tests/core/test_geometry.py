"""The chunk grid: where tensors are cut, and that shards on its lines are cut alike."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.geometry import (
    Grid,
    box_of_region,
    byte_ranges,
    grid,
    grid_of_bytes,
    intersect,
    tapered_grid,
    within,
)
from ckptstore.core.ids import digest
from ckptstore.core.model import Box, LeafContent
from ckptstore.objects.pages import split_pages

CHUNK = 64 << 10

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
big_shapes = st.one_of(
    st.tuples(st.integers(1, 3000), st.integers(1, 600)),
    st.tuples(st.integers(1, 200_000)),
    st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 3000)),
)


@given(big_shapes, st.sampled_from([1, 2, 4, 8]))
def test_the_cells_of_a_tensor_tile_its_bytes_in_order(shape: tuple[int, ...], width: int) -> None:
    cells = grid(shape, width, CHUNK)
    spans = list(cells.spans())
    assert spans[0][0] == 0 and spans[-1][1] == width * prod(shape)
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(0 < stop - start <= CHUNK for start, stop in spans)


@given(big_shapes, st.sampled_from([1, 2, 4, 8]))
def test_a_cell_in_global_indices_names_the_same_bytes(shape: tuple[int, ...], width: int) -> None:
    cells = grid(shape, width, CHUNK)
    for i in {0, len(cells) // 2, len(cells) - 1}:
        assert list(byte_ranges(shape, cells.cell(i), width)) == [cells.span(i)]


@given(st.integers(1, 1 << 20) | st.integers(1, 10_000), st.data())
def test_what_is_appended_to_bytes_that_grow_changes_few_cells(
    nbytes: int, data: st.DataObject
) -> None:
    cells = tapered_grid(nbytes, CHUNK)
    spans = list(cells.spans())
    assert [cells.span(i) for i in range(len(cells))] == spans
    assert spans[0][0] == 0 and spans[-1][1] == nbytes and len(spans) <= nbytes // CHUNK + 3 * 3 + 1
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert all(0 < stop - start <= CHUNK for start, stop in spans)
    at = data.draw(st.integers(0, nbytes - 1))
    first, stop = cells.covering(at, at + 1)
    assert stop == first + 1 and spans[first][0] <= at < spans[first][1]
    for i in {0, len(cells) // 2, len(cells) - 1}:
        assert list(byte_ranges((nbytes,), cells.cell(i), 1)) == [cells.span(i)]
    assert list(grid_of_bytes(nbytes, CHUNK, len(cells)).spans()) == spans
    even = grid((nbytes,), 1, CHUNK)
    assert list(grid_of_bytes(nbytes, CHUNK, len(even)).spans()) == list(even.spans())


def test_bytes_that_grow_by_little_rewrite_little() -> None:
    known, written, entry = set[tuple[int, int]](), list[int](), 80
    for nbytes in range(1 << 20, (1 << 20) + 1000 * entry, entry):
        spans = set(tapered_grid(nbytes, 1 << 20).spans())
        written.append(sum(stop - start for start, stop in spans - known))
        known = spans
    steps = sorted(written[1:])
    assert steps[len(steps) // 2] <= 1024 and sum(steps) <= 1024 * len(steps)


@pytest.mark.parametrize(
    ("shape", "width", "count", "first"),
    [
        ((), 4, 1, (0, 4)),
        ((0,), 4, 0, None),
        ((3, 0, 5), 4, 0, None),
        ((50257, 768), 4, 3142, (0, 16 * 3072)),
        ((8, 1000, 1000), 4, 8 * 63, (0, 64_000)),
        ((100_000,), 4, 7, (0, 65_536)),
    ],
)
def test_known_grids(
    shape: tuple[int, ...], width: int, count: int, first: tuple[int, int] | None
) -> None:
    cells = grid(shape, width, CHUNK)
    assert len(cells) == count
    if first:
        assert cells.span(0) == first


def chunk_ids(cells: Grid, memory: bytes) -> list[bytes]:
    return [digest(memory[start:stop]) for start, stop in cells.spans()]


@given(st.data(), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_row_shards_on_the_grid_have_the_chunks_of_the_whole(
    data: st.DataObject, shards: int, width: int
) -> None:
    columns = data.draw(st.integers(1, 5000), "columns")
    rows_per_cell = grid((1 << 20, columns), width, CHUNK).rows
    cells_per_shard = data.draw(st.integers(1, 3), "cells per shard")
    rest = data.draw(st.integers(0, rows_per_cell), "rows of the last shard beyond the grid")
    step = rows_per_cell * cells_per_shard
    rows = step * shards + rest
    if rows * columns * width > 4 << 20:
        columns, rows_per_cell = 1, grid((1 << 20, 1), width, 1 << 16).rows
        step = rows_per_cell * cells_per_shard
        rows = step * shards + rest % rows_per_cell
    tensor = np.random.default_rng(rows).bytes(rows * columns * width)
    whole = chunk_ids(grid((rows, columns), width, CHUNK), tensor)
    edges = [*range(0, step * shards, step), rows]
    pieces = []
    for start, stop in zip(edges, edges[1:], strict=False):
        box = Box((start, 0), (stop - start, columns))
        pieces += chunk_ids(
            grid((rows, columns), width, CHUNK, box),
            tensor[start * columns * width : stop * columns * width],
        )
    assert pieces == whole
    trees = [split_pages(["tensor"], [LeafContent(ids=b"".join(ids))]) for ids in (pieces, whole)]
    assert trees[0] == trees[1]


@given(st.data())
def test_shards_behind_the_cut_dimension_tile_their_box(data: st.DataObject) -> None:
    shape = data.draw(big_shapes)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    cells = grid(shape, 4, CHUNK, Box(offsets, lengths))
    spans = list(cells.spans())
    assert spans[0][0] == 0 and spans[-1][1] == 4 * prod(lengths)
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    for i in {0, len(cells) // 2, len(cells) - 1}:
        cell = cells.cell(i)
        assert list(byte_ranges(lengths, within(cell, Box(offsets, lengths)), 4)) == [spans[i]]
        assert intersect(cell, Box(offsets, lengths)) == cell


@given(big_shapes, st.data())
def test_covering_names_exactly_the_cells_that_hold_the_bytes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    cells = grid(shape, 4, CHUNK)
    total = 4 * prod(shape)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    wanted = [i for i, (a, b) in enumerate(cells.spans()) if a < stop and b > start]
    assert list(range(*cells.covering(start, stop))) == wanted


@given(shapes, st.data())
def test_byte_ranges_pick_what_numpy_picks(shape: tuple[int, ...], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    tensor = np.arange(prod(shape), dtype="<u2").reshape(shape)
    memory = tensor.tobytes()
    got = b"".join(memory[a:b] for a, b in byte_ranges(shape, Box(offsets, lengths), 2))
    assert (
        got
        == tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].tobytes()
    )


@pytest.mark.parametrize(
    ("region", "result"),
    [
        ((), (4, 6)),
        ((slice(1, 3),), (2, 6)),
        ((2,), (6,)),
        ((-1, slice(None, -2)), (4,)),
        ((slice(3, 1),), (0, 6)),
        ((0, 0), ()),
    ],
)
def test_a_region_has_the_shape_that_numpy_gives_it(
    region: tuple[slice | int, ...], result: tuple[int, ...]
) -> None:
    assert box_of_region((4, 6), region)[1] == np.empty((4, 6))[region].shape == result


@pytest.mark.parametrize(
    ("region", "error"),
    [
        ((slice(0, 4, 2),), ValueError),
        ((0, 0, 0), ValueError),
        ((4,), IndexError),
        ((-5,), IndexError),
    ],
)
def test_a_region_that_does_not_fit_is_refused(
    region: tuple[slice | int, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        box_of_region((4, 6), region)
