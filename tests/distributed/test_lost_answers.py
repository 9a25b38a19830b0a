"""What ranks committed follows what they committed before, although the log's answer was lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import ckptstore
from ckptstore import Async, Ranks
from ckptstore.distributed import worker_client, worker_process
from ckptstore.distributed.worker_process import Message
from ckptstore.errors import CkptStoreError
from ckptstore.interop.dcp import StoreWriter
from ckptstore.log.entries import Entry
from ckptstore.log.log import Log
from ckptstore.store import Store
from tests.distributed.layouts import full, group_of, layout, meet, placed
from tests.distributed.pool import Pool
from tests.support.faults import Fate, LostAnswers, assert_one_line

N = 2


def now(store: Store, step: int, state: dict[str, Any], ranks: Ranks) -> None:
    store.commit(state, step=step, ranks=ranks)


def behind(store: Store, step: int, state: dict[str, Any], ranks: Ranks) -> None:
    pending = store.commit_async(state, step=step, ranks=ranks, background=Async(on_error="warn"))
    pending.wait()


def by_dcp(store: Store, step: int, state: dict[str, Any], ranks: Ranks) -> None:
    writer = StoreWriter(store, step=step)
    dcp.save(state, storage_writer=writer, process_group=ranks.process_group)


def lose_answers(
    rank: int, path: Path, seed: int, commit: Callable[[Store, int, dict[str, Any], Ranks], None]
) -> list[int]:
    """The steps that were acknowledged."""
    meet(4)
    meet(N)
    if rank >= N:
        return []
    random, done, ranks = Random(seed), list[int](), Ranks(process_group=group_of(N), timeout_s=60)
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store:
        answers = LostAnswers(store, patch)
        for step in range(8):
            drawn = random.choice([*Fate, None]) if step < 7 else None
            answers.left = [drawn] if rank == 0 and drawn else []
            try:
                commit(store, step, {"model": {"rows": layout("rows", full() + step, N)}}, ranks)
            except (CkptStoreError, dcp.api.CheckpointException):
                assert drawn
            else:
                done.append(step)
    return done


@pytest.mark.parametrize("commit", [now, behind, by_dcp])
def test_a_commit_of_ranks_follows_the_one_before_although_that_said_it_had_failed(
    pool: Pool, tmp_path: Path, seed: int, commit: Callable[..., None]
) -> None:
    done, *others = pool.run(lose_answers, tmp_path / "store", seed, commit)
    assert others == [done, [], []] and 7 in done
    with ckptstore.open(tmp_path / "store") as store:
        assert_one_line(store, set(done))


def lose_leaders(
    rank: int, path: Path, seed: int, commit: Callable[[Store, int, dict[str, Any], Ranks], None]
) -> list[int]:
    """The steps that were acknowledged. After some, the first rank leaves, and the next one
    leads."""
    random, done = Random(seed), list[int]()
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store:
        answers = LostAnswers(store, patch)
        for step in range(8):
            first, drawn = step // 3, random.choice([*Fate, None])
            drawn = {1: None, 2: Fate.MADE}.get(step, drawn)
            ranks = [*range(first, 3)]
            if step % 3 == 0:
                dist.barrier()
                if random.random() < 0.5:
                    answers.arrive()
                dist.barrier()
                group: Any = "alone" if first == 2 else dist.new_group(ranks)
            if rank not in ranks:
                continue
            mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
            state = {"model": {"rows": placed(full() + step, mesh, (Shard(0),))}}
            answers.left = [drawn] if rank == first and drawn and step < 7 else []
            try:
                commit(store, step, state, Ranks(process_group=group, timeout_s=60))
            except CkptStoreError:
                assert drawn
            else:
                done.append(step)
    return done


@pytest.mark.parametrize("commit", [now, behind])
def test_ranks_that_are_left_follow_what_the_first_one_asked_for_before_it_left(
    pool: Pool, tmp_path: Path, seed: int, commit: Callable[..., None]
) -> None:
    done = pool.run(lose_leaders, tmp_path / "store", seed, commit)
    assert 7 in done[2] and done[3] == []
    with ckptstore.open(tmp_path / "store") as store:
        assert_one_line(store, set(done[2]))


def pause_the_leader(rank: int, path: Path, made: Path) -> None:
    """Rank 0 stands still before its second entry until the other one, which has given up, has made
    a commit alone."""
    meet(4)
    meet(N)
    if rank >= N:
        return
    state, ranks = {"at": 0}, Ranks(process_group=group_of(N), timeout_s=3)
    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store:
        store.commit(state, step=0, ranks=ranks)
        if rank == 0:
            append = Log.append

            def paused(*given: Any, **named: Any) -> Entry:
                while not made.exists():
                    time.sleep(0.05)
                return append(*given, **named)

            patch.setattr(Log, "append", paused)
        with pytest.raises(CkptStoreError):
            store.commit(state, step=1, ranks=ranks)
        if rank == 1:
            store.commit(state, step=2, ranks=Ranks(process_group="alone"))
            made.touch()


def test_a_leader_that_stood_still_adds_nothing_once_others_have_gone_on(tmp_path: Path) -> None:
    pool = Pool(4)
    try:
        pool.run(pause_the_leader, tmp_path / "store", tmp_path / "made")
    finally:
        pool.close()
    with ckptstore.open(tmp_path / "store") as store:
        assert_one_line(store, {0, 2})
        assert len(store.log()) == 2


def lose_a_worker(rank: int, path: Path) -> None:
    meet(4)
    meet(N)
    if rank >= N:
        return
    ranks, lost = Ranks(process_group=group_of(N), timeout_s=60), [rank == 0, False]

    def receive(connection: Any) -> Message | None:
        message = worker_process.receive(connection)
        if message and "done" in message and lost and lost.pop():
            assert store.worker_pid
            os.kill(store.worker_pid, signal.SIGKILL)
            return None
        return message

    process = Async(executor="process", on_error="warn")
    with (
        pytest.MonkeyPatch.context() as patch,
        ckptstore.open(path, background=process) as store,
    ):
        patch.setattr(worker_client, "receive", receive)
        for step in range(3):
            state = {"model": {"rows": layout("rows", full() + step, N)}}
            assert store.commit_async(state, step=step, ranks=ranks).ended(120)
        assert not lost


def test_a_commit_of_ranks_is_followed_although_its_worker_died_before_it_said_so(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(lose_a_worker, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert_one_line(store, {0, 1, 2})
