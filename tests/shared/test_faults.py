"""A failing network: a commit is durable or raises `Unavailable` in time; nothing is torn or
lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from ckptstore.core.ids import CommitId
from ckptstore.errors import CkptStoreError, Unavailable
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.proxy import DEAD, Proxy, faults, proxy_to
from tests.support.servers.s3 import S3Server, clients, new_url

DEADLINE_S = 2.0
LONGEST_S = 60.0
"""For a commit of some twenty requests, on a machine that has other things to do: far from the
minutes that stacked retries take."""

BLACK_HOLE_S = 30.0
PARTITIONED_S = 1.5 * DEADLINE_S
SAMPLED = 2
PARTS = 3
"""The long test takes minutes, and is run in so many."""
ENDS = [*clients(), "database"]
PARTITIONED = [
    *ENDS,
    "bucket and database"
    if "CKPTSTORE_TEST_S3" in os.environ
    else pytest.param("bucket and database", marks=pytest.mark.soak),
]

T = TypeVar("T")


@contextmanager
def _bucket(s3: S3Server, seed: int, client: str) -> Iterator[tuple[Site, Proxy]]:
    with proxy_to(s3.address, seed) as proxy:
        yield (
            Site(
                new_url(), s3.behind(proxy.endpoint).options(deadline_s=DEADLINE_S, client=client)
            ),
            proxy,
        )


@pytest.fixture(params=clients())
def bucket(request: pytest.FixtureRequest, s3: S3Server, seed: int) -> Iterator[tuple[Site, Proxy]]:
    with _bucket(s3, seed, request.param) as found:
        yield found


@pytest.fixture
def database(
    postgres: PostgresServer, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Site, Proxy]]:
    monkeypatch.setattr("ckptstore.plugins.postgres.database.DEADLINE_S", DEADLINE_S)
    with proxy_to(postgres.address, seed) as proxy:
        yield (
            Site(
                str(tmp_path / "store"),
                None,
                {"index": postgres.url(postgres.new_database(), port=proxy.port)},
            ),
            proxy,
        )


@pytest.fixture(params=ENDS)
def end(request: pytest.FixtureRequest, s3: S3Server, seed: int) -> Iterator[tuple[Site, Proxy]]:
    """A bucket, reached by one client or the other, a directory whose log is in a database, or a
    bucket with such a log."""
    if request.param == "database":
        yield request.getfixturevalue("database")
        return
    if request.param == "bucket and database":
        with _bucket(s3, seed, "obstore") as (site, proxy):
            beside, postgres = request.getfixturevalue("database")
            proxy.join(postgres)
            yield replace(site, more=beside.more), proxy
        return
    with _bucket(s3, seed, request.param) as found:
        yield found


@pytest.mark.parametrize("fault", faults("resets", "silence"))
def test_a_commit_to_a_bucket_is_durable_or_unavailable(
    bucket: tuple[Site, Proxy], fault: str, tmp_path: Path
) -> None:
    _commit_through(*bucket, fault, tmp_path)


@pytest.mark.parametrize("fault", faults("resets", "silence", but="503"))
def test_a_commit_to_postgresql_is_durable_or_unavailable(
    database: tuple[Site, Proxy], fault: str, tmp_path: Path
) -> None:
    _commit_through(*database, fault, tmp_path)


def _commit_through(site: Site, proxy: Proxy, fault: str, tmp_path: Path) -> None:
    acknowledged: dict[CommitId, int] = {}
    with patiently(lambda: site.open(tmp_path / "host")) as store:
        acknowledged[patiently(lambda: store.commit(state_of(0), step=0)).id] = 0
        proxy.break_by(fault)
        for step in range(1, 2 if fault in DEAD else 4):
            started = time.monotonic()
            try:
                acknowledged[store.commit(state_of(step), step=step).id] = step
            except Unavailable as error:
                print(f"step {step}: {error}")
            assert time.monotonic() - started < LONGEST_S
        proxy.heal()
        acknowledged[patiently(lambda: store.commit(state_of(9), step=9)).id] = 9
    assert len(acknowledged) >= (2 if fault in DEAD else 3 if fault == "latency" else 2)
    patiently(lambda: assert_whole(site, tmp_path / "another-host", acknowledged))


def assert_whole(site: Site, host: Path, acknowledged: dict[CommitId, int]) -> None:
    """What was acknowledged is there, and whatever is there is whole."""
    with site.open(host) as store:
        shown = {info.id: info.step for info in store.log()}
        assert acknowledged.items() <= shown.items()
        for commit, step in shown.items():
            assert step is not None
            assert_equal(store.checkout(commit).state_dict(), state_of(step))
        assert store.fsck().findings == ()


@pytest.mark.parametrize("end", PARTITIONED, indirect=True)
def test_a_host_that_is_partitioned_in_mid_commit_has_committed_whole_or_not_at_all(
    end: tuple[Site, Proxy], tmp_path: Path, seed: int
) -> None:
    """What it sent last arrived, and it hears nothing more for longer than its deadline."""
    site, proxy = end
    total = _commit_partitioned(site, proxy, 0, tmp_path / "counting")
    for message in Random(seed).sample(range(1, total + 1), SAMPLED):
        _commit_partitioned(site, proxy, message, tmp_path / f"message-{message}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("end", PARTITIONED, indirect=True)
def test_a_host_may_be_partitioned_after_any_message_of_a_commit(
    part: int, end: tuple[Site, Proxy], tmp_path: Path
) -> None:
    site, proxy = end
    total = _commit_partitioned(site, proxy, 0, tmp_path / "counting")
    messages = range(1 + part, total + 1, PARTS)
    for message in messages:
        _commit_partitioned(site, proxy, message, tmp_path / f"message-{message}")
    print(f"{len(messages)} of {total} messages")


def _commit_partitioned(site: Site, proxy: Proxy, message: int, folder: Path) -> int:
    """Commit, partitioned once that message of the host's is on its way; how many it sent. 0: it
    never is."""
    acknowledged: dict[CommitId, int] = {}
    sent, healers = 0, list[threading.Timer]()

    def forward(data: bytes) -> bytes:
        nonlocal sent
        sent += 1
        if sent == message:
            proxy.faults.silent.set()
            healers.append(threading.Timer(PARTITIONED_S, proxy.heal))
            healers[0].start()
        return data

    with patiently(lambda: site.open(folder / "host")) as store:
        step = 100 * len(patiently(store.log))
        proxy.faults.rewrite = forward
        try:
            acknowledged[store.commit(state_of(step), step=step).id] = step
        except Unavailable as error:
            print(f"partitioned after message {message}: {error}")
        for healer in healers:
            healer.join()
        proxy.heal()
        acknowledged[patiently(lambda: store.commit(state_of(step + 1), step=step + 1)).id] = (
            step + 1
        )
    patiently(lambda: assert_whole(site, folder / "another-host", acknowledged))
    return sent


def patiently(work: Callable[[], T]) -> T:
    """For what must succeed in the end, and may take longer than the short deadline on a machine
    that has other things to do."""
    while True:
        try:
            return work()
        except Unavailable as error:
            print(f"once more: {error}")


@pytest.mark.soak
def test_commits_outlast_a_black_hole_or_say_so(
    end: tuple[Site, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the deadlines that users get."""
    site, proxy = end
    monkeypatch.undo()
    site = Site(
        site.place,
        site.options
        and {name: value for name, value in site.options.items() if name != "deadline_s"},
        site.more,
    )
    acknowledged: dict[CommitId, int] = {}
    with site.open(tmp_path / "host") as store:
        acknowledged[store.commit(state_of(0), step=0).id] = 0
        proxy.faults.silent.set()
        healer = threading.Timer(BLACK_HOLE_S, proxy.heal)
        healer.start()
        started = time.monotonic()
        try:
            acknowledged[store.commit(state_of(1), step=1).id] = 1
        except Unavailable as error:
            print(f"black hole: {error}")
        print(
            f"a black hole of {BLACK_HOLE_S:.0f} s kept a commit for "
            f"{time.monotonic() - started:.1f} s"
        )
        healer.join()
        acknowledged[store.commit(state_of(9), step=9).id] = 9
    assert_whole(site, tmp_path / "another-host", acknowledged)


def test_reads_go_on_when_the_network_comes_back(
    bucket: tuple[Site, Proxy], tmp_path: Path
) -> None:
    site, proxy = bucket
    with patiently(lambda: site.open(tmp_path / "host")) as store:
        patiently(lambda: store.commit(state_of(1), step=1))
    with patiently(lambda: site.open(tmp_path / "host")) as store:
        proxy.faults.silent.set()
        with pytest.raises(CkptStoreError):
            store.checkout(1).state_dict()
        proxy.heal()
        assert_equal(patiently(lambda: store.checkout(1).state_dict()), state_of(1))
