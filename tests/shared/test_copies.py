"""Diverging copies of one store, used by one host: caches of one copy are not used for the
other."""

from pathlib import Path

import pytest

from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site, Sites, kinds, sites_of


@pytest.fixture(params=kinds("memory"))
def sites(request: pytest.FixtureRequest, tmp_path: Path) -> Sites:
    return sites_of(request, tmp_path)


@pytest.fixture
def pair(sites: Sites, tmp_path: Path) -> tuple[Site, Site]:
    """A store and its copy, with one commit each since; their next packs bear the same numbers."""
    original = sites.new()
    with original.open(tmp_path / "maker") as store:
        store.commit(state_of(0), step=0)
    copy = sites.copied(original)
    for site, step in ((original, 1), (copy, 2)):
        with site.open(tmp_path / f"maker-{step}") as store:
            store.commit(state_of(step), step=step)
    return original, copy


def test_a_host_that_knows_the_original_commits_to_the_copy_and_reads_it(
    pair: tuple[Site, Site], tmp_path: Path
) -> None:
    original, copy = pair
    with original.open(tmp_path / "host") as store:
        assert_equal(store.checkout(1).state_dict(), state_of(1))
    with copy.open(tmp_path / "host") as store:
        store.commit(state_of(1), step=3)
        for step, content in ((0, 0), (2, 2), (3, 1)):
            assert_equal(store.checkout(step).state_dict(), state_of(content))
    with copy.open(tmp_path / "another-host") as store:
        assert_equal(store.checkout(3).state_dict(), state_of(1))
        assert store.fsck(read_data="100%").findings == ()


def test_both_may_be_open_at_once(pair: tuple[Site, Site], tmp_path: Path) -> None:
    original, copy = pair
    with original.open(tmp_path / "host") as one, copy.open(tmp_path / "host") as other:
        for step in range(10, 16):
            one.commit(state_of(step), step=step)
            other.commit(state_of(step - 1), step=step)
            other.commit(state_of(step + 10), step=step + 10)
            one.commit(state_of(step + 9), step=step + 10)
            assert_equal(one.checkout(step).state_dict(), state_of(step))
    for number, site in enumerate(pair):
        with site.open(tmp_path / f"another-host-{number}") as store:
            assert store.fsck(read_data="100%").findings == ()
