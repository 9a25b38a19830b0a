"""A trainer fills a disk of 64 MiB: it is warned in time, told what would free space, or the
commit frees it."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import KeepLast
from ckptstore.core.config import MIB
from ckptstore.errors import NoSpace
from ckptstore.maintenance.disk_space import DiskRoom, shortage, warning
from tests.cli.running import call
from tests.maintenance.collecting import garbage
from tests.support import mounts
from tests.support.checker import view_of
from tests.support.mounts import free_bytes, leave_free, small_disk

DISK_BYTES = 64 * MIB
STATE_BYTES = 9 * MIB
ROOMY = DiskRoom(free=40 * MIB, new=(9 * MIB, 12 * MIB), logical=20 * MIB, reserve=MIB)


def state(step: int, nbytes: int = STATE_BYTES) -> dict[str, Any]:
    return {
        "model": {"weight": torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(step))}
    }


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as place:
        yield place


def fill_with_commits(store: ckptstore.Store) -> NoSpace:
    """Commit until the disk is full; the error."""
    for step in range(100):
        try:
            store.commit(state(step), step=step)
        except NoSpace as error:
            return error
    raise AssertionError("the disk is never full")


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (ROOMY, ""),
        (replace(ROOMY, free=None), ""),
        (
            replace(ROOMY, new=()),
            "takes about 20.0 MiB, and 40.0 MiB are free: enough for 2 like it",
        ),
        (
            replace(ROOMY, free=30 * MIB),
            "takes about 12.0 MiB, and 30.0 MiB are free: enough for 2 like it",
        ),
        (
            replace(ROOMY, free=MIB),
            "takes about 12.0 MiB, and 1.0 MiB are free: 11.0 MiB are missing; free some: "
            "`ckptstore forget`",
        ),
    ],
)
def test_a_warning_says_how_much_is_missing_or_how_often_it_is_enough(
    room: DiskRoom, said: str
) -> None:
    assert said in warning(room)
    assert bool(warning(room)) == bool(said)


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (
            replace(ROOMY, free=2 * MIB),
            "takes about 12.0 MiB, and 2.0 MiB are free: 10.0 MiB are missing",
        ),
        (
            replace(ROOMY, free=15 * MIB),
            "takes more than the 15.0 MiB that are free: up to 5.0 MiB are missing",
        ),
        (replace(ROOMY, free=50 * MIB), "but for a quota, inodes"),
    ],
)
def test_a_shortage_is_no_less_than_what_was_seen(room: DiskRoom, said: str) -> None:
    assert said in shortage(room)


def test_the_first_commit_is_weighed_against_the_disk_before_it_is_written(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ckptstore.open(disk / "store") as store,
        caplog.at_level(logging.WARNING),
        pytest.raises(NoSpace) as raised,
    ):
        store.commit(state(0, 2 * DISK_BYTES), step=0)
    (warned,) = [record.message for record in caplog.records]
    assert re.search(
        r"takes about 128 MiB, and 6\d\.\d MiB are free: 6\d\.\d MiB are missing", warned
    )
    assert re.search(
        r"takes about 128 MiB, .* are missing; neither `ckptstore gc --now` nor", str(raised.value)
    )
    assert free_bytes(disk) > DISK_BYTES - 4 * MIB
    assert not garbage(disk / "store")


def test_a_store_that_is_opened_again_expects_what_its_last_commits_took(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(disk / "store") as store:
        store.commit(state(0), step=0)
        store.commit(state(1), step=1)
    leave_free(disk, 5 * MIB)
    with ckptstore.open(disk / "store") as store, caplog.at_level(logging.WARNING):
        store.commit(state(1), step=2)
        store.commit(state(1), step=3)
    (warned,) = [record.message for record in caplog.records]
    assert (
        "the next commit takes about 9.0 MiB, and 5.0 MiB are free: 4.0 MiB are missing" in warned
    )
    doctor = call("-s", str(disk / "store"), "doctor")
    assert (
        doctor.code == 1
        and "the next commit takes about 9.0 MiB" in doctor.out
        and "ckptstore forget" in doctor.out
    )


def test_a_trainer_is_warned_once_while_there_is_still_room(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(disk / "store") as store, caplog.at_level(logging.WARNING):
        fill_with_commits(store)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and re.search(r"enough for 2 like it; free some", said[0])


def test_the_error_says_what_forget_and_gc_free_and_they_do(disk: Path) -> None:
    place = disk / "store"
    with ckptstore.open(place) as store:
        error = str(fill_with_commits(store))
        before = view_of(place)
        assert re.search(
            r"takes about 9\.0 MiB, and \d\.\d MiB are free: \d+ KiB are missing; "
            r"`ckptstore gc --now` alone frees nothing",
            error,
        )
        (promised,) = re.findall(
            r"after `ckptstore forget --keep-last 2` it frees (\d+\.\d) MiB", error
        )
        leave_free(disk, 0)
    assert call("-s", str(place), "forget", "--keep-last", "2").code == 0
    assert call("-s", str(place), "gc", "--now").code == 0
    assert free_bytes(disk) == pytest.approx(float(promised) * MIB, abs=2 * MIB)
    with ckptstore.open(place) as store:
        assert len(before.live) > len(store.log()) == 2
        store.commit(state(99), step=99)
        assert store.resume(state(0)) is not None


@pytest.mark.parametrize(
    "completely", [False, True], ids=["full for a commit", "full to the last byte"]
)
def test_a_commit_on_a_full_disk_collects_what_was_forgotten_and_is_made(
    disk: Path, completely: bool
) -> None:
    place = disk / "store"
    with ckptstore.open(place, storage=ckptstore.Storage(on_full="gc")) as store:
        fill_with_commits(store)
        assert not list((place / "sessions").iterdir())
        store.forget(KeepLast(2))
        kept = {info.id for info in store.log()}
        if completely:
            leave_free(disk, 0)
        commit = store.commit(state(50), step=50)
        assert torch.equal(commit.read("model/weight"), state(50)["model"]["weight"])
        assert {info.id for info in store.log()} == {*kept, commit.id}
        for kept_commit in kept:
            store.checkout(kept_commit).verify()
    assert not garbage(place)
    assert not list((place / "sessions").iterdir())


def test_a_commit_that_gc_cannot_help_is_refused_as_before(disk: Path) -> None:
    place = disk / "store"
    with ckptstore.open(place, storage=ckptstore.Storage(on_full="gc")) as store:
        error = fill_with_commits(store)
        before = view_of(place)
        assert "`ckptstore gc --now` alone frees nothing" in str(error)
        assert view_of(place) == before
        for info in store.log():
            store.checkout(info.id).verify()


def test_what_to_do_on_a_full_disk_is_one_of_two_things(tmp_path: Path) -> None:
    with pytest.raises(ckptstore.InvalidInput, match=r"on_full"):
        # what is tested
        ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(on_full="forget"))  # type: ignore[arg-type]
