"""What a rank gets of states that belong to ranks when their number has changed: random generators
go on or begin new streams, data loaders and other private values are refused with the ways on.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from tests.distributed.layouts import group_of
from tests.distributed.pool import Pool, RankFailed

Draws = tuple[float, float, float]


def draw() -> Draws:
    """The next number of each generator."""
    return random.random(), torch.rand(()).item(), float(np.random.rand())


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    np.random.seed(number)


def loop(rank: int, path: Path, n: int) -> tuple[Draws, Draws, torch.Tensor] | None:
    """README's loop for two steps on `n` ranks: each generator's next number after the resume, and
    after the last commit."""
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank >= n:
        return None
    seed(100 * n + rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "random": ckptstore.RNGState(),
        "progress": {"step": 0},
    }
    with ckptstore.open(path) as store:
        store.resume(app_state, ranks=ranks)
        first = draw()
        store.resume(app_state, ranks=ranks)
        assert store.log() == [] or draw() == first, "the same commit on as many ranks, twice"
        start = app_state["progress"]["step"]
        for step in range(start + 1, start + 3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            app_state["progress"]["step"] = step
            store.commit(app_state, step=step, ranks=ranks)
    return first, draw(), model.weight.detach().clone()


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


def test_the_readmes_loop_goes_on_with_any_number_of_ranks(eight: Pool, tmp_path: Path) -> None:
    left: list[Draws] = []
    sizes = (1, 2, 4, 8, 1)
    for n in sizes:
        found = eight.run(loop, tmp_path / "store", n)[:n]
        drawn = [each[0] for each in found]
        if left:
            assert drawn[: len(left)] == left[:n], "a rank that had generators goes on with them"
        for streams in zip(*drawn, strict=True):
            assert len(set(streams)) == n, "no two ranks draw the same numbers"
        assert all(torch.equal(each[2], found[0][2]) for each in found)
        left = [each[1] for each in found]
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == list(range(2 * len(sizes), 0, -1))


def commit_seeded(rank: int, path: Path, n: int, nested: bool) -> Draws | None:
    """Commit generators: torch's is the same on all ranks, the others differ."""
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank >= n:
        return None
    seed(rank)
    torch.manual_seed(7)
    generators: Any = ckptstore.RNGState()
    with ckptstore.open(path) as store:
        store.commit({"random": {"all": [generators]} if nested else generators}, ranks=ranks)
    return draw()


def restore_seeded(
    rank: int, path: Path, n: int, nested: bool, own: dict[int, int] | None
) -> Draws | None:
    ranks = ckptstore.Ranks(process_group=group_of(n), private_from=own)
    if rank >= n:
        return None
    seed(1000)
    generators: Any = ckptstore.RNGState()
    state = {"random": {"all": [generators]} if nested else generators}
    with ckptstore.open(path) as store:
        store.checkout("latest").restore(state, ranks=ranks)
    return draw()


@pytest.mark.parametrize("nested", [False, True])
def test_generators_that_all_ranks_had_in_step_stay_in_step(
    pool: Pool, tmp_path: Path, nested: bool
) -> None:
    had = pool.run(commit_seeded, tmp_path / "store", 2, nested)[:2]
    got = pool.run(restore_seeded, tmp_path / "store", 4, nested, None)
    assert got[:2] == had
    python, on_torch, on_numpy = zip(*got, strict=True)
    assert len(set(on_torch)) == 1
    assert len(set(python)) == len(set(on_numpy)) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_one_process_says_nothing_of_being_in_step(
    pool: Pool, tmp_path: Path, nested: bool
) -> None:
    had = pool.run(commit_seeded, tmp_path / "store", 1, nested)[0]
    got = pool.run(restore_seeded, tmp_path / "store", 3, nested, None)[:3]
    assert got[0] == had
    assert all(len(set(streams)) == 3 for streams in zip(*got, strict=True))


@pytest.mark.parametrize(("then", "own"), [(1, {1: 0}), (2, {1: 0}), (2, {0: 1}), (2, {2: 0})])
def test_ranks_that_take_what_one_had_do_not_repeat_its_numbers(
    pool: Pool, tmp_path: Path, then: int, own: dict[int, int]
) -> None:
    had = pool.run(commit_seeded, tmp_path / "store", then, False)[:then]
    got = pool.run(restore_seeded, tmp_path / "store", 3, False, own)[:3]
    assert len({python for python, *_ in got}) == 3
    for source in own.values():
        assert got[source] == had[source]


def test_ranks_may_change_places_with_their_generators(pool: Pool, tmp_path: Path) -> None:
    had = pool.run(commit_seeded, tmp_path / "store", 2, False)[:2]
    got = pool.run(restore_seeded, tmp_path / "store", 2, False, {0: 1, 1: 0})[:2]
    assert got == had[::-1]


class Loader:
    """A place in the data of one rank, as a stateful data loader has it."""

    def __init__(self, at: int, any_world_size: bool = False) -> None:
        self.at, self.any_world_size = at, any_world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.at, 100))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def commit_loader(rank: int, path: Path, n: int, nested: bool) -> None:
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank < n:
        loader = Loader(10 + rank)
        with ckptstore.open(path) as store:
            store.commit({"data": [loader] if nested else loader, "step": 4}, ranks=ranks)


