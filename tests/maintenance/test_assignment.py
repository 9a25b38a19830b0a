"""The assignment of each live chunk to a pack, against a model of sets."""

from collections.abc import Set
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ckptstore
from ckptstore.core.ids import ChunkId, digest
from ckptstore.core.model import PackEntry
from ckptstore.maintenance import silent
from ckptstore.maintenance.gc.mark import Holdings, _Marking, short_keys
from ckptstore.objects import pack
from ckptstore.objects.codecs import DELTA, PATCH, RAW
from ckptstore.repository.thread_pool import one_by_one


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


def holding(tables: list[pack.FooterTable], unreadable: Set[int] = frozenset()) -> Holdings:
    """Packs with these footers, but for some that were not read."""
    holdings = Holdings([len(table) for table in tables])
    for i, table in enumerate(tables):
        if i not in unreadable:
            holdings.put(i, table)
    for i in holdings.sort():
        holdings.tell(i, tables[i])
    return holdings


@given(
    st.lists(st.lists(chunks, unique=True, max_size=6), max_size=6),
    st.sets(chunks),
    st.sets(st.integers(0, 5)),
    st.integers(1, 9),
)
def test_every_needed_chunk_is_assigned_to_exactly_one_readable_pack_that_holds_it(
    packs: list[list[ChunkId]], needed: set[ChunkId], unreadable: set[int], stored: int
) -> None:
    holdings = holding([footer(ids, stored) for ids in packs], unreadable)
    held = {name for i, ids in enumerate(packs) if i not in unreadable for name in ids}
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
    live = holdings.live_chunks(assigned)
    assert sum(live) == len(found)
    assert holdings.live_bytes(assigned) == [stored * chunks for chunks in live]


def test_a_duplicate_stays_where_most_bytes_stay_anyway() -> None:
    a, b, c = chunk(1, 1), chunk(2, 2), chunk(3, 3)
    holdings = holding([footer([a], 64), footer([a, b, c], 64)])
    assert not len(holdings.need(short_keys(a + b + c)))
    assert holdings.live_chunks(holdings.assign()) == [0, 3]


def test_of_two_copies_the_base_of_a_difference_stays_though_it_is_larger() -> None:
    base, other = chunk(1, 1), chunk(2, 2)
    delta = PackEntry(other, bytes(16), 64, 8, 64, DELTA, 1, pack.TENSOR, 0)
    whole = PackEntry(base, bytes(16), 0, 64, 64, 0, 1, pack.TENSOR)
    both = pack.encode_tail([whole, delta], 72, metadata=False)[1]
    holdings = holding([footer([base], 32), both])
    holdings.need(short_keys(base + other))
    assert holdings.live_chunks(holdings.assign()) == [0, 2]


@given(
    st.lists(st.lists(chunks, unique=True, min_size=1, max_size=6), min_size=1, max_size=5),
    st.data(),
)
def test_a_copy_that_stays_is_sound_or_every_copy_stays(
    packs: list[list[ChunkId]], data: st.DataObject
) -> None:
    copies = [(i, row) for i, ids in enumerate(packs) for row in range(len(ids))]
    damaged = data.draw(st.sets(st.sampled_from(copies)))
    holdings = holding([footer(ids, 64) for ids in packs])
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


class Copy(NamedTuple):
    """A copy of chunk `number` in a pack: a patch of chunk `base`, or whole."""

    number: int
    base: int | None


def name_of(number: int) -> ChunkId:
    return ChunkId(digest(bytes([number])))


def entry_of(copy: Copy, at: int) -> PackEntry:
    """Each takes a byte, so that the ranks of packs decide."""
    name, patch = name_of(copy.number), copy.base is not None
    entry = PackEntry(name, bytes(16), at, 1, 1, PATCH if patch else RAW, 1, pack.TENSOR)
    if copy.base is None:
        return entry
    return entry._replace(patch_of=name_of(copy.base), depth=copy.number)


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """A patch has a base with a smaller number, so that no chunk needs itself."""
    number = draw(st.integers(0, 5))
    base = draw(st.none() | st.integers(0, number - 1)) if number else None
    return Copy(number, base)


@example(
    [[Copy(2, 0)], [Copy(2, 1), Copy(3, None)], [Copy(4, 3)], [Copy(0, None)], [Copy(1, None)]],
    {2, 4},
)
@given(
    st.lists(
        st.lists(copies(), min_size=1, max_size=4, unique_by=lambda copy: copy.number), max_size=6
    ),
    st.sets(st.integers(0, 5)),
)
def test_the_base_of_each_patch_that_stays_stays(packs: list[list[Copy]], needed: set[int]) -> None:
    tables = [
        pack.encode_tail([entry_of(copy, at) for at, copy in enumerate(some)], len(some), False)[1]
        for some in packs
    ]
    threads = cast(Any, SimpleNamespace(spread=one_by_one))
    listed = cast(Any, [SimpleNamespace(id="", chunks=len(some)) for some in packs])
    marking = _Marking(cast(Any, None), listed, threads, silent, frozenset())
    marking.holdings = holding(tables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marking, "_damaged", lambda i, rows: [])
        marking._need(b"".join(map(name_of, needed)))
        marking._flush()
        assigned = marking.assign()
    stay = [
        copy
        for i, some in enumerate(packs)
        for copy, stays in zip(some, marking.holdings.of_pack(i, assigned).tolist(), strict=True)
        if stays
    ]
    held = {copy.number for some in packs for copy in some}
    numbers = {copy.number for copy in stay}
    assert needed & held <= numbers
    assert {copy.base for copy in stay if copy.base in held} <= numbers


def test_a_needed_chunk_that_no_pack_holds_is_reported() -> None:
    holdings = holding([footer([chunk(1, 1)], 64)])
    assert (
        holdings.need(short_keys(chunk(2, 2) + chunk(1, 1))).tolist()
        == short_keys(chunk(2, 2)).tolist()
    )


def test_a_footer_that_has_changed_since_it_was_put_ends_the_mark() -> None:
    """The whole ids of what packs share are read later: of the same chunks, or of none."""
    both = [chunk(1, 1), chunk(2, 2)]
    holdings = Holdings([2, 2])
    for i in range(2):
        holdings.put(i, footer(both, 64))
    assert holdings.sort() == [0, 1]
    with pytest.raises(ckptstore.Corrupt, match="has changed"):
        holdings.tell(0, footer([chunk(1, 1), chunk(2, 3)], 64))
