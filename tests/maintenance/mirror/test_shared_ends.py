"""Mirrors and tiers whose ends are a bucket, alone or with its log in PostgreSQL."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.config import MIB
from ckptstore.errors import InvalidInput
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.stores import (
    CHUNK_BYTES,
    assert_restores,
    copy_of,
    files,
    flip,
    large_state,
    make_store,
)
from tests.shared.sites import Site
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, new_url

KILLED = 1
PARTS = 8
"""The long test takes minutes, and is run in so many."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("mirrored") / "store", states=large_state)


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    return copy_of(template, tmp_path / "store")


@pytest.fixture
def bucket(s3: S3Server) -> Site:
    return Site(new_url(), s3.options())


@pytest.fixture
def database(s3: S3Server, postgres: PostgresServer) -> Site:
    """A bucket whose log is in PostgreSQL."""
    return Site(new_url(), s3.options(), {"index": postgres.new_url()})


@pytest.fixture(params=[pytest.param("bucket", marks=pytest.mark.soak), "database"])
def end(request: pytest.FixtureRequest) -> Site:
    site: Site = request.getfixturevalue(request.param)
    return site


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with proxy_to(s3.address) as proxy:
        yield proxy


def way(site: Site) -> dict[str, Any]:
    """The arguments that say how to get to the other end."""
    return {"storage": site.as_storage()}


def ids(store: Store) -> dict[str, tuple[Any, ...]]:
    return {
        info.id: (info.run, info.step, info.tags, info.parents, info.metrics)
        for info in store.log()
    }


def assert_whole(there: Store, here: Store) -> None:
    assert ids(there) == ids(here)
    assert there.tags() == here.tags()
    for step in range(3):
        assert_restores(there, f"main@{step}", step, large_state)
    assert there.fsck().findings == ()


def test_a_push_makes_the_other_end_whole_and_a_second_one_has_nothing_to_send(
    place: Path, end: Site, tmp_path: Path
) -> None:
    with ckptstore.open(place) as store, pytest.raises(ckptstore.NotFound):
        store.push(end.place, **way(end))
    with ckptstore.open(place) as store:
        assert len(store.push(end.place, create=True, **way(end)).sent) == 4
        assert store.push(end.place, **way(end)).sent == ()
        with end.open(tmp_path / "there") as there:
            assert_whole(there, store)


def test_between_two_shared_stores_and_back_to_a_disk(
    place: Path, bucket: Site, database: Site, tmp_path: Path
) -> None:
    with ckptstore.open(place) as store:
        store.mirror(database.place, **way(database))
        with bucket.open(tmp_path / "there", chunk_bytes=CHUNK_BYTES) as there:
            assert len(there.pull(database.place, **way(database)).sent) == 4
            assert_whole(there, store)
        with ckptstore.clone(
            bucket.place, tmp_path / "back", storage=ckptstore.Storage(options=bucket.options)
        ) as back:
            assert_whole(back, store)


def test_a_clone_into_a_bucket_with_its_log_in_a_database(place: Path, database: Site) -> None:
    there = ckptstore.Storage(options=database.options, index=database.more["index"])
    with (
        ckptstore.open(place) as store,
        ckptstore.clone(place, database.place, to_storage=there) as copy,
    ):
        assert_whole(copy, store)


def test_an_end_whose_log_is_in_a_database_is_not_taken_for_one_without(
    place: Path, bucket: Site, database: Site
) -> None:
    with ckptstore.open(place) as store:
        store.mirror(database.place, **way(database))
        with pytest.raises(InvalidInput, match=r"is in postgresql.*--to-index"):
            store.push(database.place, storage=ckptstore.Storage(options=database.options))
        store.mirror(bucket.place, **way(bucket))
        with pytest.raises(InvalidInput, match="not in a database"):
            store.push(
                bucket.place,
                storage=ckptstore.Storage(options=bucket.options, index=database.more["index"]),
            )


def test_the_command_names_the_database_of_either_end(
    place: Path, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE", str(place))
    there, back, url = tmp_path / "there", tmp_path / "back", postgres.new_url()
    assert call("push", str(there), "--create", "--to-index", url).code == 0
    assert call("-s", str(there), "--index", url, "log", "--json").code == 0
    assert call("clone", str(there), str(back), "--from-index", url).code == 0
    assert call("pull", str(there), "--from-index", url).code == 0
    with ckptstore.open(place) as store, ckptstore.open(back, create=False) as copy:
        assert ids(copy) == ids(store)


def test_a_tier_uploads_to_a_shared_store_and_a_new_disk_resumes_from_it(
    end: Site, tmp_path: Path
) -> None:
    mirror = ckptstore.Mirror(end.place, storage=end.as_storage())
    with ckptstore.open(
        tmp_path / "old", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), mirror=mirror
    ) as store:
        for step in range(3):
            store.commit(large_state(step), step=step, tag=f"t{step}")
        assert store.flush_mirror()
    target = {
        "model": {name: torch.zeros_like(value) for name, value in large_state(0)["model"].items()}
    }
    with ckptstore.open(tmp_path / "new", mirror=mirror) as store:
        snapshot = store.resume(target)
        assert snapshot is not None and snapshot.step == 2
        assert torch.equal(target["model"]["big"], large_state(2)["model"]["big"])
        store.commit(large_state(3), step=3)
    with end.open(tmp_path / "there") as there:
        assert [info.step for info in there.log()] == [3, 2, 1, 0]
        assert set(there.tags()) == {"t0", "t1", "t2"}


