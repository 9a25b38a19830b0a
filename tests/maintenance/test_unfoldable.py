"""An entry that the log admitted and the catalog cannot take: nothing is lost from any listing, and
the entry is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.index import catalog_fold
from ckptstore.log.entries import Entry, Tag
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.stores import make_store

Add = Callable[[catalog_fold.CatalogFold, Entry], None]


def refuses_tags(add: Add) -> Add:
    def wrapped(self: catalog_fold.CatalogFold, entry: Entry) -> None:
        if isinstance(entry.body, Tag):
            raise ValueError("no tags here")
        add(self, entry)

    return wrapped


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a tag that was set apart, which no catalog takes."""
    place = make_store(tmp_path / "store")
    monkeypatch.setattr(catalog_fold.CatalogFold, "add", refuses_tags(catalog_fold.CatalogFold.add))
    with ckptstore.open(place) as store:
        store.tag("prod", 1)
    return place


def listed(store: Store) -> tuple[object, ...]:
    return [info.step for info in store.log()], sorted(store.tags()), sorted(store.runs())


def test_listings_are_made_from_the_log(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckptstore.open(store) as opened:
        steps, tags, runs = listed(opened)
        assert "prod" in tags
        opened.commit({"a": 1}, step=99)
        assert opened.log()[0].step == 99
        assert opened.checkout("prod").step == 1
    with ckptstore.open(store, read_only=True) as again:
        after = listed(again)
    monkeypatch.undo()
    with ckptstore.open(store) as mended:
        assert listed(mended) == after == ([99, *steps], tags, runs)
        assert not mended.fsck().findings


def test_a_command_lists_all_commits(store: Path) -> None:
    done = call("log", "--json", "--store", str(store))
    with ckptstore.open(store) as opened:
        assert len(done.document["commits"]) == len(opened.log()) > 2


def test_the_next_catalog_is_whole_and_names_the_entry(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(store) as opened:
        entries = opened._handle.log.read_entries()
        n = next(entry.n for entry in entries if isinstance(entry.body, Tag))
        opened.reindex()
        assert f"entry {n} of the log (tag) does not fold" in caplog.text
        assert not opened.fsck().findings
        assert not opened._handle.catalog.in_memory()


def test_the_entry_is_named_in_the_program_s_log_once(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(store) as opened:
        for _ in range(3):
            opened.log()
    assert [
        record.levelname
        for record in (*caplog.get_records("setup"), *caplog.records)
        if "does not fold" in record.message
    ] == ["ERROR"]
