"""Pages: every leaf's content comes back, the same content gives the same pages, and damage is
called so."""

import struct
import tracemalloc
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import digest
from ckptstore.core.model import Box, LeafContent, LeafKind
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.pages import GONE, MAX_IDS, MAX_LEAVES, decode_page, join_pages, split_pages
from tests.support.mutations import damaged

SIZES = st.integers(1, 5) | st.sampled_from(
    [MAX_IDS - 1, MAX_IDS, MAX_IDS + 1, 2 * MAX_IDS, 2 * MAX_IDS + 1]
)
U64 = st.integers(0, 2**64 - 1)


@cache
def some_ids(count: int, seed: int = 0) -> bytes:
    return b"".join(digest(struct.pack("<II", seed, i)) for i in range(count))


def boxes(n: int) -> st.SearchStrategy[tuple[Box, ...]]:
    shape = st.lists(U64, min_size=n, max_size=n).map(tuple)
    return st.lists(st.builds(Box, shape, shape), min_size=1, max_size=3).map(tuple)


IDS = SIZES.map(some_ids)
LEAVES: st.SearchStrategy[tuple[LeafKind, LeafContent]] = st.one_of(
    st.tuples(
        st.sampled_from(["tensor", "value", "bytes"]),
        st.binary(max_size=512).map(lambda b: LeafContent(b, raw_bytes=len(b))),
    ),
    st.tuples(st.sampled_from(["tensor", "value", "bytes"]), st.just(GONE)),
    st.tuples(st.just("tensor"), st.builds(LeafContent, ids=IDS)),
    st.tuples(
        st.just("tensor"), st.builds(LeafContent, ids=IDS, boxes=st.integers(1, 4).flatmap(boxes))
    ),
    st.tuples(st.sampled_from(["value", "bytes"]), st.builds(LeafContent, ids=IDS, raw_bytes=U64)),
)
Leaves = list[tuple[LeafKind, LeafContent]]


def pages_of(leaves: Leaves) -> list[bytes]:
    return split_pages([kind for kind, _ in leaves], [content for _, content in leaves])


@given(st.lists(LEAVES, max_size=12))
def test_the_contents_come_back(leaves: Leaves) -> None:
    assert join_pages(pages_of(leaves), len(leaves)) == [content for _, content in leaves]


@given(st.lists(LEAVES, max_size=12))
def test_a_page_holds_no_more_than_the_format_allows(leaves: Leaves) -> None:
    pages = [decode_page(data) for data in pages_of(leaves)]
    ids = [sum(len(leaf.ids) // 32 for leaf in page.leaves) for page in pages]
    assert all(count <= MAX_IDS for count in ids)
    assert all(
        count == MAX_IDS for count, after in zip(ids, pages[1:], strict=False) if after.first_id
    )


@pytest.mark.parametrize(
    ("count", "pages"), [(0, 0), (1, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)]
)
def test_a_page_is_closed_before_its_513th_leaf(count: int, pages: int) -> None:
    leaves: Leaves = [("value", LeafContent(b"1", raw_bytes=1))] * count
    found = pages_of(leaves)
    assert [len(decode_page(data).leaves) for data in found[:-1]] == [MAX_LEAVES] * (
        pages - 1 if pages else 0
    )
    assert len(found) == pages


@pytest.mark.parametrize(
    ("counts", "starts"),
    [
        ([2048, 1], [(0, 0), (1, 0)]),
        ([2049], [(0, 0), (0, 2048)]),
        ([2000, 100], [(0, 0), (1, 48)]),
        ([4096, 4096], [(0, 0), (0, 2048), (1, 0), (1, 2048)]),
        ([5000, 1], [(0, 0), (0, 2048), (0, 4096)]),
    ],
)
def test_a_leaf_of_many_ids_goes_on_in_the_next_page(
    counts: list[int], starts: list[tuple[int, int]]
) -> None:
    pages = [
        decode_page(data)
        for data in pages_of([("tensor", LeafContent(ids=some_ids(n))) for n in counts])
    ]
    assert [(page.first_leaf, page.first_id) for page in pages] == starts


def test_a_page_is_laid_out_as_the_format_says() -> None:
    one = digest(b"one")
    (page,) = pages_of(
        [
            ("value", LeafContent(b"17", raw_bytes=2)),
            ("tensor", LeafContent(ids=one * 2, boxes=(Box((1, 2), (3, 4)),))),
            ("bytes", LeafContent(ids=one, raw_bytes=600)),
        ]
    )
    assert page == (
        b"CKPG"
        + struct.pack("<IIIQ", 1, 0, 5, 0)
        + bytes([0, 2, 1, 2, 1, 0, 0, 0])
        + struct.pack("<5I", 2, 40, 2, 8, 1)
        + b"17"
        + struct.pack("<IIQQQQ", 2, 1, 1, 2, 3, 4)
        + one * 2
        + struct.pack("<Q", 600)
        + one
    )


@given(st.lists(LEAVES, min_size=1, max_size=6), st.data())
def test_a_damaged_page_is_a_page_or_corrupt(leaves: Leaves, data: st.DataObject) -> None:
    pages = pages_of(leaves)
    i = data.draw(st.integers(0, len(pages) - 1))
    pages[i] = data.draw(damaged(pages[i]))
    try:
        assert len(join_pages(pages, len(leaves))) == len(leaves)
    except Corrupt:
        return


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), U64, st.binary(max_size=64))
def test_a_page_that_claims_much_costs_little(
    first_leaf: int, count: int, first_id: int, rest: bytes
) -> None:
    tracemalloc.start()
    try:
        decode_page(b"CKPG" + struct.pack("<IIIQ", 1, first_leaf, count, first_id) + rest)
    except Corrupt:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


