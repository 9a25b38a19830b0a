"""forget and gc on a file system without a byte to spare."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptstore.core.options import Storage
from ckptstore.errors import NoSpace, Unavailable
from ckptstore.maintenance.compact.plan import CompactPolicy
from ckptstore.maintenance.retention import KeepLast
from ckptstore.open_store import open
from ckptstore.storage import open_storage
from ckptstore.storage.reserve import RESERVE_BYTES, RESERVE_KEY, is_full
from tests.maintenance.collecting import garbage, state_of, verify
from tests.maintenance.test_compact import STEPS, make, trained
from tests.maintenance.test_compact import verify as verify_trained


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    """Leave not a byte."""
    with (place / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def test_a_full_disk_frees_itself(small_disk: Path) -> None:
    place = small_disk / "store"
    with open(place, storage=Storage(chunk_bytes=65536)) as store:
        for step in range(6):
            store.commit(state_of(step, own=400_000), step=step)
    fill(small_disk)
    storage = open_storage(place)
    assert is_full(storage)
    assert storage.size(RESERVE_KEY) == RESERVE_BYTES
    with open(place) as store:
        with pytest.raises(Unavailable):
            store.commit(state_of(7), step=7)
        store.forget(KeepLast(2))
        fill(small_disk)
        report = store.gc(max_unused=0.0, grace_s=0)
        assert report.freed_bytes > 6_000_000
        store.commit(state_of(8), step=8)
    assert storage.size(RESERVE_KEY) == RESERVE_BYTES
    assert not is_full(storage)
    storage.close()
    verify(place, [8])
    with open(place) as store:
        for step in (4, 5):
            store.checkout(step).verify()


def test_a_gc_frees_a_disk_that_does_not_say_it_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS, which takes what is written and says so only when that is synced."""
    place = small_disk / "store"
    with open(place, storage=Storage(chunk_bytes=65536)) as store:
        for step in range(6):
            store.commit(state_of(step, own=400_000), step=step)
        store.forget(KeepLast(2))
        fill(small_disk)
        monkeypatch.setattr("ckptstore.storage.reserve.is_full", lambda storage: False)
        assert store.gc(max_unused=0.0, grace_s=0).freed_bytes > 6_000_000
        for step in (4, 5):
            store.checkout(step).verify()


def test_a_copy_that_does_not_fit_is_given_up_and_said_so(small_disk: Path) -> None:
    place = small_disk / "store"
    # One thread makes one pack of the first commit, which is larger than what is free.
    with open(place, threads=1, storage=Storage(chunk_bytes=65536)) as store:
        for step in range(6):
            store.commit(state_of(step, own=100_000, shared=1_500_000), step=step)
        store.forget(KeepLast(2))
    used = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    (small_disk / "filler").write_bytes(bytes((24 << 20) - used - (3 << 20)))
    with open(place) as store:
        report = store.gc(max_unused=0.0, grace_s=0)
        assert report.stopped
        assert report.freed_bytes
        assert not report.copied_bytes
        os.unlink(small_disk / "filler")
        assert not store.gc(max_unused=0.0, grace_s=0).stopped
    assert not garbage(place)
    with open(place) as store:
        for step in (4, 5):
            store.checkout(step).verify()


def test_a_compaction_on_a_full_disk_says_so_and_changes_nothing(small_disk: Path) -> None:
    place = small_disk / "store"
    make(place)
    policy = CompactPolicy(newest=1, every=4)
    with open(place) as store:
        store.compact(CompactPolicy(newest=100), with_gc=True)
    fill(small_disk)
    with open(place) as store:
        with pytest.raises(NoSpace):
            store.compact(policy)
        assert not store.fsck("data").findings
    (small_disk / "filler").unlink()
    with open(place) as store:
        store.compact(policy, with_gc=True)
        store.commit(trained(STEPS), step=STEPS)
        for step in range(STEPS + 1, STEPS + 5):
            store.commit(trained(step), step=step)
    fill(small_disk)
    with open(place) as store:
        assert "space" in store.gc().stopped
    verify_trained(place, range(STEPS + 5))
