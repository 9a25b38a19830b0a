"""A crash while the catalog is migrated, made or folded: the next process has all of it, whatever
SQLite left."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from shutil import copytree, rmtree

import ckptstore
from ckptstore.repository.store_handle import CATALOG_NAME, CHUNKS_NAME
from tests.support.checker import assert_sound
from tests.support.recording import record
from tests.support.workloads import STORE, WORKS, contents_of, open_small

INDEX = Path(STORE, "index")


def _query(disk: Path) -> list[str]:
    with open_small(disk) as store:
        return [info.id for info in store.log()]


def _survives_a_crash_at_every_statement(base: Path, scratch: Path) -> int:
    """The number of states of the indexes that a crash could have left; of the last one, also with
    half of a file."""
    recording, wanted = record(base, scratch, _query)
    contents = contents_of(base / STORE)
    indexes = list(dict.fromkeys(recording.indexes))
    for index, torn in [
        *((index, None) for index in indexes),
        (indexes[-1], CATALOG_NAME),
        (indexes[-1], f"{CATALOG_NAME}-wal"),
    ]:
        disk = copytree(
            scratch / "recorded",
            scratch / "crashed",
            ignore=lambda folder, names: [n for n in names if n == INDEX.name],
        )
        if (index / INDEX).exists():
            copytree(index / INDEX, disk / INDEX)
        if torn and (file := disk / INDEX / torn).exists():
            os.truncate(file, file.stat().st_size // 2)
        assert_sound(disk / STORE, contents)
        assert _query(disk) == wanted
        rmtree(disk)
    return len(indexes)


def test_a_crash_while_the_catalog_is_migrated(scratch: Path) -> None:
    base = WORKS["a migration of the catalog"].base(scratch / "base")
    assert _survives_a_crash_at_every_statement(base, scratch) >= 3
    with closing(sqlite3.connect(scratch / "recorded" / INDEX / CATALOG_NAME)) as catalog:
        assert catalog.execute("SELECT count(*) FROM entries").fetchone() == (0,), (
            "made anew and not migrated"
        )


def test_a_crash_while_the_indexes_are_made(scratch: Path) -> None:
    base = WORKS["a commit"].base(scratch / "base")
    rmtree(base / INDEX)
    assert _survives_a_crash_at_every_statement(base, scratch) >= 3


def test_indexes_from_before_what_the_log_says_catch_up(scratch: Path) -> None:
    base = WORKS["a gc with repack"].base(scratch / "base")
    copytree(base / INDEX, scratch / "old")
    WORKS["a gc with repack"](base)
    rmtree(base / INDEX)
    copytree(scratch / "old", base / INDEX)
    assert (base / INDEX / CHUNKS_NAME).exists()
    with ckptstore.open(base / STORE) as store:
        for info in store.log():
            store.checkout(info.id).verify()