THREE: Leaves = [("tensor", LeafContent(ids=some_ids(5000, i))) for i in range(3)]


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [1], [0, 2, 3], [0, 1, 2, 3]], ids=str)
def test_pages_that_do_not_follow_each_other_are_corrupt(order: list[int]) -> None:
    pages = pages_of(THREE)
    with pytest.raises(Corrupt):
        join_pages([pages[i] for i in order], 3)


def test_pages_of_fewer_or_more_leaves_are_corrupt() -> None:
    pages = pages_of(THREE)
    for count in (2, 4):
        with pytest.raises(Corrupt, match=f"wanted {count} leaves, got 3"):
            join_pages(pages, count)


def test_a_leaf_that_goes_on_with_another_extent_is_corrupt() -> None:
    first, *_ = pages_of([("bytes", LeafContent(ids=some_ids(3000), raw_bytes=1))])
    _, second = pages_of([("bytes", LeafContent(ids=some_ids(3000), raw_bytes=2))])
    with pytest.raises(Corrupt, match="another extent"):
        join_pages([first, second], 1)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("value", LeafContent(bytes(513))),
        ("value", LeafContent(b"", ids=bytes(32))),
        ("tensor", LeafContent(b"", boxes=(Box((), ()),))),
        ("tensor", LeafContent()),
        ("tensor", LeafContent(ids=bytes(33))),
        ("tensor", LeafContent(ids=bytes(32), boxes=())),
        ("tensor", LeafContent(ids=bytes(32), boxes=(Box((), ()),))),
        ("tensor", LeafContent(ids=bytes(32), boxes=(Box((1,), (1,)), Box((1, 2), (1, 2))))),
    ],
)
def test_what_no_page_can_hold_is_refused(kind: LeafKind, content: LeafContent) -> None:
    with pytest.raises(InvalidInput):
        split_pages([kind], [content])


def page(kinds: list[int], sizes: list[int], payload: bytes, first_id: int = 0) -> bytes:
    head = b"CKPG" + struct.pack("<IIIQ", 1, 0, len(kinds), first_id)
    return (
        head
        + bytes(kinds)
        + bytes(-len(kinds) % 4)
        + struct.pack(f"<{len(sizes)}I", *sizes)
        + payload
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        page([], [], b""),
        page([4], [0], b""),
        page([3], [1], bytes(1)),
        page([2, 3], [8, 0], bytes(8)),
        page([0], [513], bytes(513)),
        page([0], [1], bytes(2)),
        page([0], [2], bytes(1)),
        page([1], [0], b""),
        page([2], [8], bytes(8)),
        page([2, 2, 1], [8, 8, 1], bytes(48)),
        page([2, 0], [8, 1], bytes(9)),
        page([2, 1], [7, 1], bytes(39)),
        page([2, 1], [24, 1], struct.pack("<IIQQ", 2, 1, 0, 0) + bytes(32)),
        page([2, 1], [24, 1], struct.pack("<IIQQ", 0, 2, 0, 0) + bytes(32)),
        page([0], [1], bytes(1), first_id=1),
        page([0] * 513, [0] * 513, b""),
        page([1], [2049], bytes(2049 * 32)),
        page([0], [0], b"")[:28].replace(b"CKPG\x01", b"CKPG\x02"),
        page([0], [0], b"").replace(
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01", 1
        ),
    ],
)
def test_a_page_that_contradicts_the_format_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_page(data)


def test_a_change_to_one_leaf_changes_one_page() -> None:
    leaves: Leaves = [("tensor", LeafContent(ids=some_ids(3, i))) for i in range(2000)]
    changed = [*leaves]
    changed[700] = ("tensor", replace(leaves[700][1], ids=some_ids(3, 9999)))
    before, after = pages_of(leaves), pages_of(changed)
    assert [a != b for a, b in zip(before, after, strict=True)] == [False, True, False, False]
