"""Read assignment: every rank gets each needed chunk once, load is even, and windows stay within
their limit.
"""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import digest
from ckptstore.distributed.shared_reads import (
    ALONE,
    Needs,
    Numbering,
    Share,
    plan_shares,
    shares_of,
)

MIB = 1 << 20


def packed(needs: np.ndarray) -> Needs:
    """`needs` is ranks × chunks."""
    return Needs(np.packbits(needs, axis=1), needs.shape[1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """The ranks' needs, chunk sizes, and the window."""
    ranks, chunks = draw(st.integers(2, 9)), draw(st.integers(1, 40))
    kinds = draw(
        st.lists(st.lists(st.booleans(), min_size=ranks, max_size=ranks), min_size=1, max_size=4)
    )
    needs = np.array([draw(st.sampled_from(kinds)) for _ in range(chunks)], bool).T
    nbytes = np.array(
        draw(st.lists(st.integers(1, 100), min_size=chunks, max_size=chunks)), np.int64
    )
    return needs, nbytes, draw(st.integers(100, 400))


@given(cases())
def test_every_rank_gets_each_chunk_that_it_shares_from_one_reader_in_one_window(
    case: tuple[np.ndarray, np.ndarray, int],
) -> None:
    needs, nbytes, window_bytes = case
    shares = plan_shares(packed(needs), nbytes, window_bytes)
    tasks = [shares_of(rank, shares, packed(needs), nbytes) for rank in range(len(needs))]
    several = set(np.flatnonzero(needs.sum(axis=0) > 1).tolist())
    assert set(np.flatnonzero(shares.readers != ALONE).tolist()) == several
    for rank, windows in enumerate(tasks):
        mine = [share for window in windows for share in window]
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
    shares = plan_shares(packed(needs), nbytes, window_bytes)
    ranks = range(len(needs))
    todo = [
        sorted(
            {
                int(shares.windows[n])
                for n in np.flatnonzero(needs[rank] & (shares.readers != ALONE))
            }
        )
        for rank in ranks
    ]
    while any(todo):
        at = {rank: windows[0] for rank, windows in enumerate(todo) if windows}
        done = [
            rank
            for rank, window in at.items()
            if all(
                at.get(other) == window
                for n in np.flatnonzero(
                    needs[rank] & (shares.windows == window) & (shares.readers != ALONE)
                )
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
    verifiers = plan_shares(packed(needs), alike_bytes, 1 << 62).readers
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
    shares = plan_shares(
        packed(np.ones((ranks, chunks), bool)), np.full(chunks, MIB, np.int64), 64 * MIB
    )
    read = np.bincount(shares.readers, minlength=ranks)
    assert read.max() <= 1.05 * chunks / ranks
    assert np.count_nonzero(np.diff(shares.readers)) <= ranks * (chunks / 64 + 1), (
        "a rank reads many chunks in a row"
    )


def test_groups_of_ranks_exchange_side_by_side() -> None:
    """Replicas of shards, as in HSDP: ranks 0 and 2 share one half, 1 and 3 the other."""
    needs = np.zeros((4, 200), bool)
    needs[0::2, :100] = needs[1::2, 100:] = True
    shares = plan_shares(packed(needs), np.full(200, MIB, np.int64), 10 * MIB)
    assert (
        shares.windows[:100].tolist()
        == shares.windows[100:].tolist()
        == [number // 10 for number in range(100)]
    )
    assert np.bincount(shares.readers).tolist() == [50] * 4


def test_the_needs_of_many_ranks_stay_packed() -> None:
    needs = np.zeros((512, 70_000), bool)
    needs[0, :50_000] = needs[100:103, 20_000:] = needs[511, 69_999] = True
    given = packed(needs)
    tracemalloc.start()
    groups = [(ranks, numbers[0], numbers[-1], len(numbers)) for ranks, numbers in given.groups()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(groups) == [
        ([0, 100, 101, 102], 20_000, 49_999, 30_000),
        ([100, 101, 102], 50_000, 69_998, 19_999),
        ([100, 101, 102, 511], 69_999, 69_999, 1),
    ]
    assert peak < needs.size / 2


@given(st.lists(st.integers(0, 30), max_size=60))
def test_chunks_are_numbered_in_the_order_in_which_they_are_first_named(names: list[int]) -> None:
    ids = [digest(bytes([name])) for name in names]
    numbering = Numbering(b"".join(ids))
    order = list(dict.fromkeys(ids))
    assert numbering.ids == b"".join(order)
    assert numbering.numbers(b"".join(ids)).tolist() == [order.index(each) for each in ids]
