"""Reads are planned from where chunks lie: every chunk once, no read longer than asked for, and its
parts are all of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import PackId, new_session_id, pack_id
from ckptstore.repository.read_planner import Read, plan_reads, slices

PLACES = np.dtype([("pack", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("codec", "u1")])


@st.composite
def places(draw: st.DrawFn) -> np.ndarray:
    """Where the chunks of a request lie: some behind each other, some elsewhere, in any order."""
    rows, offset = [], 0
    for stored in draw(st.lists(st.integers(1, 50), min_size=1, max_size=30)):
        offset += draw(st.sampled_from([0, 0, 0, 7]))
        rows.append((draw(st.integers(0, 1)), offset, stored, 0))
        offset += stored
    return np.array(draw(st.permutations(rows)), PLACES)


@given(places(), st.integers(1, 200), st.integers(1, 100))
def test_parts_of_reads_have_every_chunk_once_and_no_more_than_they_may(
    where: np.ndarray, limit_bytes: int, part_bytes: int
) -> None:
    names: dict[int, PackId] = {n: pack_id(new_session_id(), 0, n) for n in range(2)}
    reads, missing = plan_reads(where, names, limit_bytes)
    assert not missing
    seen = []
    for read in reads:
        parts = list(slices(read, part_bytes))
        assert b"".join(_covered(part) for part in parts) == _covered(read)
        for part in parts:
            assert len(part.which) == 1 or part.stored_bytes <= part_bytes
            assert [
                (names[int(where["pack"][i])], int(where["offset"][i])) for i in part.which
            ] == [(part.pack, at) for at in part.offsets]
            assert part.stored_bytes == sum(int(where["stored"][i]) for i in part.which)
            seen += part.which
    assert sorted(seen) == list(range(len(where)))


def _covered(read: Read) -> bytes:
    """A byte that tells its place for each byte of a read."""
    return bytes(n % 251 for n in range(read.offset, read.offset + read.stored_bytes))
