"""The read cache of a bucket on the host's disk: limited, verified, shared by processes, and
harmless if it fails."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, checksum, digest
from ckptstore.errors import Corrupt
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage.read_cache import END_BYTES, LOOK_EVERY, UNFINISHED_S, ReadCache, _File
from tests.maintenance.stores import assert_equal
from tests.shared.sites import CHUNK_BYTES, Site, on
from tests.support.patching import nudged

CHUNKS = 40
LIMIT_BYTES = 64 << 20


@pytest.fixture
def site() -> Site:
    return Site(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packs that are read from the bucket from here on."""
    keys: list[str] = []
    read_into = BucketStorage.read_into

    def noted(self: BucketStorage, key: str, offset: int, buffers: list[memoryview]) -> None:
        keys.append(key)
        read_into(self, key, offset, buffers)

    monkeypatch.setattr(BucketStorage, "read_into", noted)
    return keys


def large(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {
            "w": torch.randn(
                CHUNKS * CHUNK_BYTES // 4, generator=torch.Generator().manual_seed(seed)
            )
        }
    }


def files(folder: Path) -> list[Path]:
    """The chunks that are kept there."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def content(i: int, nbytes: int = 1000) -> bytes:
    return (str(i) * nbytes).encode()[:nbytes]


def keep(cache: ReadCache, data: bytes) -> ChunkId:
    chunk = digest(data)
    cache.put(chunk, memoryview(data))
    return chunk


def has(cache: ReadCache, data: bytes) -> bool:
    out = bytearray(len(data))
    return cache.read_into(digest(data), memoryview(out)) and out == data


def test_what_was_read_once_is_not_read_from_the_bucket_again(
    site: Site, here: Path, reads: list[str]
) -> None:
    with site.open(here) as store:
        store.commit(large(), step=1)
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        assert_equal(store.checkout(1).state_dict(), large())
    assert reads
    reads.clear()
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        assert_equal(store.checkout(1).state_dict(), large())
    assert reads == []
    with site.open(here) as store:
        store.checkout(1).read("model/w")
    assert reads, "without a limit nothing is kept or looked for"


def test_a_chunk_is_kept_once_whatever_pack_and_commit_it_is_read_from(
    site: Site, here: Path
) -> None:
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        for step in range(3):
            store.commit({**large(), "step": {"n": step}}, step=step)
            store.checkout(step).state_dict()
        kept = files(here / store.id / "read")
    assert len([path for path in kept if path.stat().st_size == CHUNK_BYTES + END_BYTES]) == CHUNKS


def test_patches_that_go_through_scratch_memory_are_kept(
    site: Site, here: Path, reads: list[str]
) -> None:
    """Although other tensors of the restore lie in the target, where bases of patches may be."""

    def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
        half = nudged((CHUNKS, CHUNK_BYTES // 2), step, torch.bfloat16)
        return {"model": {"half": half, "single": torch.full((CHUNK_BYTES,), float(step))}}

    with site.open() as store:
        for step in (1, 2):
            new_bytes = store.commit(state(step), step=step).new_bytes
        assert new_bytes < CHUNK_BYTES * CHUNKS // 2, "no patches"
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        for _ in range(2):
            reads.clear()
            target = {name: torch.zeros(t.shape) for name, t in state(2)["model"].items()}
            store.checkout(2).restore({"model": target}, dtype=torch.float32)
            assert torch.equal(target["half"], state(2)["model"]["half"].float())
        assert not reads


def test_the_limit_is_kept_and_every_read_is_right(site: Site, here: Path) -> None:
    limit_bytes = 10 * CHUNK_BYTES
    with site.open(here, read_cache_bytes=limit_bytes) as store:
        store.commit(large(), step=1)
        for _ in range(3):
            assert_equal(store.checkout(1).state_dict(), large())
        folder = here / store.id / "read"
        assert (
            0
            < sum(path.stat().st_size for path in files(folder))
            <= limit_bytes * (1 + 1 / LOOK_EVERY)
        )


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path / "read", 10_000)
    for i in range(10):
        keep(cache, content(i))
    for path in files(tmp_path / "read"):
        os.utime(path, (0, 0))
    assert has(cache, content(3))
    keep(cache, content(10))
    assert has(cache, content(3)) and has(cache, content(10))
    assert len(files(tmp_path / "read")) <= 9


def test_one_large_chunk_does_not_push_everything_out(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path / "read", 10_000)
    keep(cache, content(1))
    keep(cache, content(2, 5_000))
    assert has(cache, content(1)) and not has(cache, content(2, 5_000))


def test_what_others_have_kept_counts(tmp_path: Path) -> None:
    mine, theirs = (ReadCache(tmp_path / "read", 20_000) for _ in range(2))
    for i in range(100):
        keep(mine if i % 2 else theirs, content(i))
    assert sum(path.stat().st_size for path in files(tmp_path / "read")) <= 20_000 * (
        1 + 2 / LOOK_EVERY
    )


def test_what_is_kept_while_another_thread_evicts_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, release = ReadCache(tmp_path / "read", 10_000), ReadCache._release
    looked, go_on = threading.Event(), threading.Event()

    def slowly(self: ReadCache, found: list[_File]) -> None:
        looked.set()
        go_on.wait(60)
        release(self, found)

    monkeypatch.setattr(ReadCache, "_release", slowly)
    evicting = threading.Thread(target=keep, args=(cache, content(0)))
    evicting.start()
    looked.wait(60)
    for i in range(1, 41):
        keep(cache, content(i))
    go_on.set()
    evicting.join()
    assert (
        0
        < sum(path.stat().st_size for path in files(tmp_path / "read"))
        <= 10_000 * (1 + 1 / LOOK_EVERY)
    )


def link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\0"),
    "cut": lambda path: os.truncate(path, 100),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a link": link,
    "a folder": folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_its_chunk_is_not_believed(site: Site, here: Path, damage: str) -> None:
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        store.commit(large(), step=1)
        assert_equal(store.checkout(1).state_dict(), large())
        for path in files(here / store.id / "read"):
            DAMAGES[damage](path)
        for _ in range(2):
            assert_equal(store.checkout(1).state_dict(), large())


def exchange(path: Path) -> None:
    """Other bytes under the id, as from a pack whose footer gives its chunks ids of others."""
    other = bytes(path.stat().st_size - END_BYTES)
    path.write_bytes(other + checksum(other) + bytes.fromhex(path.name))


def test_who_compares_ids_compares_those_of_what_is_kept_too(site: Site, here: Path) -> None:
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        store.commit(large(), step=1)
        assert_equal(store.checkout(1).state_dict(), large())
        kept = files(here / store.id / "read")
        sizes = {path.name: path.stat().st_size - END_BYTES for path in kept}
        for path in kept:
            exchange(path)
    with on(here):
        handle = StoreHandle(site.place, read_cache_bytes=LIMIT_BYTES)
    with closing(handle):
        for name, nbytes in sizes.items():
            out = memoryview(bytearray(nbytes))
            handle.objects.read_into(bytes.fromhex(name), [out], verify_ids=True)
            assert digest(out).hex() == name


def test_verify_reads_the_bucket_whatever_is_kept(site: Site, here: Path) -> None:
    """`adopt` relies on it before it makes a directory hollow."""
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        store.commit(large(), step=1)
        snapshot = store.checkout(1)
        assert_equal(snapshot.state_dict(), large())
        snapshot.verify()
        storage = site.storage()
        for key, size in list(storage.list("packs/")):
            if size > CHUNK_BYTES:
                storage.put(key, bytes(size))
        with pytest.raises(Corrupt):
            snapshot.verify()


def test_a_cache_that_cannot_be_written_costs_one_warning(
    site: Site, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with site.open(here, read_cache_bytes=LIMIT_BYTES) as store:
        (here / store.id).mkdir(exist_ok=True, parents=True)
        (here / store.id / "read").write_bytes(b"a file")
        store.commit(large(), step=1)
        assert_equal(store.checkout(1).state_dict(), large())
        assert_equal(store.checkout(1).state_dict(), large())
    assert caplog.text.count("is not kept") <= 8, "one of each thread that met it"


def test_what_is_kept_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keep(ReadCache(tmp_path / "read", 10_000), content(1))
    finally:
        os.umask(before)
    (path,) = files(tmp_path / "read")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "read").stat().st_mode & 0o777 == 0o700


def test_a_store_in_a_directory_keeps_nothing(tmp_path: Path) -> None:
    site = Site(str(tmp_path / "store"))
    with site.open(tmp_path / "here", read_cache_bytes=LIMIT_BYTES) as store:
        store.commit(large(), step=1)
        assert_equal(store.checkout(1).state_dict(), large())
    assert not list(tmp_path.rglob("read"))


WRITER = """
import sys
from pathlib import Path
from ckptstore.core.ids import digest
from ckptstore.storage.read_cache import ReadCache
cache = ReadCache(Path(sys.argv[1]), 2_000_000)
print("ready", flush=True)
i = 0
while True:
    data = (str(i % 40) * 60_000).encode()[:60_000]
    out = bytearray(60_000)
    if cache.read_into(digest(data), memoryview(out)):
        assert out == data
    else:
        cache.put(digest(data), memoryview(data))
    i += int(sys.argv[2])
"""


def test_processes_that_are_killed_while_they_write_leave_nothing_that_is_believed_or_stays(
    tmp_path: Path,
) -> None:
    place = tmp_path / "read"
    for round_ in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(place), str(step)], stdout=subprocess.PIPE
            )
            for step in (1, 3, 7)[round_:]
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        while len(files(place)) < 10:
            assert all(writer.poll() is None for writer in writers)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    for path in files(place):
        if not path.name.endswith(".new"):
            kept = path.read_bytes()
            assert digest(kept[:-END_BYTES]).hex() == kept[-CHUNK_ID_BYTES:].hex() == path.name
    left = place / "00" / f"{'0' * 64}-00000000.new"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(bytes(60_000))
    for path in place.rglob("*.new"):
        os.utime(path, (path.stat().st_mtime - 2 * UNFINISHED_S,) * 2)
    keep(ReadCache(place, 2_000_000), content(1))
    assert list(place.rglob("*.new")) == []
