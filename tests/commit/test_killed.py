"""A trainer killed at any moment of an asynchronous commit: nothing is torn."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckptstore
from ckptstore.core.ids import CommitId
from tests.support.checker import assert_no_garbage_after_gc, assert_sound, view_of
from tests.support.fixtures import nursery, scratch
from tests.support.fork_server import Nursery
from tests.support.workloads import contents_of

__all__ = ["nursery", "scratch"]

LONGEST_S = 0.05


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _kill(
    executor: str, times: int, scratch: Path, nursery: Nursery, seed: int, *, lazy: bool = False
) -> None:
    scenario = "commit_lazily_on" if lazy else "commit_async_on"
    random, place, finished = Random(seed), scratch / "store", 0
    for n in range(times):
        child = nursery.start(scenario, place=str(place), first=1000 * n, executor=executor).go()
        while len(child.reports("hashed")) < random.randrange(1, 4):
            time.sleep(0.001)
        time.sleep(random.uniform(0, LONGEST_S))
        child.kill()
        for (pid,) in child.reports("worker"):
            while not _is_gone(int(pid)):
                time.sleep(0.001)
        surely = {
            int(step) for (step,) in child.reports("hashed" if executor == "process" else "durable")
        }
        assert surely <= _steps(place), f"kill {n} of seed {seed}"
        finished += len(surely)
    contents = _stepped_contents_of(place) if lazy else contents_of(place)
    assert_sound(place, contents)
    assert_no_garbage_after_gc(place, contents)
    assert finished
    print(
        f"{executor}, {scenario}: {times} kills, {finished} commits that had to be there, all there"
    )


def _stepped_contents_of(place: Path) -> Mapping[CommitId, Mapping[str, Any]]:
    """What is there, if each commit is whole: all weights are its step."""
    contents = {}
    with ckptstore.open(place) as store:
        for commit in view_of(place).commits:
            snapshot = store.checkout(commit)
            contents[commit] = snapshot.state_dict()
            for name, weight in contents[commit]["weights"].items():
                assert weight.eq(snapshot.step).all(), (
                    f"{name} of the commit of step {snapshot.step}"
                )
    return contents


def _steps(place: Path) -> set[int]:
    with ckptstore.open(place) as store:
        return {info.step for info in store.log() if info.step is not None}


def test_a_killed_trainers_worker_finishes_its_commit(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    _kill("process", 1, scratch, nursery, seed)


def test_a_child_that_the_trainer_forked_does_not_keep_its_worker_waiting(
    scratch: Path, nursery: Nursery
) -> None:
    """It holds the trainer's end of everything, as a data loader's process does until it
    notices."""
    place = scratch / "store"
    trainer = nursery.start("commit_beside_a_child", place=str(place)).go()
    while not trainer.reports("hashed"):
        time.sleep(0.005)
    ((child,),), ((worker,),) = trainer.reports("child"), trainer.reports("hashed")
    trainer.kill()
    try:
        while not _is_gone(int(worker)):
            time.sleep(0.005)
        assert _steps(place) == {1, 2}
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_trainer_killed_a_hundred_times(
    executor: str, staging: str, scratch: Path, nursery: Nursery, seed: int
) -> None:
    _kill(executor, 100, scratch, nursery, seed, lazy=staging == "lazy")
