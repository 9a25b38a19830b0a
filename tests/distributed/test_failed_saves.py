"""Ranks whose storage fails go on together, or end together: none waits for another that left."""

from pathlib import Path
from random import Random

import pytest
import torch

import ckptstore
from ckptstore import Async, Ranks
from ckptstore.errors import Corrupt, NoSpace, Unavailable
from tests.distributed.layouts import full, layout, meet
from tests.distributed.pool import Pool
from tests.support.faults import KINDS, Faults

N = 4
OWN = Ranks(private=["own/*"])


def state(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    own = {"noise": torch.full((3000,), float(rank + 1 + 10 * step))}
    return {"model": {"rows": layout("rows", full() + step, N)}, "own": own}


def fail_on_one_rank(rank: int, path: Path, seed: int, count: int) -> tuple[list[int], int, int]:
    """The steps that were acknowledged, the failures, and what this rank counted of them."""
    meet(N)
    random, done, failed, counted = Random(seed), [], 0, 0
    warn = Async(on_error="warn")
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path, background=warn) as store:
        faults = Faults(store, patch)
        for step in range(1, count + 1):
            at, kind = random.randrange(N), random.choice(KINDS)
            failing = random.random() < 0.6
            faults.error = kind("a bad moment") if failing and at == rank else None
            faults.after = 0
            pending = store.commit_async(state(rank, step), ranks=OWN, step=step)
            assert pending.ended(120)
            faults.error = None
            if pending.failure():
                failed += 1
                counted += 1
                assert store.health().failures >= 1
            else:
                done.append(step)
        store.commit_async(state(rank, count + 1), ranks=OWN, step=count + 1).wait()
        assert store.health().failures == 0
    return [*done, count + 1], failed, counted


def lose_nothing(pool: Pool, place: Path, seed: int, count: int) -> int:
    found = pool.run(fail_on_one_rank, place, seed, count)
    assert found == found[:1] * N
    steps, failed, _ = found[0]
    with ckptstore.open(place) as store:
        assert [info.step for info in store.log()] == steps[::-1]
        for step in steps[-3:]:
            assert torch.equal(store.checkout(step).read("model/rows"), full() + step)
    return int(failed)


def test_all_ranks_go_on(pool: Pool, tmp_path: Path) -> None:
    assert lose_nothing(pool, tmp_path / "store", 1, 12) > 1


@pytest.mark.soak
def test_500_faults(pool: Pool, tmp_path: Path) -> None:
    failed = seed = 0
    while failed < 500:
        failed += lose_nothing(pool, tmp_path / str(seed), seed, 50)
        seed += 1


def end_together(rank: int, path: Path) -> None:
    meet(N)
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store:
        faults = Faults(store, patch)
        # The limit of one rank ends all of them, also those that would go on.
        limit = Async(on_error="warn", max_unsaved_steps=3 if rank == 1 else None)
        assert store.commit_async(state(rank, 1), ranks=OWN, step=1, background=limit).wait()
        faults.error = NoSpace("the disk is full") if rank == 2 else None
        for step in (2, 3, 4):
            assert store.commit_async(
                state(rank, step), ranks=OWN, step=step, background=limit
            ).ended(120)
        with pytest.raises(Unavailable, match="max_unsaved_steps is 3"):
            store.commit_async(state(rank, 5), ranks=OWN, step=5, background=limit)
        faults.error = Corrupt("look at it") if rank == 2 else None
        unlimited = Async(on_error="warn")
        assert store.commit_async(state(rank, 6), ranks=OWN, step=6, background=unlimited).ended(
            120
        )
        with pytest.raises(Corrupt, match="look at it"):
            store.commit_async(state(rank, 7), ranks=OWN, step=7, background=unlimited)
        faults.error = None
        assert (
            store.commit_async(state(rank, 8), ranks=OWN, step=8, background=unlimited).wait().step
            == 8
        )


def test_all_ranks_end(pool: Pool, tmp_path: Path) -> None:
    pool.run(end_together, tmp_path / "store")


def skip_while_one_hangs(rank: int, path: Path) -> None:
    meet(N)
    quick = Async(on_error="warn", max_wait_s=0)
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path, background=quick) as store:
        faults = Faults(store, patch)
        if rank == 2:
            with faults.held():
                first = store.commit_async(state(rank, 1), ranks=OWN, step=1)
                assert faults.there.wait(60)
                second = store.commit_async(state(rank, 2), ranks=OWN, step=2)
        else:
            first = store.commit_async(state(rank, 1), ranks=OWN, step=1)
            second = store.commit_async(state(rank, 2), ranks=OWN, step=2)
        assert isinstance(second.exception(120), Unavailable)
        assert first.wait(120).step == 1
        patient = Async(on_error="warn")
        assert (
            store.commit_async(state(rank, 3), ranks=OWN, step=3, background=patient).wait().step
            == 3
        )


def test_all_ranks_skip_a_commit_while_the_storage_of_one_hangs(pool: Pool, tmp_path: Path) -> None:
    pool.run(skip_while_one_hangs, tmp_path / "store")
