"""A patch counts as verified once its chunk was made of its base, wherever that lies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.core.ids import PackId, pack_key
from ckptstore.errors import Unavailable
from ckptstore.maintenance import save_note
from ckptstore.maintenance.check import Report, Severity, Share
from ckptstore.maintenance.check.data import RECORD_NAME, load_record
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import offline_store_of
from ckptstore.objects import codecs
from ckptstore.repository.footers import read_table
from ckptstore.store import Store
from tests.maintenance.stores import flip
from tests.support.patching import nudged, small_chunks_too


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_chunks_too(), ckptstore.open(tmp_path / "store", threads=1) as store:
        for step in range(3):
            store.commit({"m": nudged((64, 64), step)}, step=step)
        yield store


def packs_of(store: Store, *, patched: bool) -> set[PackId]:
    """The packs of tensors that have patches, or none."""
    handle = store._handle
    return {
        pack.id
        for pack in handle.log.replay().packs.values()
        if not pack.metadata
        and patched == (codecs.PATCH in read_table(handle.storage, pack)["codec"])
    }


def look_at_patches(store: Store) -> tuple[Report, set[PackId]]:
    """Read no packs but those of patches; returns those that count as verified, too."""
    handle, patched = store._handle, packs_of(store, patched=True)
    listed = {pack.id: 9 for pack in handle.log.replay().packs.values() if pack.id not in patched}
    save_note(handle.index_directory / RECORD_NAME, handle.config.store, listed)
    nbytes = sum(p.stored_bytes for p in handle.log.state.packs.values() if p.id in patched)
    report = fsck(offline_store_of(handle), share=Share(bytes=nbytes))
    record = load_record(handle.index_directory, handle.config.store)
    return report, patched & record.keys()


def test_a_patch_whose_base_does_not_answer_is_not_verified(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base,), storage = packs_of(store, patched=False), store._handle.storage
    read_into = storage.read_into

    def silent(key: str, *args: Any) -> None:
        if key == pack_key(base):
            raise Unavailable("it did not answer")
        read_into(key, *args)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_into", silent)
        report, verified = look_at_patches(store)
    assert not verified
    assert {each.severity for each in report.findings} == {Severity.UNREAD}
    report, verified = look_at_patches(store)
    assert verified == packs_of(store, patched=True)
    assert not report.findings


def test_a_base_that_is_damaged_is_found_by_who_reads_its_patches(store: Store) -> None:
    (base,) = packs_of(store, patched=False)
    flip(Path(store._handle.storage.capabilities.local_root or "") / pack_key(base), 100)
    report, _ = look_at_patches(store)
    assert {each.pack for each in report.findings} == {base}
    assert {each.severity for each in report.findings} == {Severity.DAMAGE}
