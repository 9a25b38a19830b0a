"""A gc that ends after any of its changes loses nothing, and the next one leaves no garbage."""

from pathlib import Path
from random import Random

import pytest

from ckptstore.maintenance.forget import forget_by_policy
from ckptstore.maintenance.gc import collect
from ckptstore.maintenance.gc.session_monitor import STALE_S
from ckptstore.maintenance.retention import KeepLast
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader
from tests.maintenance.collecting import ALL, collected, garbage, make, verify
from tests.maintenance.stopping import Stopped, opened_stopping
from tests.shared.sites import Site, Sites, kinds, sites_of
from tests.support.fixtures import scratch

__all__ = ["scratch"]

STEPS, FORGOTTEN = 9, [0, 2, 4, 6]
KEPT = [1, 3, 5, 7, 8]
SAMPLED = 4


@pytest.fixture(params=kinds("local"))
def sites(request: pytest.FixtureRequest, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(scratch / "host"))
    return sites_of(request, scratch)


def stopped_after(place: Site, changes: int) -> int | None:
    """Run a gc that ends after so many changes; None, or how many a whole one takes."""
    handle, stopping = opened_stopping(place, changes)
    try:
        collect(handle, ALL, clock=lambda: 0.0)
        return stopping.changed
    except Stopped:
        return None
    finally:
        handle.close()


def end_after(place: Site, changes: int) -> int | None:
    """Let a gc end there, see that nothing is lost, and let the following ones find what it left;
    the result is that of `stopped_after`."""
    total = stopped_after(place, changes)
    verify(place, KEPT)
    for s in (0.0, STALE_S, 2 * STALE_S):
        collected(place, clock=lambda s=s: s)
    assert not garbage(place), f"after change {changes}"
    verify(place, KEPT)
    return total


@pytest.mark.timeout(3600)
@pytest.mark.soak
@pytest.mark.parametrize("sites", kinds("local", long=True), indirect=True)
def test_a_gc_may_end_after_any_change(sites: Sites) -> None:
    source = sites.new()
    make(source, STEPS, forget=FORGOTTEN)
    total = next(
        total
        for changes in range(1_000)
        if (total := end_after(sites.copied(source), changes)) is not None
    )
    assert total > 20


@pytest.mark.parametrize("sites", kinds("local", "memory"), indirect=True)
def test_a_gc_may_end_after_some_changes(sites: Sites, seed: int) -> None:
    source = sites.new()
    make(source, STEPS, forget=FORGOTTEN)
    total = end_after(sites.copied(source), 1_000)
    assert total is not None
    for changes in Random(seed).sample(range(total), SAMPLED):
        assert end_after(sites.copied(source), changes) is None


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_a_forget_that_ends_at_any_change_has_happened_or_not(sites: Sites, changes: int) -> None:
    place = sites.new()
    make(place, 5)
    handle, _ = opened_stopping(place, changes)
    threads = ThreadPool(1)
    try:
        forget_by_policy(handle, [KeepLast(2)], Reader(handle.config, handle.objects, threads))
    except Stopped:
        pass
    finally:
        threads.close()
        handle.close()
    with place.open() as store:
        assert len(store.log()) in (2, 5)
    verify(place, [3, 4])
