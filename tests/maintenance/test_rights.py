"""Every file and directory of a private store, and of its caches, belongs to its owner alone,
whatever the umask."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

import ckptstore
from ckptstore import KeepLast
from ckptstore.log import log
from ckptstore.log.sessions import open_session
from ckptstore.repository import store_handle as opening_module
from ckptstore.storage import open_storage
from tests.cli.running import call
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import CHUNK_BYTES, files, flip, heal


@pytest.fixture(params=[0o000, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def live(place: Path, *, private: bool) -> None:
    """Everything that makes files: commits, tags, gc, a checkpoint of the log, fsck, repair,
    doctor, a writer that is stopped."""
    with ckptstore.open(
        place, storage=ckptstore.Storage(private=private, chunk_bytes=CHUNK_BYTES)
    ) as store:
        for step in range(4):
            store.commit(state_of(step), step=step, tag="first" if step == 1 else ())
        store.forget(KeepLast(2))
        store.gc(max_unused=0.0, grace_s=0)
        store.fsck(read_data="100%")
        store.doctor()
        store.sessions()
    flip(files(place, "commits")[0], 30)
    heal(place)
    storage = open_storage(place)
    session = open_session(storage, "commit")
    storage.create("packs/00/unfinished", session=session.id).append(
        [memoryview(b"what a crash leaves")]
    )
    session.abandon()
    storage.close()


def modes(place: Path) -> dict[str, str]:
    return {
        str(path.relative_to(place)): oct(S_IMODE(path.stat().st_mode))
        for path in (place, *place.rglob("*"))
    }


def wrong(place: Path, *, files: int, directories: int) -> dict[str, str]:
    """What has other rights than these."""
    return {
        name: mode
        for name, mode in modes(place).items()
        if mode != oct(directories if (place / name).is_dir() else files)
    }


def test_everything_in_a_private_store_is_its_owners_alone(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 3)
    place = tmp_path / "above" / "store"
    live(place, private=True)
    found = modes(place)
    for kind in (
        "packs/",
        "commits/",
        "log/0",
        "log/checkpoint-",
        "sessions/",
        "tmp/",
        "reserve",
        "index/catalog.sqlite",
        "quarantine/",
    ):
        assert any(name.startswith(kind) for name in found), kind
    assert {
        "index/chunks.lmdb/data.mdb",
        "index/chunks.lmdb/lock.mdb",
        "index/chunks.lmdb/stamp",
        "index/watch.json",
    } <= found.keys()
    assert wrong(place, files=0o600, directories=0o700) == {}
    assert S_IMODE(place.parent.stat().st_mode) == 0o777 & ~umask


def test_other_stores_have_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    place = tmp_path / "store"
    live(place, private=False)
    assert wrong(place, files=0o666 & ~umask, directories=0o777 & ~umask) == {}


def test_a_directory_that_was_there_becomes_private_and_one_that_is_made_private_later_stays_so(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        place = tmp_path / "store"
        place.mkdir(mode=0o755)
        assert call("init", "--private", str(place)).code == 0
        assert S_IMODE(place.stat().st_mode) == 0o700
        other = tmp_path / "other"
        with ckptstore.open(other) as store:
            store.commit(state_of(0), step=0)
        subprocess.run(["chmod", "-R", "go=", other], check=True)
        with ckptstore.open(other) as store:
            store.commit(state_of(1), step=1)
        assert wrong(other, files=0o600, directories=0o700) == {}
    finally:
        os.umask(before)


def test_the_index_in_the_cache_has_no_more_rights_than_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(opening_module, "is_network_filesystem", lambda path: True)
    before = os.umask(0o022)
    try:
        with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(private=True)) as store:
            store.commit(state_of(0), step=0)
            store.gc(grace_s=0)
        (index,) = (tmp_path / "cache").iterdir()
        assert {"catalog.sqlite", "chunks.lmdb/data.mdb", "watch.json"} <= modes(index).keys()
        assert wrong(index, files=0o600, directories=0o700) == {}
    finally:
        os.umask(before)


def test_a_bucket_is_not_made_private_here() -> None:
    with pytest.raises(ckptstore.InvalidInput, match="policy"):
        ckptstore.open("memory://private-store", storage=ckptstore.Storage(private=True))
