"""The power goes while a process commits, tags, forgets and collects on a real ext4 or xfs: what
was acknowledged is so when it is back."""

import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

import ckptstore
from ckptstore.maintenance.retention import KeepLast
from tests.support.checker import assert_acknowledged, assert_no_garbage_after_gc, assert_sound
from tests.support.fork_server import Child, Nursery
from tests.support.mounts import PowerDisk, power_disk_problem
from tests.support.workloads import CHUNK_BYTES, contents_of, small

MOST_COMMITS = 8
LONGEST_S = 0.03


def _cut_power(kind: str, cuts: int, nursery: Nursery, seed: int) -> str:
    if reason := power_disk_problem(kind):
        pytest.skip(reason)
    random, acknowledged = Random(seed), 0
    with TemporaryDirectory(prefix="ckptstore-") as folder:
        disk = PowerDisk(kind, Path(folder))
        place = disk.mountpoint / "store"
        for cut in range(cuts):
            disk.mount()
            try:
                child = nursery.start("change_on", place=str(place), first=1000 * cut).go()
                _wait_for_any_moment(child, random.randrange(0 if cut else 1, MOST_COMMITS), random)
                disk.cut()
                child.kill()
            finally:
                disk.unmount()
            disk.mount()
            try:
                acknowledged += _check(place, child, f"seed {seed}, cut {cut}")
            finally:
                disk.unmount()
    assert acknowledged
    return f"{kind}: {cuts} power cuts, {acknowledged} acknowledged commits, none lost"


def _wait_for_any_moment(child: Child, commits: int, random: Random) -> None:
    """Some moment after so many commits: nothing depends on which."""
    while len(child.reports("committed")) < commits and not child.reports("error"):
        time.sleep(0.001)
    time.sleep(random.uniform(0, LONGEST_S))


def _check(place: Path, child: Child, where: str) -> int:
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit(small(7), step=7)
    acknowledged = assert_acknowledged(place, child, where)
    contents = contents_of(place)
    assert_sound(place, contents)
    with ckptstore.open(place) as store:
        for name in store.tags():
            store.untag(name)
        store.forget(KeepLast(2))
    assert_no_garbage_after_gc(place, contents)
    return acknowledged


@pytest.mark.parametrize(("kind", "cuts"), [("ext4", 3), ("xfs", 2)])
def test_nothing_acknowledged_is_lost_when_the_power_goes(
    kind: str, cuts: int, nursery: Nursery, seed: int
) -> None:
    _cut_power(kind, cuts, nursery, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_nothing_acknowledged_is_lost_in_a_hundred_power_cuts(
    kind: str, nursery: Nursery, seed: int
) -> None:
    print(_cut_power(kind, 100, nursery, seed))
