"""Worker processes make the commits of many ranks: the same commits even if trainers die, and an
error if a worker dies.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptstore
from tests.commit.states import Gate
from tests.distributed.layouts import group_of, meet
from tests.distributed.pool import Pool
from tests.distributed.test_background import KIB, a_state
from tests.support.checker import assert_no_garbage_after_gc, assert_sound
from tests.support.fixtures import nursery, scratch
from tests.support.fork_server import Nursery
from tests.support.workloads import contents_of

__all__ = ["nursery", "scratch"]

GONE_S = 60.0


def is_gone(pid: int) -> bool:
    try:
        # Its main thread may be a zombie while others still end.
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            and len(os.listdir(f"/proc/{pid}/task")) == 1
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int]) -> None:
    _wait(lambda: all(map(is_gone, pids)), f"the end of workers {pids}")


def commit_by_workers(rank: int, path: Path) -> list[str] | None:
    """Commits of ranks 0 and 1, each overwritten as soon as the call returns, and the expected
    values.
    """
    n = 2
    meet(n)
    if rank >= n:
        return None
    ranks = ckptstore.Ranks(process_group=group_of(n), private=["own/*"], timeout_s=60)
    links = {"rank": str(rank)}
    with ckptstore.open(
        path,
        storage=ckptstore.Storage(chunk_bytes=64 * KIB),
        background=ckptstore.Async(executor="process"),
    ) as store:
        pending = []
        for step in range(3):
            state = a_state(rank, n, step)
            pending.append(
                store.commit_async(
                    state,
                    step=step,
                    message="said",
                    metrics={"loss": 0.5},
                    tag="t",
                    links=links,
                    ranks=ranks,
                )
            )
            state["model"]["rows"]._local_tensor.fill_(-7)
            state["model"]["whole"].fill_(-7)
            state["own"]["noise"].fill_(-7)
        made = [each.wait() for each in pending]
        assert (
            store.worker_pid and "torch" not in Path(f"/proc/{store.worker_pid}/maps").read_text()
        )
        assert [snapshot.parents for snapshot in made[1:]] == [
            (snapshot.id,) for snapshot in made[:-1]
        ]
        last = pending[-1].timings
        assert None not in (
            last.held_s,
            last.staged_s,
            last.hashed_s,
            last.written_s,
            last.durable_s,
        )
        assert (
            made[-1].metrics == {"loss": 0.5}
            and made[-1].message == "said"
            and made[-1].tags == ("t",)
        )
        again = store.commit(a_state(rank, n, 2), links=links, ranks=ranks)
        assert again.content_id == made[-1].content_id
        assert again.links == made[-1].links == {"rank": "0"}  # those of the first rank count
        with ckptstore.open(path) as other:  # by a thread
            threads = other.commit_async(a_state(rank, n, 2), ranks=ranks).wait()
        assert (
            threads.content_id == made[-1].content_id
            and threads.stats
            and threads.stats.new_bytes < 64 * KIB
        )
        with pytest.raises(ckptstore.InvalidInput, match="leave out"):
            store.commit_async(state, ranks=ranks, background=ckptstore.Async(trust_version=True))
    return [snapshot.id for snapshot in made]


def test_workers_commits_are_those_of_threads(pool: Pool, tmp_path: Path) -> None:
    first, second, *_ = pool.run(commit_by_workers, tmp_path / "store")
    assert first == second
    with ckptstore.open(tmp_path / "store") as store:
        for step, commit in enumerate(first):
            assert torch.equal(
                store.checkout(commit).read("own/noise/1"), torch.full((3000,), 1.0 + step)
            )
        assert not store.fsck(read_data="100%").damaged


def lose_workers(rank: int, path: Path) -> list[str] | None:
    """Each rank's worker is killed during a commit, then one while it is idle."""
    n = 2
    meet(n)
    if rank >= n:
        return None
    ranks = ckptstore.Ranks(process_group=group_of(n), private=["own/*"], timeout_s=60)
    with ckptstore.open(
        path,
        storage=ckptstore.Storage(chunk_bytes=64 * KIB),
        background=ckptstore.Async(executor="process"),
    ) as store:
        for victim in (1, 0):
            gate = Gate("hashed") if rank == victim else None
            pending = store.commit_async(
                a_state(rank, n, 1), background=ckptstore.Async(on_progress=gate), ranks=ranks
            )
            if gate:
                gate.there.wait()
                pid = store.worker_pid
                assert pid
                os.kill(pid, signal.SIGKILL)
                gate.opened.set()
            error = pending.exception()
            assert isinstance(error, ckptstore.Unavailable) and list(error.causes) == [victim], (
                error
            )
            assert store.log() == []
        before = store.commit_async(a_state(rank, n, 2), ranks=ranks).wait()
        pid = store.worker_pid
        assert pid
        if rank == 1:
            os.kill(pid, signal.SIGKILL)
            wait_gone([pid])
        dist.barrier(group_of(n))
        after = store.commit_async(a_state(rank, n, 2), ranks=ranks).wait()
        assert after.content_id == before.content_id and (store.worker_pid == pid) == (rank == 0)
        return [before.id, after.id]