@pytest.mark.soak  # `make test` heals from a bucket in memory
def test_a_flipped_bit_is_healed_from_a_shared_store(place: Path, end: Site) -> None:
    with ckptstore.open(place) as store:
        store.mirror(end.place, **way(end))
        flip(max(files(place, "packs"), key=lambda path: path.stat().st_size), 4200)
        assert store.fsck(read_data="100%").findings
        assert (
            store.repair(
                end.place,
                apply=True,
                read_data="100%",
                storage=ckptstore.Storage(options=end.options),
            ).after.findings
            == ()
        )
        for step in range(3):
            assert_restores(store, f"main@{step}", step, large_state)


def test_the_next_commit_of_a_lora_run_sends_little_more_than_its_adapter(
    tmp_path: Path, s3: S3Server, proxy: Proxy
) -> None:
    """By what goes over the wire: requests, signatures, documents and the log among it."""
    there = Site(new_url(), s3.behind(proxy.endpoint).options())
    base = {f"layer{i}": torch.randn(MIB) for i in range(4)}
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(2):
            store.commit({"base": base, "adapter": torch.randn(MIB // 2)}, step=step)
        store.push(there.place, create=True, **way(there))
        store.commit({"base": base, "adapter": torch.randn(MIB // 2)}, step=2)
        before = proxy.sent_bytes
        store.push(there.place, **way(there))
        assert 2 * MIB <= proxy.sent_bytes - before <= 1.05 * 2 * MIB


# -- killed at any request

PUSH = """
import json, sys
from contextlib import closing
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.maintenance.mirror import MirrorOptions, mirror
from ckptstore.maintenance.mirror_plan import choose
source, target, way = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with closing(StoreHandle(source, read_only=True)) as ours:
  with closing(StoreHandle(target, **way)) as theirs:
    options = MirrorOptions(batch_bytes=100_000)
    mirror(ours, theirs, choose(ours, (), run=None), options, ThreadPool(1))
"""


class _Pushes:
    """A push to `end`, whose bucket is reached through `proxy`, in a process of its own."""

    def __init__(self, place: Path, end: Site, proxy: Proxy, tmp_path: Path) -> None:
        self.place, self.end, self.proxy, self.tmp_path = place, end, proxy, tmp_path

    def run(self, killed_at: int | None = None) -> int:
        """How many requests it made, or had made when it was killed."""
        options = {**(self.end.options or {}), "endpoint_url": self.proxy.endpoint}
        arguments = [
            str(self.place),
            self.end.place,
            json.dumps({"storage_options": options, **self.end.more}),
        ]
        environment = {**os.environ, "CKPTSTORE_CACHE": str(self.tmp_path / secrets.token_hex(4))}
        first = self.proxy.requests
        child = subprocess.Popen([sys.executable, "-c", PUSH, *arguments], env=environment)
        self.proxy.faults.rewrite = self._killer(child, first + killed_at) if killed_at else None
        code = child.wait()
        self.proxy.faults.rewrite = None
        assert code == (-signal.SIGKILL if killed_at else 0)
        return self.proxy.requests - first

    def _killer(self, child: "subprocess.Popen[bytes]", last: int) -> Callable[[bytes], bytes]:
        """Kills when the request numbered `last` comes by; what of it was sent until then goes on
        to the server."""

        def forward(data: bytes) -> bytes:
            if self.proxy.requests >= last:
                child.kill()
            return data

        return forward


def kill_and_repeat(pushes: _Pushes, end: Callable[[], Site], numbers: list[int]) -> None:
    for number in numbers:
        pushes.end = end()
        with ckptstore.open(pushes.place) as store:
            with pushes.end.open(pushes.tmp_path / "maker", chunk_bytes=CHUNK_BYTES):
                pass
            pushes.run(killed_at=number)
            with pushes.end.open(pushes.tmp_path / secrets.token_hex(4)) as there:
                assert ids(there).keys() <= ids(store).keys()
                assert there.fsck().findings == (), f"killed at request {number}"
            pushes.run()
            with pushes.end.open(pushes.tmp_path / secrets.token_hex(4)) as there:
                assert_whole(there, store)


def _new_ends(kind: str, s3: S3Server, postgres: PostgresServer) -> Callable[[], Site]:
    return lambda: Site(
        new_url(), s3.options(), {"index": postgres.new_url()} if kind == "database" else {}
    )


def _requests_of_a_push(pushes: _Pushes, end: Callable[[], Site]) -> int:
    pushes.end = end()
    with pushes.end.open(pushes.tmp_path / "maker", chunk_bytes=CHUNK_BYTES):
        pass
    return pushes.run()


def test_a_push_that_is_killed_at_some_request_is_completed_by_the_next(
    place: Path, s3: S3Server, postgres: PostgresServer, proxy: Proxy, tmp_path: Path, seed: int
) -> None:
    end = _new_ends("bucket", s3, postgres)
    pushes = _Pushes(place, end(), proxy, tmp_path)
    total = _requests_of_a_push(pushes, end)
    kill_and_repeat(pushes, end, Random(seed).sample(range(5, total), KILLED))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["bucket", "database"])
def test_a_push_that_is_killed_at_any_request_is_completed_by_the_next(
    kind: str,
    part: int,
    place: Path,
    s3: S3Server,
    postgres: PostgresServer,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    end = _new_ends(kind, s3, postgres)
    pushes = _Pushes(place, end(), proxy, tmp_path)
    total = _requests_of_a_push(pushes, end)
    print(f"{len(numbers := range(1 + part, total, PARTS))} of {total} requests")
    kill_and_repeat(pushes, end, list(numbers))
