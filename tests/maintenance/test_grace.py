"""What was just forgotten stays for a while: gc leaves it alone, and says so."""

import time
from pathlib import Path

import pytest

from ckptstore.core.ids import document_key
from ckptstore.core.text import SECOND_NS
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.log.entries import Forget
from ckptstore.maintenance.gc import GcOptions, collect
from tests.maintenance.collecting import ALL, garbage, make, opened, size_of, verify
from tests.shared.sites import Site, Sites, kinds, sites_of


@pytest.fixture(params=kinds("local"))
def sites(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "host"))
    return sites_of(request, tmp_path)


@pytest.fixture
def place(sites: Sites) -> Site:
    return sites.new()


def test_what_was_just_forgotten_stays_whole_until_the_grace_is_over(place: Site) -> None:
    """By the time in the log entry that forgot it."""
    commits = make(place, 6)
    now_ns = time.time_ns()
    with opened(place) as handle:
        handle.log.append(Forget(tuple(commits[:2]), ""), time_ns=now_ns - 3601 * SECOND_NS)
        handle.log.append(Forget(tuple(commits[2:4]), ""), time_ns=now_ns - 3000 * SECOND_NS)
        planned = collect(handle, GcOptions(0.0), dry_run=True).plan
        assert (set(planned.purge), set(planned.recent)) == ({*commits[:2]}, {*commits[2:4]})
        assert "keep 2 commits: just forgotten; `ckptstore gc --now`" in str(planned)
        assert set(collect(handle, GcOptions(0.0)).purged) == {*commits[:2]}
    assert not garbage(place)
    with place.open() as store:
        store.undelete(commits[2:4])
    verify(place, [2, 3, 4, 5])


def test_the_grace_is_chosen_and_0_purges_at_once(place: Site) -> None:
    commits = make(place, 6, forget=[0, 1])
    with place.open() as store:
        before = size_of(place)
        assert store.gc(max_unused=1.0).freed_bytes == 0
        assert set(store.gc(max_unused=1.0, grace_s=60).plan.recent) == {*commits[:2]}
        assert set(store.gc(max_unused=0.0, grace_s=0).purged) == {*commits[:2]}
        assert size_of(place) < before
        with pytest.raises(InvalidInput, match="grace_s is -1"):
            store.gc(grace_s=-1)


def test_a_clock_that_was_ahead_makes_a_commit_stay_longer_unless_there_is_no_grace(
    place: Site,
) -> None:
    commits = make(place, 4)
    with opened(place) as handle:
        ahead_ns = time.time_ns() + 10 * 86_400 * SECOND_NS
        handle.log.append(Forget((commits[0],), ""), time_ns=ahead_ns)
        assert collect(handle, GcOptions(0.0), dry_run=True).plan.recent == (commits[0],)
        assert collect(handle, ALL).purged == (commits[0],)


def test_a_damaged_commit_that_was_just_forgotten_stops_gc_until_it_does_not_wait(
    place: Site,
) -> None:
    commits = make(place, 4, forget=[0])
    with opened(place) as handle:
        row = handle.log.replay().commits[commits[0]]
        handle.storage.delete(document_key(row.session, commits[0]))
        with pytest.raises(Corrupt, match=r"forget that commit and run `ckptstore gc --now`"):
            collect(handle, GcOptions(0.0))
        assert collect(handle, ALL).purged == (commits[0],)
    verify(place, [1, 2, 3])
