"""Odd files in place of stored objects: an error comes at once, without blocking or oversized
reads."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.repository.footers import read_table_at
from ckptstore.storage import open_storage
from ckptstore.storage.contract import largest
from tests.maintenance.stores import check, files, heal, state

SPARSE_BYTES = 40 << 30
KINDS = ("ckptstore.json", "log", "commits", "sessions", "packs")
MEMORY_BYTES = 4 << 30


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


ODD: dict[str, Callable[[Path], None]] = {
    "a FIFO": fifo,
    "a socket": listening,
    "a directory": Path.mkdir,
    "a link that leads nowhere": dangling,
    "40 GiB of zeros": sparse,
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What is read into memory as a whole ends in `MemoryError`, and not in the end of this
    machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def use(store: Path) -> None:
    """Everything that reads. Each may refuse, with an error of ours."""
    with suppress(CkptStoreError), ckptstore.open(store, create=False) as opened:
        for info in opened.log():
            with suppress(CkptStoreError):
                opened.checkout(info.id).state_dict()
        with suppress(CkptStoreError):
            opened.commit(state(9), step=9)
        with suppress(CkptStoreError):
            opened.sessions()
        with suppress(CkptStoreError):
            opened.gc(grace_s=0)
    with suppress(CkptStoreError):
        check(store)
    with suppress(CkptStoreError):
        heal(store, apply=False)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_store_is_refused_at_once(store: Path, kind: str, odd: str) -> None:
    if kind == "sessions":
        path = store / "sessions" / ("7" * 24)
    else:
        path = store / kind if kind == "ckptstore.json" else files(store, kind)[0]
        path.unlink()
    ODD[odd](path)
    storage = open_storage(store)
    key = path.relative_to(store).as_posix()
    with pytest.raises(CkptStoreError) as refused:
        read_table_at(storage, key) if kind == "packs" else storage.read(key)
    assert str(store) in str(refused.value)
    use(store)


@pytest.mark.parametrize("url", ["{tmp}/store", "memory://odd-{name}"])
@pytest.mark.parametrize("key", ["ckptstore.json", "sessions/" + "7" * 24])
def test_an_object_is_read_up_to_its_kinds_limit_and_not_beyond(
    tmp_path: Path, url: str, key: str
) -> None:
    storage = open_storage(url.format(tmp=tmp_path, name=tmp_path.name))
    limit = largest(key)
    assert limit is not None
    storage.put(key, bytes(limit))
    assert len(storage.read(key)) == limit
    storage.put(key, bytes(limit + 1))
    with pytest.raises(CkptStoreError, match=f"at most {limit}"):
        storage.read(key)
    storage.put(key, b"")
    assert storage.read(key) == b""
    storage.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["link", "link/store", "link/a/store"])
def test_a_place_behind_a_link_that_leads_nowhere_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at-all")
    with pytest.raises(CkptStoreError, match="link"):
        ckptstore.open(tmp_path / place)
