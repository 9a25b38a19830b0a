"""A compaction that ends after any of its changes, or beside others, loses nothing."""

import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckptstore import Storage
from ckptstore.core.ids import pack_key
from ckptstore.errors import CkptStoreError, Conflict
from ckptstore.maintenance.compact import compact
from ckptstore.maintenance.gc.session_monitor import STALE_S
from ckptstore.maintenance.rescue import replace_object
from tests.maintenance.collecting import collected, garbage, opened
from tests.maintenance.stopping import Stopped, opened_stopping
from tests.maintenance.test_compact import POLICY, STEPS, make, trained, verify
from tests.shared.sites import Site, Sites, kinds, sites_of
from tests.support.fixtures import scratch

__all__ = ["scratch"]

SAMPLED = 2


@pytest.fixture(params=kinds("local"))
def sites(request: pytest.FixtureRequest, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(scratch / "host"))
    return sites_of(request, scratch)


def compacted_until(place: Site, changes: int) -> int | None:
    """Compact until so many changes were made; None, or how many a whole compaction makes."""
    handle, stopping = opened_stopping(place, changes)
    try:
        compact(handle, POLICY)
        return stopping.changed
    except Stopped:
        return None
    finally:
        handle.close()


def collected_later(place: Site) -> None:
    """Gcs that come so much later that a writer which ended is known to be gone."""
    for s in (0.0, STALE_S, 2 * STALE_S):
        collected(place, clock=lambda s=s: time.monotonic() + s)


def end_after(place: Site, changes: int) -> int | None:
    """Let a compaction end there; the next one finishes, and the gcs after it find what it left."""
    total = compacted_until(place, changes)
    verify(place)
    with opened(place) as handle:
        compact(handle, POLICY)
    collected_later(place)
    assert not garbage(place), f"after change {changes}"
    verify(place)
    with place.open() as store:
        assert store.compact(POLICY).chunks == 0, f"after change {changes}"
        assert not store.fsck("data").findings
    return total


@pytest.mark.timeout(3600)
@pytest.mark.soak
@pytest.mark.parametrize("sites", kinds("local", long=True), indirect=True)
def test_a_compaction_may_end_after_any_change(sites: Sites) -> None:
    source = sites.new()
    make(source)
    total = next(
        total
        for changes in range(1_000)
        if (total := end_after(sites.copied(source), changes)) is not None
    )
    assert total > 10


@pytest.mark.parametrize("sites", kinds("local", "memory"), indirect=True)
def test_a_compaction_may_end_after_some_changes(sites: Sites, seed: int) -> None:
    source = sites.new()
    make(source)
    total = end_after(sites.copied(source), 1_000)
    assert total is not None
    for changes in Random(seed).sample(range(total), SAMPLED):
        assert end_after(sites.copied(source), changes) is None


def test_what_a_compaction_that_ended_had_listed_is_not_done_again(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptstore.maintenance import compact as module

    monkeypatch.setattr(module, "ENTRY_BYTES", 1)
    source = sites.new()
    make(source)
    total = compacted_until(whole := sites.copied(source), 1_000)
    assert total is not None
    with opened(whole) as handle:
        assert compact(handle, POLICY).chunks == 0
    ended, chunks = sites.copied(source), list[int]()
    for changes in (0, total // 3, total):
        compacted_until(ended, changes)
        with opened(ended) as handle:
            chunks.append(compact(handle, POLICY, dry_run=True).chunks)
    first, second, last = chunks
    assert first > second > last == 0
    verify(ended)


def beside(*works: Any) -> list[BaseException]:
    """Run these at once; returns what they raised."""
    raised: list[BaseException] = []

    def run(work: Any) -> None:
        try:
            work()
        except CkptStoreError as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_two_compactions_a_gc_and_a_writer_at_once_lose_nothing(sites: Sites) -> None:
    place = sites.new()
    make(place)

    def compacts() -> None:
        with opened(place) as handle:
            compact(handle, POLICY)

    def writes() -> None:
        with place.open() as store:
            for step in range(STEPS, STEPS + 3):
                store.commit(trained(step), step=step)
                store.commit(trained(0), step=100 + step)  # chunks that are being compacted

    raised = beside(compacts, compacts, writes, lambda: collected(place))
    # Gcs that fence each other give up after some attempts, and say so.
    assert all(isinstance(error, Conflict) for error in raised), raised
    verify(place, range(STEPS + 3))
    with opened(place) as handle:
        compact(handle, POLICY)
    collected_later(place)
    assert not garbage(place)
    verify(place, range(STEPS + 3))
    with place.open() as store:
        assert not store.fsck("data").findings


def test_commits_that_are_purged_meanwhile_are_passed_over(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = sites.new()
    make(place)
    from ckptstore.maintenance import compact as module

    real = module.places

    def purging(trees: Any) -> Any:
        monkeypatch.setattr(module, "places", real)
        found = list(real(trees))
        with place.open() as other:
            other.forget([0, 1, 2])
            other.gc(grace_s=0, max_unused=0, force=True)
        return iter(found)

    monkeypatch.setattr(module, "places", purging)
    with place.open() as store:
        store.compact(POLICY)
    verify(place, range(3, STEPS))
    with place.open() as store:
        assert not store.fsck("data").findings


def test_a_damaged_base_is_rescued_with_all_that_differ_from_it(sites: Sites) -> None:
    place, mirror = sites.new(), sites.new()
    make(place)
    with place.open() as store:
        store.push(mirror.place, create=True, storage=mirror.as_storage())
        store.compact(POLICY)
    with opened(place) as handle:
        largest = max(handle.log.replay().packs.values(), key=lambda pack: pack.bytes)
        key = pack_key(largest.id)
        data = bytearray(handle.storage.read(key))
        data[5000] ^= 1
        replace_object(handle.storage, key, bytes(data))
    with place.open() as store:
        assert store.fsck("data").findings
        storage = Storage(options=mirror.options)
        store.repair(mirror.place, apply=True, read_data="100%", storage=storage)
        assert not store.fsck("data").findings
    verify(place)
