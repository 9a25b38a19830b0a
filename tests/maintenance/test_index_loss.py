"""Losing indexes loses nothing: deleted, truncated, outdated or foreign ones, even under an open
store."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckptstore
from ckptstore.store import Store
from tests.maintenance.stores import assert_restores, check, copy_of, make_store, state
from tests.support.checker import assert_acknowledged, assert_sound
from tests.support.fork_server import Child, Nursery
from tests.support.workloads import contents_of


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stranger") / "store", steps=2)


def remove(path: Path, *_: Path) -> None:
    path.unlink()


def truncate(path: Path, *_: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, *_: Path) -> None:
    path.write_bytes(b"")


def fill_with_noise(path: Path, *_: Path) -> None:
    replace_file(path, bytes(range(256)) * (path.stat().st_size // 256))


def replace_file(path: Path, data: bytes) -> None:
    """As a backup tool does: another file under the same name, not other bytes in a file that
    somebody has mapped."""
    new = path.with_name(path.name + ".restored")
    new.write_bytes(data)
    new.replace(path)


def old_copy(path: Path, old: Path, other: Path) -> None:
    replace_file(path, old.read_bytes())


def of_another_store(path: Path, old: Path, other: Path) -> None:
    replace_file(path, other.read_bytes())


FILES = {
    "catalog": ("catalog.sqlite",),
    "chunk index": ("chunks.lmdb/data.mdb",),
    "both": ("catalog.sqlite", "chunks.lmdb/data.mdb"),
}
HOW = (remove, truncate, empty, fill_with_noise, old_copy, of_another_store)


@dataclass(frozen=True)
class ToFiles:
    """`how` done to each of `files` of an index; SQLite's other files go with a catalog that is
    gone or another."""

    how: Callable[[Path, Path, Path], None]
    files: tuple[str, ...]

    def __call__(self, index: Path, old: Path, other: Path) -> None:
        for name in self.files:
            self.how(index / name, old / name, other / name)
            if self.how in (remove, old_copy, of_another_store):
                for more in index.glob(f"{name}-*"):
                    more.unlink()


def remove_all(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index)


def swap_all(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index)
    shutil.copytree(other, index)


def becomes_a_file(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index)
    index.write_bytes(b"not a directory")


Damage = Callable[[Path, Path, Path], None]
DAMAGES: dict[str, Damage] = {
    **{
        f"{how.__name__}, {which}": ToFiles(how, files)
        for how in HOW
        for which, files in FILES.items()
    },
    "remove all": remove_all,
    "swap all": swap_all,
    "becomes a file": becomes_a_file,
}


def answers(store: Store) -> tuple[Any, ...]:
    """Everything that the indexes answer: commits with lineage and metrics, tags, runs."""
    return (
        [repr(asdict(info)) for info in store.log()],
        sorted(map(repr, store.tags().items() if isinstance(store.tags(), dict) else store.tags())),
        sorted(map(repr, store.runs())),
        store.checkout("best:loss").id,
        store.checkout("moved").id,
        store.checkout("latest~1").id,
    )


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_lost_index_costs_nothing(
    store: Path, stranger: Path, tmp_path: Path, damage: Damage
) -> None:
    old = tmp_path / "old"
    shutil.copytree(store / "index", old)
    with ckptstore.open(store) as opened:
        opened.commit(state(3), step=3, metrics={"loss": 0.01}, tag="newest")
        wanted = answers(opened)
    damage(store / "index", old, stranger / "index")
    with ckptstore.open(store) as opened:
        assert answers(opened) == wanted
        for step in range(4):
            assert_restores(opened, step, step)
        opened.commit(state(4), step=4)
    with ckptstore.open(store) as opened:
        assert_restores(opened, 4, 4)
        assert len(opened.log(run="main")) == 5
    if (store / "index").is_dir():
        assert check(store).findings == ()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_lost_index_beneath_an_open_store_costs_nothing(
    store: Path, stranger: Path, tmp_path: Path, damage: Damage
) -> None:
    old = tmp_path / "old"
    shutil.copytree(store / "index", old)
    with ckptstore.open(store) as opened:
        opened.commit(state(3), step=3, metrics={"loss": 0.01}, tag="newest")
        wanted = answers(opened)
        damage(store / "index", old, stranger / "index")
        for step in range(4):
            assert_restores(opened, step, step)
        assert answers(opened) == wanted
        damage_again = remove_all if (store / "index").is_dir() else None
        opened.commit(state(4), step=4)
        assert_restores(opened, 4, 4)
        if damage_again:
            damage_again(store / "index", old, stranger / "index")
        opened.commit(state(5), step=5)
        assert [info.step for info in opened.log(run="main")] == [5, 4, 3, 2, 1, 0]
    with ckptstore.open(store) as opened:
        for step in range(6):
            assert_restores(opened, step, step)


CATALOGS = {name: damage for name, damage in DAMAGES.items() if not name.endswith("chunk index")}


@pytest.mark.parametrize("damage", CATALOGS.values(), ids=CATALOGS)
def test_a_catalog_that_is_lost_between_two_questions_is_asked_on(
    store: Path, stranger: Path, tmp_path: Path, damage: Damage
) -> None:
    old = tmp_path / "old"
    shutil.copytree(store / "index", old)
    with ckptstore.open(store) as opened:
        opened.commit(state(3), step=3, tag="newest")
        queries = opened._handle.queries()
        commits, tags = queries.log(), queries.tags()
        damage(store / "index", old, stranger / "index")
        assert (queries.log(), queries.tags()) == (commits, tags)


BENEATH = [
    damage
    for name, damage in DAMAGES.items()
    if not name.startswith(("truncate", "empty", "becomes"))
]
"""What leaves the files whole that somebody has mapped: a file that is cut in the microseconds in
which liblmdb reads it ends a process."""


def _lose_indexes(times: int, stranger: Path, scratch: Path, nursery: Nursery, seed: int) -> int:
    """How many commits were acknowledged meanwhile; all are there."""
    place, old, random = scratch / "store", scratch / "old", Random(seed)
    child = nursery.start("change_on", place=str(place), first=1000).go()
    try:
        for n in range(times):
            _wait_for_commits(child, 2)
            if not n:
                with child.stopped():  # files that come and go cannot be copied
                    shutil.copytree(place / "index", old)
            damage = random.choice(BENEATH)
            with suppress(
                OSError
            ):  # the trainer is making or replacing just now what was to go or to come
                damage(place / "index", old, stranger / "index")
        _wait_for_commits(child, 2)
    finally:
        child.kill()
    assert not child.reports("error"), (seed, child.reports("error"))
    acknowledged = assert_acknowledged(place, child, f"seed {seed}")
    assert acknowledged > 2 * times
    assert_sound(place, contents_of(place))
    return acknowledged


def _wait_for_commits(child: Child, more: int) -> None:
    wanted = len(child.reports("committed")) + more
    while len(child.reports("committed")) < wanted:
        assert child.alive(), "the trainer died"
        time.sleep(0.001)


def test_a_running_trainer_loses_its_indexes_and_nothing_else(
    stranger: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    _lose_indexes(5, stranger, scratch, nursery, seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_running_trainer_loses_its_indexes_a_hundred_times(
    stranger: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    print(
        f"100 losses, {_lose_indexes(100, stranger, scratch, nursery, seed)} acknowledged commits, "
        "none lost"
    )


def test_reindex_gives_the_same_answers(store: Path) -> None:
    with ckptstore.open(store) as opened:
        wanted = answers(opened)
        done = opened.reindex()
        assert (done.entries, done.commits, done.unreadable) == (5, 4, 0)
        assert answers(opened) == wanted
        assert_restores(opened, 1, 1)
        opened.commit(state(1), step=9)
    assert check(store).findings == ()


def test_a_store_moved_to_another_place_takes_its_index_along(store: Path, tmp_path: Path) -> None:
    copy = copy_of(store, tmp_path / "elsewhere")
    with ckptstore.open(store) as here, ckptstore.open(copy) as there:
        assert answers(here) == answers(there)
        there.commit(state(3), step=3)
        assert len(here.log(run="main")) == 3
        assert len(there.log(run="main")) == 4
