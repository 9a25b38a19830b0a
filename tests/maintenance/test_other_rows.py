"""gc copies what its mark saw: a footer that lists other chunks now, or a difference whose base was
not marked, is refused, and nothing is copied or condemned."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptstore.core.ids import pack_key
from ckptstore.core.model import NO_BASE
from ckptstore.errors import Corrupt
from ckptstore.maintenance import gc
from ckptstore.maintenance.compact.plan import CompactPolicy
from ckptstore.maintenance.gc.mark import Mark, PackUse, mark
from ckptstore.maintenance.gc.plan import live_rows
from ckptstore.repository import footers
from ckptstore.repository.thread_pool import ThreadPool
from tests.maintenance import test_compact
from tests.maintenance.collecting import at, collected, make, opened, verify


@pytest.fixture
def threads() -> Iterator[ThreadPool]:
    pool = ThreadPool(1)
    yield pool
    pool.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "host"))
    return tmp_path / "store"


def test_a_footer_of_as_many_other_chunks_is_not_that_of_the_mark(
    place: Path, threads: ThreadPool
) -> None:
    """As where a directory is replaced by that of an older copy, whose pack has the same name."""
    make(place, 3)
    with opened(place) as handle:
        uses = mark(handle.storage, handle.log.replay(), threads).uses
        alike = [use for use in uses if not use.pack.metadata]
        one, other = (use for use in alike if use.pack.chunks == alike[-1].pack.chunks)
        assert len(live_rows(handle.storage, one)) == one.live_chunks
        shutil.copyfile(place / pack_key(other.pack.id), place / pack_key(one.pack.id))
        with pytest.raises(Corrupt, match=one.pack.id):
            live_rows(handle.storage, one)


def without_bases(storage: Any, use: PackUse) -> PackUse:
    """A use that the mark should never make: the bases of its differences are not live."""
    table = footers.read_table(storage, use.pack)
    bases = table["base"][table["base"] != NO_BASE]
    live = use.live.copy()
    live[bases] = False
    return replace(use, live=live) if len(bases) else use


def test_a_difference_whose_base_is_not_copied_is_not_copied(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_compact.make(place)
    with at(place).open() as store:
        store.compact(CompactPolicy(newest=0, every=3))
        store.forget(store.checkout(0).id)
    before = {path for path in (place / "packs").rglob("*") if path.is_file()}

    def marked(storage: Any, *args: Any) -> Mark:
        found = mark(storage, *args)
        return replace(found, uses=tuple(without_bases(storage, use) for use in found.uses))

    monkeypatch.setattr(gc, "mark", marked)
    report = collected(place)
    monkeypatch.undo()
    assert report.damaged
    assert {pack_key(pack) for pack in report.damaged} <= {
        path.relative_to(place).as_posix() for path in before if path.exists()
    }
    test_compact.verify(place, range(1, test_compact.STEPS))


def test_what_is_copied_is_what_was_there(place: Path) -> None:
    make(place, 6, forget=[0, 1, 2])
    assert collected(place).plan.copies
    verify(place, [3, 4, 5])
