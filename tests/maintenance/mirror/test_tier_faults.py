"""Training continues through any failure of the mirror, and missing commits arrive later."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.plugins.tiers import tiers
from ckptstore.store import Store
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import CHUNK_BYTES, assert_equal
from tests.shared.sites import Site
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.proxy import DEAD, Proxy, faults, proxy_to
from tests.support.servers.s3 import S3Server, clients, new_url

STEPS = 4
DEADLINE_S = 2.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr("ckptstore.plugins.postgres.database.DEADLINE_S", DEADLINE_S)


@pytest.fixture(params=clients())
def bucket(
    request: pytest.FixtureRequest, s3: S3Server, seed: int
) -> Iterator[tuple[Site, Site, Proxy]]:
    """The mirror as the host reaches it, as others do, and what is in between."""
    with proxy_to(s3.address, seed) as proxy:
        url = new_url()
        yield (
            Site(
                url, s3.behind(proxy.endpoint).options(deadline_s=DEADLINE_S, client=request.param)
            ),
            Site(url, s3.options()),
            proxy,
        )


@pytest.fixture
def database(
    s3: S3Server, postgres: PostgresServer, seed: int
) -> Iterator[tuple[Site, Site, Proxy]]:
    """As `bucket`, with the log in PostgreSQL, and the way to that broken."""
    with proxy_to(postgres.address, seed) as proxy:
        url, name = new_url(), postgres.new_database()
        broken = Site(url, s3.options(), {"index": postgres.url(name, port=proxy.port)})
        yield broken, Site(url, s3.options(), {"index": postgres.url(name)}), proxy


@pytest.mark.parametrize("fault", faults("silence", "503"))
def test_commits_go_on_while_the_way_to_the_bucket_is_broken(
    bucket: tuple[Site, Site, Proxy], fault: str, tmp_path: Path
) -> None:
    _train_through(*bucket, fault, tmp_path)


@pytest.mark.parametrize("fault", faults("resets", but="503"))
def test_commits_go_on_while_the_way_to_postgresql_is_broken(
    database: tuple[Site, Site, Proxy], fault: str, tmp_path: Path
) -> None:
    _train_through(*database, fault, tmp_path)


def _train_through(
    mirror: Site, seen_by_others: Site, proxy: Proxy, fault: str, tmp_path: Path
) -> None:
    there = ckptstore.Mirror(mirror.place, storage=mirror.as_storage())
    with ckptstore.open(
        tmp_path / "disk", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), mirror=there
    ) as store:
        store.commit(state_of(0), step=0)
        _flush(store)
        proxy.break_by(fault)
        for step in range(1, STEPS):
            store.commit(state_of(step), step=step)
            assert_equal(store.checkout(step).state_dict(), state_of(step))
        if fault in DEAD:
            assert not store.flush_mirror()
        proxy.heal()
        _flush(store)
    with seen_by_others.open(tmp_path / "another-host") as there:
        assert [info.step for info in there.log()] == [*range(STEPS)][::-1]
        for step in range(STEPS):
            assert_equal(there.checkout(step).state_dict(), state_of(step))
        assert there.fsck().findings == ()


def _flush(store: Store) -> None:
    """It succeeds in the end, after more than the short deadline on a machine that has other things
    to do."""
    while not store.flush_mirror():
        pass
