"""What staging copies: each byte of memory once, to places that do not overlap, as much as fits."""

import threading
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import Source, leaves_of
from ckptstore.state.staging import PIECE_BYTES, plan_staging, stage
from ckptstore.state.staging_buffers import (
    COMPARED_BYTES,
    BufferPool,
    BufferSource,
    Hashed,
)
from tests.state.carrying import raw_bytes

MIB = 1 << 20
PLENTY = 1 << 40


def sources(value: object) -> list[Source]:
    return leaves_of(flatten({"s": value}))


def in_turn(task: object, items: object) -> None:
    for item in items:  # type: ignore[attr-defined]
        task(item)  # type: ignore[operator]


def test_memory_that_several_leaves_show_is_copied_once() -> None:
    base = torch.randn(10_000)
    plan = plan_staging(
        sources([base, base, base[:5000], base[2000:], base.view(100, 100)]), PLENTY
    )
    assert sum(copy.nbytes for task in plan.tasks for copy in task) == base.nbytes
    assert sorted(plan.offsets.values()) == [0, 0, 0, 8000]


def test_neighbours_in_memory_are_two_leaves() -> None:
    base = torch.randn(10_000)
    plan = plan_staging(sources([base[:5000], base[5000:]]), PLENTY)
    assert len(set(plan.offsets.values())) == 2 and plan.nbytes >= base.nbytes


def test_large_leaves_lie_as_in_packs_so_that_the_disk_takes_them_from_there() -> None:
    sizes = [100_001, 5_000, 65_536, 70_000, 64]
    plan = plan_staging(sources([torch.zeros(size, dtype=torch.uint8) for size in sizes]), PLENTY)
    assert [
        plan.offsets[n] % (4096 if size >= 65_536 else 64)
        for n, size in enumerate(sizes)
        if n in plan.offsets
    ] == [0] * 4
    arena = BufferPool(PLENTY).take(plan.nbytes)
    assert arena and arena.address % 4096 == 0


def test_leaves_beyond_the_budget_are_borrowed_from_the_first_on() -> None:
    tensors = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(5)]
    plan = plan_staging(sources(tensors), 2 * MIB)
    assert plan.borrowed == (0, 1, 2) and set(plan.offsets) == {3, 4} and plan.nbytes == 2 * MIB


def test_small_leaves_need_no_room() -> None:
    plan = plan_staging(sources([torch.zeros(10), 5, "text", torch.zeros(0)]), 0)
    assert plan.borrowed == () and plan.nbytes == 0 and len(plan.small) == 2


def test_a_large_leaf_is_copied_in_pieces_by_several_threads() -> None:
    plan = plan_staging(sources(torch.zeros(3 * PIECE_BYTES + 1, dtype=torch.uint8)), PLENTY)
    assert [copy.nbytes for task in plan.tasks for copy in task] == [PIECE_BYTES] * 3 + [1]


def test_noncontiguous_leaves_are_gathered() -> None:
    conjugate = torch.randn(2000, dtype=torch.complex64).conj()
    state = {
        "transposed": torch.randn(300, 500).t(),
        "conjugate": conjugate,
        "plain": torch.ones(999),
    }
    flats = flatten({"s": state})
    wanted = [raw_bytes(source) for source in leaves_of(flats)]
    plan = plan_staging(leaves_of(flats), PLENTY)
    assert sum(copy.source is not None for task in plan.tasks for copy in task) == 2
    arena = BufferPool(PLENTY).take(plan.nbytes)
    assert arena
    staged = leaves_of(stage(plan, flats, leaves_of(flats), arena, in_turn))
    for tensor in state.values():
        tensor.zero_()
    assert [raw_bytes(source) for source in staged] == wanted
    assert sum(isinstance(source, BufferSource) for source in staged) == 3
    assert [source.width for source in staged] == [source.width for source in leaves_of(flats)]


def test_a_pool_keeps_to_its_budget_and_gives_arenas_again() -> None:
    pool = BufferPool(8 * MIB)
    first, second = pool.take(3 * MIB), pool.take(4 * MIB)
    assert first and second and pool.take(2 * MIB, wait=False) is None
    pool.give(first)
    assert pool.take(2 * MIB) is first
    pool.give(first)
    pool.give(second)
    third = pool.take(7 * MIB, wait=False)
    assert third and pool.held_bytes == 8 * MIB


@given(st.lists(st.integers(0, 19)), st.integers(0, 20), st.integers(1, 20))
def test_bytes_are_as_hashed_where_every_byte_is(noted: list[int], start: int, size: int) -> None:
    arena = BufferPool(PLENTY).take(20 * COMPARED_BYTES)
    assert arena
    live = torch.ones(20 * COMPARED_BYTES, dtype=torch.uint8)
    for place in noted:
        live[place * COMPARED_BYTES : (place + 1) * COMPARED_BYTES] = 0
    hashed = Hashed(by=None)
    for place in set(noted):
        offset = place * COMPARED_BYTES
        hashed.note_same(arena, offset, COMPARED_BYTES, live.data_ptr() + offset)
    wanted = set(range(start, start + size)) <= set(noted)
    assert hashed.covers(start * COMPARED_BYTES, (start + size) * COMPARED_BYTES) == wanted


def test_a_difference_is_found_in_any_byte() -> None:
    size = COMPARED_BYTES + 5
    arena = BufferPool(PLENTY).take(size)
    assert arena
    live = torch.zeros(size, dtype=torch.uint8)
    for place, same in {0: 0, 1: 0, COMPARED_BYTES - 1: 0, COMPARED_BYTES: COMPARED_BYTES}.items():
        live[place] = 1
        assert Hashed(by=None).note_same(arena, 0, size, live.data_ptr()) == same
        live[place] = 0
    assert Hashed(by=None).note_same(arena, 0, size, live.data_ptr()) == size


def test_a_buffer_forgets_what_was_hashed_when_leaves_lie_elsewhere_or_were_not_hashed() -> None:
    arena = BufferPool(PLENTY).take(4096)
    assert arena and arena.refill({0: 0}) is None
    arena.hashed_by = "a commit"
    assert arena.refill({0: 0}) is not None
    assert arena.refill({0: 0}) is None  # the commit between has not hashed
    arena.hashed_by = "another"
    assert arena.refill({0: 64}) is None


def test_a_wait_for_staging_memory_ends_in_time_although_others_come_and_go() -> None:
    pool, stop = BufferPool(12 * MIB), threading.Event()
    held = pool.take(8 * MIB)
    small = pool.take(1)
    assert held is not None and small is not None

    def come_and_go() -> None:
        while not stop.wait(0.02):
            pool.give(small)
            assert pool.take(1) is not None

    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    threading.Timer(20, stop.set).start()
    began = time.monotonic()
    assert pool.take(8 * MIB, timeout_s=0.3) is None
    assert time.monotonic() - began < 10
    stop.set()
    thread.join()
