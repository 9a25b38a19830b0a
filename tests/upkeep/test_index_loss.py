"""Indexes are caches: deleted, cut, replaced by an old copy or another store's, also beneath a store that is open, nothing is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.store import Store
from tests.upkeep.stores import assert_restores, check, copy_of, make_store, state

CATALOG, CHUNKS = "catalog.sqlite", "chunks.lmdb"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stranger") / "store", steps=2)


def remove(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index)


def remove_catalog(index: Path, old: Path, other: Path) -> None:
    for path in index.glob(f"{CATALOG}*"):
        path.unlink()


def remove_chunks(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index / CHUNKS)


def truncate(index: Path, old: Path, other: Path) -> None:
    for path in (index / CATALOG, index / CHUNKS / "data.mdb"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def empty(index: Path, old: Path, other: Path) -> None:
    for path in (index / CATALOG, index / CHUNKS / "data.mdb"):
        path.write_bytes(b"")


def fill_with_noise(index: Path, old: Path, other: Path) -> None:
    for path in (index / CATALOG, index / CHUNKS / "data.mdb"):
        replace_file(path, bytes(range(256)) * (path.stat().st_size // 256))


def replace_file(path: Path, data: bytes) -> None:
    """As a backup tool does: another file under the same name, not other bytes in a file that somebody has mapped."""
    new = path.with_name(path.name + ".restored")
    new.write_bytes(data)
    new.replace(path)


def old_copy(index: Path, old: Path, other: Path) -> None:
    swap(index, old)


def of_another_store(index: Path, old: Path, other: Path) -> None:
    swap(index, other / "index")


def swap(index: Path, source: Path) -> None:
    shutil.rmtree(index)
    shutil.copytree(source, index)


def becomes_a_file(index: Path, old: Path, other: Path) -> None:
    shutil.rmtree(index)
    index.write_bytes(b"not a directory")


Damage = Callable[[Path, Path, Path], None]
DAMAGES: list[Damage] = [
    remove,
    remove_catalog,
    remove_chunks,
    truncate,
    empty,
    fill_with_noise,
    old_copy,
    of_another_store,
    becomes_a_file,
]


def answers(store: Store) -> tuple[Any, ...]:
    """Everything that the indexes answer: commits with lineage and metrics, tags, runs."""
    return (
        [repr(info) for info in store.log(all_runs=True)],
        sorted(map(repr, store.tags().items() if isinstance(store.tags(), dict) else store.tags())),
        sorted(map(repr, store.runs())),
        store.checkout("best:loss").id,
        store.checkout("moved").id,
        store.checkout("latest~1").id,
    )


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_lost_index_costs_nothing(store: Path, stranger: Path, tmp_path: Path, damage: Damage) -> None:
    old = tmp_path / "old"
    shutil.copytree(store / "index", old)
    with ckptstore.open(store) as opened:
        opened.commit(state(3), step=3, metrics={"loss": 0.01}, tag="newest")
        wanted = answers(opened)
    damage(store / "index", old, stranger)
    with ckptstore.open(store) as opened:
        assert answers(opened) == wanted
        for step in range(4):
            assert_restores(opened, step, step)
        opened.commit(state(4), step=4)
    with ckptstore.open(store) as opened:
        assert_restores(opened, 4, 4)
        assert len(opened.log()) == 5
    if (store / "index").is_dir():
        assert check(store).findings == ()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_lost_index_beneath_an_open_store_costs_nothing(store: Path, stranger: Path, tmp_path: Path, damage: Damage) -> None:
    old = tmp_path / "old"
    shutil.copytree(store / "index", old)
    with ckptstore.open(store) as opened:
        opened.commit(state(3), step=3, metrics={"loss": 0.01}, tag="newest")
        wanted = answers(opened)
        damage(store / "index", old, stranger)
        for step in range(4):
            assert_restores(opened, step, step)
        assert answers(opened) == wanted
        damage_again = remove if (store / "index").is_dir() else None
        opened.commit(state(4), step=4)
        assert_restores(opened, 4, 4)
        if damage_again:
            damage_again(store / "index", old, stranger)
        opened.commit(state(5), step=5)
        assert [info.step for info in opened.log()] == [5, 4, 3, 2, 1, 0]
    with ckptstore.open(store) as opened:
        for step in range(6):
            assert_restores(opened, step, step)


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
        assert len(here.log()) == 3
        assert len(there.log()) == 4
