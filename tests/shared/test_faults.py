"""A network that fails in every way: a commit is durable or says `Unavailable` in time, and nothing is torn or lost."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore.core.ids import CommitId
from ckptstore.errors import CkptStoreError, Unavailable
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import Faults, Proxy, proxy_to
from tests.servers.s3 import S3Server, new_url
from tests.shared.sites import Site
from tests.upkeep.collecting import state_of
from tests.upkeep.stores import assert_equal

DEADLINE_S = 2.0
LONGEST_S = 60.0
"""For a commit of some twenty requests, on a machine that has other things to do: far from the minutes that stacked retries take."""

FAULTS: dict[str, Callable[[Faults], None]] = {
    "latency": lambda faults: setattr(faults, "latency_s", 0.05),
    "resets": lambda faults: setattr(faults, "reset", 0.05),
    "cuts": lambda faults: setattr(faults, "cut", 0.05),
    "503": lambda faults: setattr(faults, "busy", 0.3),
    "refusal": lambda faults: setattr(faults, "refuse", True),
    "silence": lambda faults: faults.silent.set(),
}
DEAD = ("refusal", "silence")
AT_FIRST = FAULTS if "CKPTSTORE_TEST_S3" in os.environ else ("resets", "silence")
"""`make test` has a time limit; `make test-real` tries every fault."""


@pytest.fixture
def bucket(s3: S3Server, seed: int) -> Iterator[tuple[Site, Proxy]]:
    with proxy_to(s3.address, seed) as proxy:
        yield Site(new_url(), s3.behind(proxy.endpoint).options(deadline_s=DEADLINE_S)), proxy


@pytest.fixture
def database(postgres: PostgresServer, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Proxy]]:
    monkeypatch.setattr("ckptstore.index.postgres.DEADLINE_S", DEADLINE_S)
    with proxy_to(postgres.address, seed) as proxy:
        yield Site(str(tmp_path / "store"), None, {"index": postgres.url(postgres.new_database(), port=proxy.port)}), proxy


@pytest.mark.parametrize("fault", AT_FIRST)
def test_a_commit_to_a_bucket_is_durable_or_unavailable(bucket: tuple[Site, Proxy], fault: str, tmp_path: Path) -> None:
    _commit_through(*bucket, fault, tmp_path)


@pytest.mark.parametrize("fault", [fault for fault in AT_FIRST if fault != "503"])
def test_a_commit_to_postgresql_is_durable_or_unavailable(database: tuple[Site, Proxy], fault: str, tmp_path: Path) -> None:
    _commit_through(*database, fault, tmp_path)


def _commit_through(site: Site, proxy: Proxy, fault: str, tmp_path: Path) -> None:
    acknowledged: dict[CommitId, int] = {}
    with site.open(tmp_path / "host") as store:
        acknowledged[store.commit(state_of(0), step=0).id] = 0
        FAULTS[fault](proxy.faults)
        if fault in DEAD:
            proxy.drop()
        for step in range(1, 2 if fault in DEAD else 4):
            started = time.monotonic()
            try:
                acknowledged[store.commit(state_of(step), step=step).id] = step
            except Unavailable as error:
                print(f"step {step}: {error}")
            assert time.monotonic() - started < LONGEST_S
        proxy.heal()
        acknowledged[store.commit(state_of(9), step=9).id] = 9
    assert len(acknowledged) >= (2 if fault in DEAD else 3 if fault == "latency" else 2)
    with site.open(tmp_path / "another-host") as store:
        shown = {info.id: info.step for info in store.log()}
        assert acknowledged.items() <= shown.items()
        for commit, step in shown.items():
            assert step is not None
            assert_equal(store.checkout(commit).state_dict(), state_of(step))
        assert store.fsck().findings == ()


def test_reads_go_on_when_the_network_comes_back(bucket: tuple[Site, Proxy], tmp_path: Path) -> None:
    site, proxy = bucket
    with site.open(tmp_path / "host") as store:
        store.commit(state_of(1), step=1)
    with site.open(tmp_path / "host") as store:
        proxy.faults.silent.set()
        with pytest.raises(CkptStoreError):
            store.checkout(1).state_dict()
        proxy.heal()
        assert_equal(store.checkout(1).state_dict(), state_of(1))
