"""Ctrl-C at any change, to the store or to an index: the store object that was interrupted goes on,
and nothing is lost."""

from pathlib import Path
from shutil import copytree, rmtree

import pytest

from ckptstore.errors import CkptStoreError
from tests.support.checker import (
    Contents,
    assert_no_garbage_after_gc,
    assert_same,
    assert_sound,
    view_of,
)
from tests.support.recording import Interrupted, interrupted
from tests.support.workloads import STORE, WORKS, contents_of, open_small, small

NEXT = 9


def _interrupt(name: str, disk: Path, after: int, contents: Contents) -> bool:
    """Whether there was still something to interrupt after so many changes."""
    work = WORKS[name]
    before = view_of(disk / STORE)
    with interrupted(disk, after):
        store = None
        try:
            store = open_small(disk)
            work.do(store)
        except Interrupted:
            store = store or open_small(disk)
        else:
            store.close()
            return False
        with store:
            new = store.commit(small(NEXT), step=NEXT)
            found = {commit: store.checkout(commit) for commit in view_of(disk / STORE).commits}
    wanted = {
        commit: contents[commit] if commit in contents else small(snapshot.step or 0)
        for commit, snapshot in found.items()
    }
    assert before.live <= wanted.keys()
    assert_same(new.state_dict(), small(NEXT), "the next commit")
    assert_sound(disk / STORE, wanted)
    assert_no_garbage_after_gc(disk / STORE, wanted)
    return True


def _every(name: str, scratch: Path, first: int, every: int) -> int:
    """How many changes there were, each `every`th of which was interrupted."""
    base = WORKS[name].base(scratch / "base")
    contents = contents_of(copytree(base, scratch / "looked at") / STORE)
    after, goes_on = first, True
    while goes_on:
        disk = copytree(base, scratch / "disk")
        try:
            goes_on = _interrupt(name, disk, after, contents)
        except (AssertionError, CkptStoreError) as error:
            error.add_note(f"interrupted after {after} changes")
            raise
        rmtree(disk)
        after += every
    assert after > first + every
    return after


@pytest.mark.parametrize("name", ["a commit", "a gc with repack"])
def test_an_interrupted_store_goes_on(name: str, scratch: Path, seed: int) -> None:
    every = 9
    _every(name, scratch, seed % every, every)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name, work in WORKS.items() if work.commits])
def test_a_store_interrupted_anywhere_goes_on(name: str, scratch: Path) -> None:
    print(f"{name}: interrupted at each of {_every(name, scratch, 0, 1)} changes")