def resume_loader(
    rank: int,
    path: Path,
    n: int,
    nested: bool,
    any_world_size: bool,
    own: dict[int, int] | None,
    options: dict[str, Any],
) -> tuple[int, int] | None:
    ranks = ckptstore.Ranks(process_group=group_of(n), private_from=own)
    if rank >= n:
        return None
    loader = Loader(-1, any_world_size)
    state: dict[str, Any] = {"data": [loader] if nested else loader, "step": 0}
    with ckptstore.open(path) as store:
        store.resume(state, ranks=ranks, **options)
        if options:
            store.checkout("latest").restore(state, ranks=ranks, **options)
    return loader.at, state["step"]


SIZES = [(1, 2), (2, 1), (2, 3)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("then", "now"), SIZES)
def test_the_places_of_data_loaders_are_not_divided_anew(
    pool: Pool, tmp_path: Path, then: int, now: int, nested: bool
) -> None:
    pool.run(commit_loader, tmp_path / "store", then, nested)
    resume = (resume_loader, tmp_path / "store")
    assert pool.run(*resume, then, nested, False, None, {})[:then] == [
        (10 + rank, 4) for rank in range(then)
    ]
    with pytest.raises(RankFailed) as caught:
        pool.run(*resume, now, nested, False, None, {})
    text = caught.value.errors[0]
    path = "data/0" if nested else "data"
    assert f"{path} is a data loader of {then} ranks, and there are {now} now" in text
    new, taken = (then, 0) if now > then else (0, 0)
    assert 'without=["data"]' in text and f"Ranks(private_from={{{new}: {taken}}})" in text
    left_out = pool.run(*resume, now, nested, False, None, {"without": ["data"]})
    assert left_out[:now] == [(-1, 4)] * now, "the epoch begins anew, the rest goes on"
    wanted = [(10 + (0 if rank == new else rank), 4) for rank in range(now)]
    if then > 1:
        assert pool.run(*resume, now, nested, False, {new: taken}, {})[:now] == wanted
    else:
        assert pool.run(*resume, now, nested, False, {1: 0}, {})[:now] == [(10, 4)] * 2
    assert pool.run(*resume, now, nested, True, None, {})[:now] == wanted


def commit_own(rank: int, path: Path, n: int) -> None:
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank < n:
        state = {
            "own": {"number": rank, "buffer": torch.full((300,), rank), "same": 5},
            "all": rank,
            "model": nn.Linear(3, 3),
        }
        nn.init.constant_(state["model"].weight, 3)
        nn.init.constant_(state["model"].bias, 3)
        with ckptstore.open(path) as store:
            store.commit(state, ranks=ranks)


def restore_own(
    rank: int,
    path: Path,
    n: int,
    keys: list[str],
    own: dict[int, int] | None,
    options: dict[str, Any],
) -> tuple[Any, ...] | None:
    ranks = ckptstore.Ranks(process_group=group_of(n), private_from=own)
    if rank >= n:
        return None
    state = {
        "own": {"number": -1, "buffer": torch.full((300,), -1), "same": -1},
        "all": -1,
        "model": nn.Linear(3, 3),
    }
    wanted = {key: state[key] for key in keys}
    with ckptstore.open(path) as store:
        report = store.checkout("latest").restore(wanted, ranks=ranks, **options)
    inner = state["own"]
    return (
        inner["number"],
        int(inner["buffer"][0]),
        inner["same"],
        wanted.get("all", -1),
        float(state["model"].weight[0, 0].detach()) == 3,
        report.missing,
    )


EVERYTHING = ["own", "all", "model"]
LACKED = ("own/number", "own/buffer", "all")


def test_other_private_values_name_the_ways_on(pool: Pool, tmp_path: Path) -> None:
    pool.run(commit_own, tmp_path / "store", 2)
    restore = (restore_own, tmp_path / "store", 3)
    with pytest.raises(RankFailed) as caught:
        pool.run(*restore, EVERYTHING, None, {})
    text = caught.value.errors[0]
    assert "own/number (and 2 more) is private to ranks [0, 1], and rank 2 has none" in text
    assert "Ranks(private_from={2: 0})" in text and "without=" in text and "strict=False" in text
    taken = pool.run(*restore, EVERYTHING, {2: 0}, {})[:3]
    assert taken == [(r, r, 5, r, True, ()) for r in (0, 1, 0)]
    with pytest.raises(RankFailed, match="none of its own, nor has rank 9"):
        pool.run(*restore, EVERYTHING, {2: 9}, {})
    left = pool.run(*restore, EVERYTHING, None, {"strict": False})
    assert left[1] == (1, 1, 5, 1, True, ()) and left[2] == (-1, -1, 5, -1, True, LACKED)
    left_out = pool.run(*restore, EVERYTHING, None, {"without": ["own", "all"]})[:3]
    assert left_out == [(-1, -1, -1, -1, True, ())] * 3
    weights = pool.run(*restore, ["model"], None, {})[:3]
    assert weights == [(-1, -1, -1, -1, True, ())] * 3, "a key that is not wanted is no obstacle"
    chosen = pool.run(*restore, EVERYTHING, None, {"select": "model/*"})[:3]
    assert chosen == [(-1, -1, -1, -1, True, ())] * 3