def test_a_workers_death_is_every_ranks_error_and_the_next_commit_has_another(
    pool: Pool, tmp_path: Path
) -> None:
    first, second, *_ = pool.run(lose_workers, tmp_path / "store")
    assert first == second and len(set(first)) == 2
    with ckptstore.open(tmp_path / "store") as store:
        assert not store.fsck(read_data="100%").damaged


def fail_and_call_off(rank: int, path: Path) -> None:
    n = 2
    meet(n)
    if rank >= n:
        return
    ranks = ckptstore.Ranks(process_group=group_of(n), timeout_s=60)
    with ckptstore.open(path, background=ckptstore.Async(executor="process")) as store:
        error = store.commit_async(
            {"x": {"a": torch.full((5000,), float(rank))}},
            ranks=replace(ranks, replicated=["x/*"]),
        ).exception()
        assert (
            isinstance(error, ckptstore.Conflict)
            and "x/a is one tensor" in str(error)
            and error.causes
        )
        gate = Gate("hashed") if rank == 1 else None
        pending = store.commit_async(
            a_state(rank, n, 1), background=ckptstore.Async(on_progress=gate), ranks=ranks
        )
        if gate:
            gate.there.wait()
            assert pending.cancel()
            gate.opened.set()
        assert isinstance(pending.exception(), ckptstore.Cancelled)
        assert store.log() == []
        dist.barrier(group_of(n))  # before the other rank has looked there is no commit
        alone = store.commit_async(
            {"x": torch.full((5000,), float(rank))},
            ranks=ckptstore.Ranks(process_group="alone"),
            tag=f"of-{rank}",
        ).wait()
        assert torch.equal(alone.read("x"), torch.full((5000,), float(rank)))
        store.commit_async(a_state(rank, n, 3), step=3, ranks=ranks).wait()


def test_what_fails_in_one_worker_fails_on_all_ranks_and_nothing_is_left_over(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(fail_and_call_off, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert store.log()[0].step == 3


class Job:
    """Two trainers in sessions of their own, which commit small states from step `first` on."""

    def __init__(self, nursery: Nursery, place: Path, first: int, held: list[int]) -> None:
        given: dict[str, Any] = {
            "place": str(place),
            "meeting": str(place.with_name(f"meeting-{first}")),
            "size": 2,
            "first": first,
        }
        self._alive = {0, 1}
        self.trainers = [
            nursery.start("commit_together_on", rank=rank, held=rank in held, **given).go()
            for rank in range(2)
        ]

    def wait(self, kind: str, ranks: list[int], count: int = 1) -> None:
        """Wait until each of `ranks` has printed this line."""
        _wait(
            lambda: all(len(self.trainers[rank].reports(kind)) >= count for rank in ranks),
            f"{kind} on ranks {ranks}",
        )

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.killpg(self.trainers[rank].pid, signal.SIGKILL)
        for rank in ranks:
            self.trainers[rank].wait()
            self._alive.remove(rank)

    def said(self, kind: str) -> set[int]:
        """The steps of this line on any rank."""
        return {int(report[0]) for trainer in self.trainers for report in trainer.reports(kind)}

    def end(self) -> None:
        """Kill the remaining trainers and wait for the workers to end."""
        self.kill(sorted(self._alive))
        wait_gone([int(pid) for trainer in self.trainers for (pid,) in trainer.reports("worker")])


def steps_at(place: Path) -> set[int]:
    with ckptstore.open(place) as store:
        return {info.step for info in store.log() if info.step is not None}


def test_workers_finish_the_commit_of_trainers_that_were_killed(
    scratch: Path, nursery: Nursery
) -> None:
    """First all trainers are killed, then only the coordinator's, and the other one gets its
    commit.
    """
    place = scratch / "store"
    job = Job(nursery, place, 1, held=[0, 1])
    job.wait("hashed", [0, 1])
    job.kill([0, 1])
    job.end()
    assert steps_at(place) == {1}
    job = Job(nursery, place, 2, held=[0])
    job.wait("hashed", [0, 1])
    job.kill([0])
    job.wait("alone", [1])
    job.end()
    assert steps_at(place) == {1, 2} and job.said("durable") == {2} and job.said("alone") == {3}
    assert_sound(place, contents_of(place))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_trainers_and_workers_killed_at_any_moment(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    random, place, finished, survived = Random(seed), scratch / "store", 0, 0
    for n in range(60):
        job = Job(nursery, place, 1000 * n, held=[])
        job.wait("hashed", [0, 1], random.randrange(1, 4))
        time.sleep(random.uniform(0, 0.05))
        victims = random.choice([[0], [1], [0, 1]])
        if n % 2:
            job.kill(victims)
            surely = job.said("hashed")
            finished += len(surely)
        else:
            for rank in victims:
                os.kill(int(job.trainers[rank].reports("worker")[-1][0]), signal.SIGKILL)
            durable = len(job.said("durable"))
            _wait(
                lambda job=job, durable=durable: len(job.said("durable")) >= durable + 3,
                "commits after a worker's death",
            )
            surely, survived = job.said("durable"), survived + 1
        job.end()
        assert surely <= steps_at(place), f"kill {n} of seed {seed}"
    contents = contents_of(place)
    assert_sound(place, contents)
    assert_no_garbage_after_gc(place, contents)
    print(
        f"{finished} commits of killed trainers, all there; workers killed {survived} times, the "
        "next commit was made each time"
    )


def _wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GONE_S
    while not until():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
