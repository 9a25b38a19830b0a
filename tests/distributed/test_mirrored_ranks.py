"""Ranks of one host commit to its disk or memory, and one of them uploads to a mirror."""

from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
import torch

import ckptstore
from ckptstore import KeepLast, Mirror, Storage
from ckptstore.errors import InvalidInput, NoSpace, Unavailable
from ckptstore.plugins.tiers import tiers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.store import Store
from tests.distributed.layouts import full, layout, local, meet
from tests.distributed.pool import Pool
from tests.distributed.tier_lives import play
from tests.support import mounts

N = 4


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"rows": layout("rows", full() + step, N)}}


def opened(path: Path, every: int = 1, **keep: KeepLast) -> Store:
    mirror = Mirror(path / "mirror", every_steps=every, **keep)
    return ckptstore.open(path / "local", mirror=mirror, storage=Storage(chunk_bytes=64 << 10))


def train(rank: int, path: Path) -> list[str]:
    meet(N)
    progress: list[str] = []
    background = ckptstore.Async(on_progress=lambda each: progress.append(each.milestone))
    with opened(path) as store:
        made = store.commit(state(1), step=1)
        pending = store.commit_async(state(2), step=2, background=background)
        assert pending.wait(60, until="mirrored").parents == (made.id,)
        with ckptstore.open(path / "mirror", read_only=True) as mirror:
            assert [info.step for info in mirror.log()] == [2, 1]
        # Only the rank that uploads knows when the upload ended.
        assert ("mirrored" in progress) == (rank == 0)
        assert (pending.timings.mirrored_s is not None) == (rank == 0)
        with pytest.raises(InvalidInput, match="wanted 'durable' or 'mirrored'"):
            pending.wait(until="copied")  # type: ignore[arg-type]
        return [info.id for info in store.log()]


def resume(rank: int, path: Path, step: int) -> str:
    meet(N)
    with opened(path) as store:
        target = state(0)
        found = store.resume(target)
        assert found is not None and found.step == step
        assert torch.equal(local(target["model"]["rows"]), local(state(step)["model"]["rows"]))
        after = store.commit(state(step + 1), step=step + 1)
        assert after.parents == (found.id,)
        assert store.flush_mirror(60)
        return found.id


def test_ranks_resume_from_their_disk_and_from_the_mirror(pool: Pool, tmp_path: Path) -> None:
    ids = pool.run(train, tmp_path)
    assert ids == ids[:1] * N
    assert pool.run(resume, tmp_path, 2) == [ids[0][0]] * N
    rmtree(tmp_path / "local")
    resumed = pool.run(resume, tmp_path, 3)
    assert resumed == resumed[:1] * N
    with ckptstore.open(tmp_path / "mirror") as mirror:
        assert [info.step for info in mirror.log()] == [4, 3, 2, 1]
        assert torch.equal(mirror.checkout(4).read("model/rows"), full() + 4)


def upload_some(rank: int, path: Path) -> list[int | None]:
    meet(N)
    with opened(path, every=3, keep_local=KeepLast(2)) as store:
        for step in range(1, 9):
            store.commit(state(step), step=step, tag="kept" if step == 3 else ())
        assert store.flush_mirror(60)
        assert store.flush_mirror(60)  # nothing more
    with ckptstore.open(path / "mirror", read_only=True) as mirror:
        return [info.step for info in mirror.log()]


def test_some_commits_are_uploaded_and_a_newer_one_lets_the_others_go(
    pool: Pool, tmp_path: Path
) -> None:
    steps = pool.run(upload_some, tmp_path)[0]
    # The newest and the tagged one in any case; how many between depends on when it looked.
    assert {8, 3} <= set(steps) and len(steps) < 8
    with ckptstore.open(tmp_path / "local") as store:
        assert [info.step for info in store.log()] == [8, 7, 3]
        assert not store.fsck(read_data="100%").damaged


def fill_memory(rank: int, path: Path) -> None:
    meet(N)
    careful = ckptstore.Async(on_error="warn", max_wait_s=60)
    mirror = Mirror(path / "mirror", keep_local=KeepLast(1))
    opened, away = tiers.Tier._opened, [True]

    def unless_away(tier: tiers.Tier) -> StoreHandle:
        if away[0]:
            raise Unavailable("the network is down")
        return opened(tier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers.Tier, "_opened", unless_away)
        with ckptstore.open(path / "memory" / "run", mirror=mirror, background=careful) as store:
            done = []
            for step in range(1, 25):
                pending = store.commit_async(state(step), step=step)
                assert pending.ended(60)
                done += [] if pending.failure() else [step]
            assert 1 < len(done) < 24 and store.health().failures, done
            away[0] = False
            with pytest.raises(NoSpace):  # of the last commit, which no newer one has replaced
                store.flush_mirror(60)
            assert store.flush_mirror(60)
            store.commit_async(state(25), step=25).wait(60, until="mirrored")
            assert store.health().failures == 0
    with ckptstore.open(path / "mirror", read_only=True) as there:
        assert [info.step for info in there.log()] == [25, *done[::-1]]


def test_full_memory_ends_no_training_and_is_trimmed_when_the_mirror_is_back(
    pool: Pool, tmp_path: Path
) -> None:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)
    with mounts.small_disk(tmp_path / "memory", size_bytes=5 << 20):
        pool.run(fill_memory, tmp_path)


def test_a_killed_training_resumes_what_it_could_have(tmp_path: Path) -> None:
    assert play(tmp_path, seed=3, lives=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_500_lives_of_trainings(tmp_path: Path) -> None:
    happened: set[str] = set()
    for seed in range(100):
        (folder := tmp_path / str(seed)).mkdir()
        happened |= play(folder, seed, lives=5)
        rmtree(folder)
    assert {"killed", "ended", "disk lost", "bit flipped", "pack lost", "mirror away"} <= happened


def resume_while_older_ones_go(rank: int, path: Path, *, mirrored: bool) -> int | None:
    meet(N)
    with opened(path) if mirrored else ckptstore.open(path / "alone") as store:
        for step in (1, 2, 3):
            store.commit(state(step), step=step)
        if mirrored:
            assert store.flush_mirror(60)
    with opened(path) if mirrored else ckptstore.open(path / "alone") as store:
        internals = store._internals
        listed, replay = internals._newest_first, internals.handle.log.replay
        if rank % 2:  # it hears of the gc
            internals.handle.log.replay = lambda refresh=False: replay(refresh=True)  # type: ignore[method-assign]

        def purging() -> object:
            found = listed()
            store.forget(KeepLast(1))
            store.gc(grace_s=0)
            return found

        internals._newest_first = purging  # type: ignore[method-assign, assignment]
        found = store.resume(state(0))
        assert not store.skipped
        return found.step if found else None


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_gc_of_older_commits_does_not_keep_ranks_from_the_newest(
    pool: Pool, tmp_path: Path, mirrored: bool
) -> None:
    """Some ranks had heard of the gc, and some had not."""
    assert pool.run(partial(resume_while_older_ones_go, mirrored=mirrored), tmp_path) == [3] * N
