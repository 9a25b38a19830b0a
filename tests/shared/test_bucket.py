"""A bucket alone is a store for any number of hosts."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core import paths
from ckptstore.core.config import MIB
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.maintenance.gc import GcOptions, collect
from ckptstore.maintenance.gc.session_monitor import STALE_S
from ckptstore.maintenance.retention import KeepLast
from ckptstore.storage.contract import PART_BYTES
from ckptstore.store import internals_of
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site, on
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, moto_server, new_url


@pytest.fixture
def site(s3: S3Server) -> Site:
    return Site(new_url(), s3.options())


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with proxy_to(s3.address) as proxy:
        yield proxy


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def test_what_one_host_commits_another_checks_out(site: Site, here: Path, there: Path) -> None:
    with site.open(here) as mine, site.open(there) as theirs:
        first = mine.commit(state_of(1), step=1, tag="best")
        assert_equal(theirs.checkout("best").state_dict(), state_of(1))
        second = theirs.commit(state_of(2), step=2)
        assert second.parents == (first.id,)
        assert [info.step for info in mine.log()] == [2, 1]
        assert_equal(mine.checkout(2).state_dict(), state_of(2))
        assert mine.fsck().findings == ()
    assert not (here / "catalog.sqlite").exists(), "each store has a folder of its own in the cache"
    assert {path.name for path in (here / mine.id).iterdir()} >= {
        "catalog.sqlite",
        "chunks.lmdb",
        "state",
    }


def test_hosts_of_one_store_may_read_through_different_clients(
    site: Site, here: Path, there: Path
) -> None:
    other = Site(f"{site.place}?client=fsspec", site.options)
    with site.open(here) as mine, other.open(there) as theirs:
        assert (mine.id, mine.url) == (theirs.id, theirs.url)
        mine.commit(state_of(1), step=1)
        theirs.commit(state_of(2), step=2)
        mine.commit(state_of(3), step=3)
        for step in (1, 2, 3):
            assert_equal(theirs.checkout(step).state_dict(), state_of(step))
        assert theirs.fsck().findings == ()
        assert str(internals_of(theirs).handle.place).endswith("?client=fsspec"), (
            "other processes of this one read through it too"
        )
    with other.open(there) as theirs:
        assert [info.step for info in theirs.log()] == [3, 2, 1]


def test_what_was_committed_elsewhere_is_not_uploaded_again(
    site: Site, here: Path, there: Path
) -> None:
    with site.open(here) as mine, site.open(there) as theirs:
        mine.commit(state_of(1), step=1)
        snapshot = theirs.commit(state_of(1), step=2)
    assert snapshot.stats is not None and snapshot.stats.new_chunks == 0


def test_a_host_that_lost_its_cache_loses_nothing(site: Site, here: Path) -> None:
    for step in range(3):
        with site.open(here) as store:
            store.commit(state_of(step), step=step)
        shutil.rmtree(here)
    with site.open(here) as store:
        assert [info.step for info in store.log()] == [2, 1, 0]
        assert_equal(store.checkout(0).state_dict(), state_of(0))


def test_a_cache_of_another_store_is_not_believed(site: Site, s3: S3Server, here: Path) -> None:
    other = Site(new_url(), s3.options())
    with site.open(here) as store, other.open(here) as foreign:
        store.commit(state_of(1), step=1)
        foreign.commit(state_of(2), step=2)
        (here / store.id / "state").write_bytes((here / foreign.id / "state").read_bytes()) if (
            here / foreign.id / "state"
        ).exists() else None
    with site.open(here) as store:
        assert [info.step for info in store.log()] == [1]


def test_forgotten_commits_are_collected(site: Site, here: Path, there: Path) -> None:
    with site.open(here) as store:
        for step in range(6):
            store.commit(state_of(step), step=step)
        store.forget(KeepLast(2))
        report = store.gc(max_unused=0.0, grace_s=0)
        assert report.freed_bytes > 0
    with site.open(there) as store:
        assert [info.step for info in store.log()] == [5, 4]
        for step in (4, 5):
            assert_equal(store.checkout(step).state_dict(), state_of(step))
        assert store.fsck().findings == ()


def test_gc_aborts_the_uploads_of_writers_that_are_gone(site: Site, here: Path) -> None:
    now_s = 1000.0
    with site.open(here) as store:
        store.commit(state_of(1), step=1)
    with site.opened(here) as handle:
        session = "a" * 24
        # as one would be
        writer = handle.storage.create(f"packs/aa/{session}-0-0", session=session)  # type: ignore[arg-type]
        writer.append([memoryview(bytes(PART_BYTES + 1))])
        ((upload, _),) = handle.storage.list("tmp/")
        collect(handle, GcOptions(), clock=lambda: now_s)
        assert [key for key, _ in handle.storage.list("tmp/")] == [upload]
        collect(handle, GcOptions(), clock=lambda: now_s + 2 * STALE_S)
        assert list(handle.storage.list("tmp/")) == []


def test_of_two_that_make_a_store_at_once_one_makes_it(site: Site, here: Path) -> None:
    stores: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: stores.append(
                ckptstore.open(site.place, storage=ckptstore.Storage(options=site.options))
            )
        )
        for _ in range(4)
    ]
    with on(here):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({store.id for store in stores}) == 1
    for store in stores:
        store.close()
    with pytest.raises(Conflict, match="is a store already"):
        ckptstore.repository.init_store.init_store(
            site.place, storage_options=dict(site.options or {})
        )


def test_a_server_that_ignores_conditions_is_refused_with_the_way_out(
    here: Path, postgres: PostgresServer
) -> None:
    with moto_server() as server, proxy_to(server.address) as proxy:
        proxy.faults.rewrite = lambda data: data.replace(
            b"If-None-Match", b"X-None-Matched"
        ).replace(b"if-none-match", b"x-none-matched")
        site = Site(new_url(), server.behind(proxy.endpoint).options())
        with pytest.raises(InvalidInput, match="postgresql"):
            site.open(here)
        with pytest.raises(NotFound):
            site.open(here, create=False)
        way_out = Site(site.place, site.options, {"index": postgres.new_url()})
        with way_out.open(here) as store:
            store.commit(state_of(1), step=1)
            assert_equal(store.checkout(1).state_dict(), state_of(1))


def test_a_home_directory_on_a_network_filesystem_holds_no_database(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(paths, "is_network_filesystem", lambda path: path.is_relative_to(home))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with site.open(home) as store:
        store.commit(state_of(1), step=1)
        assert [info.step for info in store.log()] == [1]
    assert not home.exists()
    (own,) = tmp_path.glob("ckptstore-*")
    assert own.stat().st_mode & 0o777 == 0o700
    assert (own / store.id / "catalog.sqlite").exists()


def test_a_folder_for_temporary_files_that_somebody_else_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "is_network_filesystem", lambda path: True)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own = paths.local_cache_directory()
    assert own.parent == tmp_path
    own.chmod(0o777)
    assert not paths.local_cache_directory().exists()


def test_opening_a_store_and_reading_one_tensor_takes_ten_requests(
    s3: S3Server, proxy: Proxy, here: Path
) -> None:
    """On a host whose index is current; the tensor has 4 MiB and its commit other leaves and
    trees."""
    site = Site(new_url(), s3.behind(proxy.endpoint).options(), {"chunk_bytes": MIB})
    weight = torch.randn(1 << 20)
    state = {
        "model": {"w": weight, "b": torch.randn(5000), "v": torch.randn(1 << 19)},
        "optimizer": {"lr": 0.1, "m": [torch.randn(1000) for _ in range(30)]},
    }
    with site.open(here) as store:
        for step in range(12):
            state["model"]["b"] = torch.randn(5000)
            store.commit(state, step=step)
    before = proxy.requests
    with site.open(here) as store:
        assert torch.equal(store.checkout().read("model/w"), weight)
    assert proxy.requests - before <= 10


@pytest.mark.parametrize(
    "layers", [8, pytest.param(256, marks=pytest.mark.soak)], ids=["32 MiB", "1 GiB"]
)
def test_a_new_adapter_on_a_base_that_is_there_uploads_little_more_than_itself(
    s3: S3Server, proxy: Proxy, here: Path, layers: int
) -> None:
    """Counted on the wire, with every request and its headers."""

    def adapter() -> dict[str, torch.Tensor]:
        return {name: torch.randn(1 << 20) for name in ("a", "b")}

    site = Site(new_url(), s3.behind(proxy.endpoint).options(), {"chunk_bytes": MIB})
    base = {f"layer{i}": torch.randn(1 << 20) for i in range(layers)}
    with site.open(here) as store:
        store.commit({"base": base, "adapter": adapter()}, step=0)
        before = proxy.sent_bytes
        store.commit({"base": base, "adapter": adapter()}, step=1)
        sent = proxy.sent_bytes - before
    print(f"{sent} bytes sent, {sent / (8 << 20):.4f} of the adapter's")
    assert 8 << 20 < sent <= 1.02 * (8 << 20)


def test_a_reader_without_the_right_to_write_reads(site: Site, here: Path) -> None:
    with site.open(here) as store:
        store.commit(state_of(1), step=1)
    with site.open(here, read_only=True) as store:
        assert_equal(store.checkout().state_dict(), state_of(1))
        assert [info.step for info in store.log()] == [1]
