"""The assignment of each live chunk to a pack, against a model of sets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import ChunkId
from ckptstore.core.model import PackEntry
from ckptstore.maintenance.gc.mark import Holdings, short_keys
from ckptstore.objects import pack


def chunk(prefix: int, rest: int) -> ChunkId:
    """Ids with few prefixes, so that the truncated ones collide."""
    return ChunkId(bytes([prefix]) * 8 + bytes([rest]) * 24)


chunks = st.builds(chunk, st.integers(0, 3), st.integers(0, 3))


def footer(ids: list[ChunkId], stored: int) -> pack.FooterTable:
    rows = [
        PackEntry(name, bytes(16), i * stored, stored, stored, 0, 1, pack.TENSOR)
        for i, name in enumerate(ids)
    ]
    return pack.encode_tail(rows, len(ids) * stored, metadata=False)[1]


@given(
    st.lists(st.lists(chunks, unique=True, max_size=6), max_size=6),
    st.sets(chunks),
    st.sets(st.integers(0, 5)),
    st.integers(1, 9),
)
def test_every_needed_chunk_is_assigned_to_exactly_one_readable_pack_that_holds_it(
    packs: list[list[ChunkId]], needed: set[ChunkId], unreadable: set[int], stored: int
) -> None:
    holdings = Holdings([len(ids) for ids in packs])
    held = {name for i, ids in enumerate(packs) if i not in unreadable for name in ids}
    for i, ids in enumerate(packs):
        if i not in unreadable:
            holdings.put(i, footer(ids, stored))
    holdings.sort()
    missing = (
        holdings.need(short_keys(b"".join(sorted(needed)))) if needed else np.empty(0, np.uint64)
    )
    assigned = holdings.assign()
    found = [
        name
        for i, ids in enumerate(packs)
        for name, mine in zip(ids, holdings.of_pack(i, assigned), strict=True)
        if mine
    ]
    assert len(found) == len(set(found))
    assert needed & held <= set(found)
    prefixes = {name[:8] for name in needed}
    assert {name for name in held if name[:8] in prefixes} == set(found)
    assert len(missing) <= len({name[:8] for name in needed - held})
    assert holdings.live_chunks(assigned).sum() == len(found)
    assert (holdings.live_bytes(assigned) == stored * holdings.live_chunks(assigned)).all()


def test_a_duplicate_stays_where_most_bytes_stay_anyway() -> None:
    a, b, c = chunk(1, 1), chunk(2, 2), chunk(3, 3)
    holdings = Holdings([1, 3])
    holdings.put(0, footer([a], 64))
    holdings.put(1, footer([a, b, c], 64))
    holdings.sort()
    assert not len(holdings.need(short_keys(a + b + c)))
    assert holdings.live_chunks(holdings.assign()).tolist() == [0, 3]


@given(
    st.lists(st.lists(chunks, unique=True, min_size=1, max_size=6), min_size=1, max_size=5),
    st.data(),
)
def test_a_copy_that_stays_is_sound_or_every_copy_stays(
    packs: list[list[ChunkId]], data: st.DataObject
) -> None:
    copies = [(i, row) for i, ids in enumerate(packs) for row in range(len(ids))]
    damaged = data.draw(st.sets(st.sampled_from(copies)))
    holdings = Holdings([len(ids) for ids in packs])
    for i, ids in enumerate(packs):
        holdings.put(i, footer(ids, 64))
    holdings.sort()
    holdings.need(short_keys(b"".join(sorted({name for ids in packs for name in ids}))))
    assigned = holdings.assign()
    while contested := holdings.contested():
        for i, rows in contested.items():
            holdings.reject(i, [row for row in rows.tolist() if (i, row) in damaged])
        assigned = holdings.assign()
    stays = {
        (i, row)
        for i in range(len(packs))
        for row in np.flatnonzero(holdings.of_pack(i, assigned)).tolist()
    }
    for name in {name for ids in packs for name in ids}:
        held = {(i, row) for i, row in copies if packs[i][row] == name}
        sound = held - damaged
        assert len(stays & sound) == 1 if sound else held <= stays


def test_a_needed_chunk_that_no_pack_holds_is_reported() -> None:
    holdings = Holdings([1])
    holdings.put(0, footer([chunk(1, 1)], 64))
    holdings.sort()
    assert (
        holdings.need(short_keys(chunk(2, 2) + chunk(1, 1))).tolist()
        == short_keys(chunk(2, 2)).tolist()
    )
