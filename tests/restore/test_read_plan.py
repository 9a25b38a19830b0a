"""Which chunks a box needs and where their bytes go, checked against numpy without any storage."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.geometry import byte_ranges, grid
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import Box, LeafContent
from ckptstore.restore.read_plan import select

CHUNK = 64 << 10
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 90_000)),
    st.tuples(st.integers(1, 700), st.integers(1, 300)),
    st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3000)),
)


def hold(
    tensor: np.ndarray, boxes: tuple[Box, ...] | None
) -> tuple[LeafContent, dict[bytes, bytes]]:
    """The tensor cut into chunks as these boxes hold it."""
    chunks: dict[bytes, bytes] = {}
    ids = []
    memory = tensor.tobytes()
    for box in boxes or (Box((0,) * tensor.ndim, tensor.shape),):
        part = b"".join(memory[a:b] for a, b in byte_ranges(tensor.shape, box, tensor.itemsize))
        for start, stop in grid(tensor.shape, tensor.itemsize, CHUNK, box).spans():
            ids.append(digest(part[start:stop]))
            chunks[ids[-1]] = part[start:stop]
    return LeafContent(ids=b"".join(ids), boxes=boxes), chunks


def fetch(
    content: LeafContent,
    chunks: dict[bytes, bytes],
    shape: tuple[int, ...],
    width: int,
    wanted: Box,
) -> bytes:
    out = bytearray(b"\xee" * (width * prod(wanted.lengths)))
    at_once = bytearray(out)
    for piece in select(content, shape, width, CHUNK, wanted):
        assert len(piece.chunk) == CHUNK_ID_BYTES and len(chunks[piece.chunk]) == piece.raw_bytes
        for start, part in piece.parts(memoryview(chunks[piece.chunk])):
            out[start : start + len(part)] = part
        piece.land(memoryview(chunks[piece.chunk]), memoryview(at_once))
    assert at_once == out
    return bytes(out)


def split(shape: tuple[int, ...], dim: int, edges: list[int]) -> tuple[Box, ...]:
    cuts = sorted({0, shape[dim], *(e % shape[dim] for e in edges)})
    return tuple(
        Box(
            tuple(a if i == dim else 0 for i in range(len(shape))),
            tuple(b - a if i == dim else n for i, n in enumerate(shape)),
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    )


@given(st.data())
def test_any_box_comes_back_from_any_split_along_any_dimension(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    tensor = np.arange(prod(shape), dtype="<u4").reshape(shape)
    boxes = None
    if shape and data.draw(st.booleans(), "held in boxes"):
        dim = data.draw(st.integers(0, len(shape) - 1), "dim")
        boxes = split(shape, dim, data.draw(st.lists(st.integers(0, 10**6), max_size=5), "edges"))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    content, chunks = hold(tensor, boxes)
    wanted = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    assert fetch(content, chunks, shape, 4, Box(offsets, lengths)) == wanted.tobytes()


def test_a_whole_leaf_is_read_in_place_and_each_chunk_once() -> None:
    tensor = np.zeros((1000, 300), "<f4")
    content, _ = hold(tensor, None)
    pieces = list(select(content, tensor.shape, 4, CHUNK))
    assert all(piece.at is not None for piece in pieces)
    assert len(pieces) == len(grid(tensor.shape, 4, CHUNK)) == len(content.ids) // CHUNK_ID_BYTES


def test_rows_touch_only_the_chunks_that_cover_them() -> None:
    tensor = np.arange(1 << 20, dtype="<u4").reshape(4096, 256)
    content, _ = hold(tensor, None)
    rows = grid(tensor.shape, 4, CHUNK).rows
    assert len(list(select(content, tensor.shape, 4, CHUNK, Box((rows, 0), (rows, 256))))) == 1
    assert len(list(select(content, tensor.shape, 4, CHUNK, Box((rows - 1, 0), (2, 256))))) == 2
