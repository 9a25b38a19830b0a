"""Reads are planned from where chunks lie: every chunk once, and no read longer than asked for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES
from ckptstore.errors import Corrupt
from ckptstore.index.chunks import LOCATED_DTYPE
from ckptstore.repository.chunk_reader import Request, coalesce, plan_runs


def located(ids: bytes, rows: list[tuple[Any, ...]]) -> np.ndarray:
    """`rows` of locations, each with its id of `ids`."""
    every = (ids[i : i + CHUNK_ID_BYTES] for i in range(0, len(ids), CHUNK_ID_BYTES))
    return np.array([(chunk, *row) for chunk, row in zip(every, rows, strict=True)], LOCATED_DTYPE)


def ids_of(count: int) -> bytes:
    return b"".join(bytes([i]) * CHUNK_ID_BYTES for i in range(count))


@st.composite
def places(draw: st.DrawFn) -> np.ndarray:
    """Where the chunks of a request lie: some behind each other, some elsewhere, in any order."""
    rows, offset = [], 0
    for stored in draw(st.lists(st.integers(1, 50), min_size=1, max_size=30)):
        offset += draw(st.sampled_from([0, 0, 0, 7]))
        summed = bytes([len(rows)]) * CHECKSUM_BYTES
        rows.append((draw(st.integers(0, 1)), stored, stored, 0, 1, 1, 0, offset, summed, 0))
        offset += stored
    return located(ids_of(len(rows)), draw(st.permutations(rows)))


@given(places(), st.integers(1, 200), st.sampled_from([0, 5, 10]))
def test_runs_have_every_chunk_once_and_no_more_than_they_may(
    where: np.ndarray, limit_bytes: int, gap_bytes: int
) -> None:
    ids = ids_of(len(where))
    out = [memoryview(bytearray(stored)) for stored in where["stored"].tolist()]
    request = Request(ids, out, str, False)
    positions = range(len(where))
    seen: list[int] = []
    for number, run in plan_runs(
        request, where, positions, limit_bytes=limit_bytes, gap_bytes=gap_bytes
    ):
        assert len(run.reads) == 1 or run.stored_bytes <= limit_bytes
        at = run.offset
        for entry, memory, i in run.reads:
            assert memory is out[i]
            assert (entry.chunk, number) == (request.id(i), int(where["pack"][i]))
            assert entry.checksum == where["checksum"][i].tobytes()
            assert (entry.offset, entry.stored_bytes) == tuple(where[["offset", "stored"]][i])
            assert 0 <= entry.offset - at <= gap_bytes
            at = entry.offset + entry.stored_bytes
        buffers = run.buffers()
        assert buffers is not None
        assert sum(buffer.nbytes for buffer in buffers) == run.stored_bytes
        seen += [read.number for read in run.reads]
    assert sorted(seen) == list(positions)


def test_ranges_are_joined_within_an_object_a_gap_and_a_limit() -> None:
    starts, stops = [0, 10, 20, 35, 40], [10, 20, 30, 40, 50]
    assert [some.start for some in coalesce(starts, stops)] == [0, 3]
    assert [some.start for some in coalesce(starts, stops, gap_bytes=5)] == [0]
    assert [some.start for some in coalesce(starts, stops, limit_bytes=25)] == [0, 2, 3]
    assert [some.start for some in coalesce(starts, stops, objects="aabbb")] == [0, 2, 3]
    assert not list(coalesce([], []))


def test_places_of_other_chunks_than_those_of_the_request_are_refused() -> None:
    """A row too few would shift each chunk to the memory of the one before."""
    ids = ids_of(3)
    out = [memoryview(bytearray(10)) for _ in range(3)]
    where = located(
        ids, [(0, 10, 10, 0, 1, 1, 0, 10 * i, bytes(CHECKSUM_BYTES), 0) for i in range(3)]
    )
    request = Request(ids, out, str, False)
    assert len(list(plan_runs(request, where, range(3), limit_bytes=100))) == 1
    for rows in (where[1:], where[:-1], where[[0, 2, 1]]):
        with pytest.raises(Corrupt, match="look-up"):
            list(plan_runs(request, rows, range(3), limit_bytes=100))
