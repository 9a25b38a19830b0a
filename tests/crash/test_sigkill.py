"""SIGKILL at any system call that changes something: what a child was killed at, the next process
cleans up after."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from shutil import copytree, rmtree

import pytest

from ckptstore.errors import CkptStoreError
from tests.support import strace
from tests.support.checker import View, assert_no_garbage_after_gc, assert_sound, view_of
from tests.support.fork_server import Nursery
from tests.support.strace import every_call, traced
from tests.support.workloads import STORE, WORKS, contents_of, is_store, open_small, small

SAMPLED = 6
SIGKILL = -9


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


def _killed_at(
    calls: Sequence[tuple[str, int]], name: str, base: Path, scratch: Path, nursery: Nursery
) -> None:
    old = view_of(base / STORE) if WORKS[name].commits else View()
    changes = view_of(scratch / "counted" / STORE) != old
    for call, n in calls:
        disk = copytree(base, scratch / "disk")
        child = nursery.start("work", disk=str(disk), name=name)
        code = traced(child, scratch / "log", "-e", f"inject={call}:signal=SIGKILL:when={n}")
        done = bool(child.reports("done"))
        try:
            assert code == SIGKILL or done, f"exit code {code}: {child.reports('error')}"
            _check(disk, old, must_differ=done and changes)
        except (AssertionError, CkptStoreError) as error:
            error.add_note(f"killed at {call} number {n}")
            raise
        rmtree(disk)


def _check(disk: Path, old: View, *, must_differ: bool) -> None:
    if not is_store(disk / STORE):
        with open_small(disk) as store:
            store.commit(small(0), step=0)
    contents = contents_of(disk / STORE)
    seen = assert_sound(disk / STORE, contents)
    assert old.live <= seen.commits
    assert seen != old or not must_differ, "acknowledged, and lost"
    assert_no_garbage_after_gc(disk / STORE, contents)


def _calls(name: str, base: Path, scratch: Path, nursery: Nursery) -> list[tuple[str, int]]:
    disk = copytree(base, scratch / "counted")
    assert not traced(nursery.start("work", disk=str(disk), name=name), scratch / "log")
    return every_call(scratch / "log")


@pytest.mark.parametrize("name", ["a commit", "a gc with repack"])
def test_killed_at_some_calls(name: str, scratch: Path, nursery: Nursery, seed: int) -> None:
    base = WORKS[name].base(scratch / "base")
    calls = Random(seed).sample(_calls(name, base, scratch, nursery), SAMPLED)
    _killed_at(calls, name, base, scratch, nursery)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORKS)
def test_killed_at_every_call(name: str, scratch: Path, nursery: Nursery) -> None:
    base = WORKS[name].base(scratch / "base")
    calls = _calls(name, base, scratch, nursery)
    _killed_at(calls, name, base, scratch, nursery)
    print(f"{name}: killed at each of {len(calls)} calls")
