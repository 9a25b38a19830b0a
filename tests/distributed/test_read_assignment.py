"""Read assignment: every rank gets each needed chunk once, load is even, and windows stay within
their limit.
"""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import digest
from ckptstore.distributed.read_assignment import (
    Share,
    decode_edges,
    edges_of,
    encode_edges,
    plan_shares,
    shared_by,
    shares_of,
    tasks_of,
)
from ckptstore.distributed.shared_reads import Numbering

MIB = 1 << 20
ALONE = -1


class Planned(NamedTuple):
    """The tasks of the ranks, and by chunk number the reader, if there is one, and the window."""

    tasks: list[list[list[Share]]]
    readers: np.ndarray
    windows: np.ndarray


def planned(needs: np.ndarray, nbytes: np.ndarray, window_bytes: int) -> Planned:
    """`needs` is ranks × chunks, `nbytes` by chunk."""
    ranks, chunks = needs.shape
    edges = [decode_edges(encode_edges(edges_of(each))) for each in needs]
    shared = shared_by(edges, chunks)
    numbers = shared.chunks.numbers
    rows = plan_shares(shared, ranks, nbytes[numbers], window_bytes)
    rows["checksum"] = [b"%16d" % number for number in numbers]
    readers, windows = np.full((2, chunks), ALONE)
    readers[numbers], windows[numbers] = rows["reader"], rows["window"]
    tasks = [shares_of(rank, task) for rank, task in enumerate(tasks_of(shared, rows, ranks))]
    return Planned(tasks, readers, windows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """The ranks' needs, chunk sizes, and the window."""
    ranks = draw(st.integers(2, 9))
    holders = st.sampled_from(draw(st.lists(st.integers(0, 2**ranks - 1), min_size=1, max_size=4)))
    rows = draw(st.lists(st.tuples(holders, st.integers(1, 100)), min_size=1, max_size=40))
    needs = np.array([[mask >> rank & 1 for mask, _ in rows] for rank in range(ranks)], bool)
    return needs, np.array([nbytes for _, nbytes in rows]), draw(st.integers(100, 400))


@given(cases())
def test_every_rank_gets_each_chunk_that_it_shares_from_one_reader_in_one_window(
    case: tuple[np.ndarray, np.ndarray, int],
) -> None:
    needs, nbytes, window_bytes = case
    tasks, readers, _ = planned(needs, nbytes, window_bytes)
    several = set(np.flatnonzero(needs.sum(axis=0) > 1).tolist())
    assert set(np.flatnonzero(readers != ALONE).tolist()) == several
    for rank, windows in enumerate(tasks):
        mine = [share for window in windows for share in window]
        assert all(int(share.checksum) == share.number for share in mine)
        assert all(share.nbytes == nbytes[share.number] for share in mine)
        assert all(window == sorted(window, key=lambda share: share.number) for window in windows)
        assert sorted(share.number for share in mine) == [
            number for number in sorted(several) if needs[rank, number]
        ]
        for window in windows:
            assert sum(share.nbytes for share in window) <= window_bytes + nbytes.max()
    sent = {
        (rank, to, share.number)
        for rank, windows in enumerate(tasks)
        for share in _all(windows)
        for to in share.receivers
    }
    got = {
        (share.reader, rank, share.number)
        for rank, windows in enumerate(tasks)
        for share in _all(windows)
        if share.reader != rank
    }
    assert sent == got


@given(cases())
def test_exchanges_come_to_an_end(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    """Each rank runs its windows in order, and a window ends when all ranks concerned are in it."""
    needs, nbytes, window_bytes = case
    _, readers, windows_of = planned(needs, nbytes, window_bytes)
    ranks = range(len(needs))
    todo = [
        sorted({int(windows_of[n]) for n in np.flatnonzero(needs[rank] & (readers != ALONE))})
        for rank in ranks
    ]
    while any(todo):
        at = {rank: windows[0] for rank, windows in enumerate(todo) if windows}
        done = [
            rank
            for rank, window in at.items()
            if all(
                at.get(other) == window
                for n in np.flatnonzero(needs[rank] & (windows_of == window) & (readers != ALONE))
                for other in np.flatnonzero(needs[:, n])
            )
        ]
        assert done, "everybody waits for somebody"
        for rank in done:
            todo[rank].pop(0)


@given(cases())
def test_shared_chunks_are_verified_by_one_rank_each_and_the_load_is_even(
    case: tuple[np.ndarray, np.ndarray, int],
) -> None:
    needs, _, _ = case
    alike_bytes = np.full(needs.shape[1], MIB)
    verifiers = planned(needs, alike_bytes, 1 << 62).readers
    several = needs.sum(axis=0) > 1
    assert ((verifiers != ALONE) == several).all()
    assert all(needs[verifiers[number], number] for number in np.flatnonzero(several))
    for holders in np.unique(needs[:, several], axis=1).T:
        alike = np.flatnonzero((holders == needs.T).all(axis=1))
        load = np.bincount(verifiers[alike], minlength=len(needs))[holders]
        assert load.max() - load.min() <= 1


def _all(windows: list[list[Share]]) -> list[Share]:
    return [share for window in windows for share in window]


def test_what_all_need_is_read_evenly_and_in_runs() -> None:
    ranks, chunks = 4, 1000
    needs = np.ones((ranks, chunks), bool)
    shares = planned(needs, np.full(chunks, MIB, np.int64), 64 * MIB)
    read = np.bincount(shares.readers, minlength=ranks)
    assert read.max() <= 1.05 * chunks / ranks
    assert np.count_nonzero(np.diff(shares.readers)) <= ranks * (chunks / 64 + 1), (
        "a rank reads many chunks in a row"
    )


def test_groups_of_ranks_exchange_side_by_side() -> None:
    """Replicas of shards, as in HSDP: ranks 0 and 2 share one half, 1 and 3 the other."""
    needs = np.zeros((4, 200), bool)
    needs[0::2, :100] = needs[1::2, 100:] = True
    shares = planned(needs, np.full(200, MIB, np.int64), 10 * MIB)
    assert (
        shares.windows[:100].tolist()
        == shares.windows[100:].tolist()
        == [number // 10 for number in range(100)]
    )
    assert np.bincount(shares.readers).tolist() == [50] * 4


@given(cases())
def test_groups_are_the_sets_of_ranks_that_need_the_same_chunks(
    case: tuple[np.ndarray, np.ndarray, int],
) -> None:
    needs, _, _ = case
    shared = shared_by(list(map(edges_of, needs)), needs.shape[1])
    wanted: dict[tuple[int, ...], list[int]] = {}
    for number, holders in enumerate(needs.T):
        if holders.sum() > 1:
            wanted.setdefault(tuple(np.flatnonzero(holders).tolist()), []).append(number)
    found = {
        tuple(shared.holders[group].tolist()): shared.chunks[group].tolist()
        for group in range(len(shared.chunks))
    }
    assert found == wanted
    assert len(shared.chunks) == len(shared.holders) == len(wanted)


def test_a_plan_grows_with_what_is_shared_and_not_with_ranks_times_chunks() -> None:
    ranks, chunks = 4096, 1 << 22
    own = chunks // ranks
    runs = [np.array([rank * own, (rank + 1) * own + 1]) for rank in range(ranks - 1)]
    shared = shared_by([*runs, np.array([(ranks - 1) * own, chunks])], chunks)
    assert shared.chunks.numbers.tolist() == [rank * own for rank in range(1, ranks)]
    rows = plan_shares(shared, ranks, np.full(ranks - 1, MIB), 32 * MIB)
    tasks = tasks_of(shared, rows, ranks)
    assert sum(len(part) for task in tasks for part in task) < 200 * ranks


def test_ranks_that_share_the_same_chunks_get_one_task() -> None:
    needs = np.ones((64, 100), bool)
    shared = shared_by(list(map(edges_of, needs)), 100)
    tasks = tasks_of(shared, plan_shares(shared, 64, np.full(100, MIB), 32 * MIB), 64)
    assert all(task is tasks[0] for task in tasks)


@given(st.lists(st.integers(0, 30), max_size=60))
def test_chunks_are_numbered_in_the_order_in_which_they_are_first_named(names: list[int]) -> None:
    ids = [digest(bytes([name])) for name in names]
    _check_numbering(ids)
    # Of two ids that begin alike, each has a number of its own.
    _check_numbering([bytes(8) + each[8:] for each in ids])


def _check_numbering(ids: list[bytes]) -> None:
    numbering = Numbering(b"".join(ids))
    order = list(dict.fromkeys(ids))
    assert numbering.ids == b"".join(order)
    assert numbering.numbers(b"".join(ids)).tolist() == [order.index(each) for each in ids]
