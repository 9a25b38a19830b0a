"""A disk that fills up at any moment of a commit: a clear error, nothing lost, and after making
room the same store object goes on."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import NoSpace, Unavailable
from ckptstore.storage.local import LocalStorage
from ckptstore.storage.reserve import RESERVE_KEY
from tests.cli.running import run
from tests.maintenance.collecting import opened
from tests.support import mounts
from tests.support.checker import assert_no_garbage_after_gc, assert_sound, view_of
from tests.support.fixtures import store_of
from tests.support.fork_server import Nursery
from tests.support.mounts import free_bytes, leave_free, small_disk
from tests.support.workloads import small

PAGE = 4096
DISK_BYTES = 64 << 20
STEP = 4
ENOUGH = 512 << 10
"""Room in which every commit here fits."""


@pytest.fixture(autouse=True)
def _mountable() -> None:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)


@pytest.fixture
def template(scratch: Path) -> Path:
    return store_of(scratch / "template", STEP)


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    with small_disk(scratch / "disk", size_bytes=DISK_BYTES) as place:
        yield place


def _commit_with(room: int, template: Path, disk: Path, nursery: Nursery) -> bool:
    """Whether the commit fitted into `room` bytes."""
    place = copytree(template, disk / "store")
    before = view_of(place)
    ballast = leave_free(disk, room)
    child = nursery.run("commit_twice", place=str(place), step=STEP, ballast=str(ballast))
    where, errors, committed = (
        f"{room} bytes free",
        child.reports("error"),
        child.reports("committed"),
    )
    assert not child.wait(), where
    assert [int(step) for step, _ in committed] == [STEP, STEP + 1] and len(errors) <= 1, where
    for kind, message in errors:
        assert kind == "NoSpace" and "No space left" in message and "make room" in message, (
            f"{where}: {kind} {message}"
        )
    view = view_of(place)
    assert view.live == before.live | {commit for _, commit in committed}, where
    with ckptstore.open(place) as store:
        contents = {info.id: small(info.step or 0) for info in store.log()}
    assert_sound(place, contents)
    assert_no_garbage_after_gc(place, contents)
    rmtree(place)
    return not errors


def _fill_up(rooms: range, template: Path, disk: Path, nursery: Nursery) -> None:
    fitted = [_commit_with(room, template, disk, nursery) for room in rooms]
    assert not fitted[0] and fitted[-1], "the disk was never full, or always"


def test_full_at_some_pages_of_a_commit(
    template: Path, disk: Path, nursery: Nursery, seed: int
) -> None:
    step = 16 * PAGE
    rooms = range(Random(seed).randrange(8) * PAGE, ENOUGH, step)
    for room in rooms:
        _commit_with(room, template, disk, nursery)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_full_at_every_page_of_a_commit(template: Path, disk: Path, nursery: Nursery) -> None:
    _fill_up(range(0, ENOUGH, PAGE), template, disk, nursery)
    print(f"full after each of {ENOUGH // PAGE} pages of two commits")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_inode_left_at_every_new_file_of_a_commit(
    template: Path, scratch: Path, nursery: Nursery
) -> None:
    files = sum(1 for _ in template.rglob("*"))
    for more in range(2, 40):
        with small_disk(
            scratch / f"disk-{more}", size_bytes=DISK_BYTES, files=files + more
        ) as disk:
            place = copytree(template, disk / "store")
            child = nursery.run("commit_twice", place=str(place), step=STEP)
            assert child.wait() in (0, 1)
            with ckptstore.open(place) as store:
                contents = {info.id: small(info.step or 0) for info in store.log()}
                assert {commit for _, commit in child.reports("committed")} <= contents.keys()
                assert {kind for kind, _ in child.reports("error")} <= {"NoSpace"}
            assert_sound(place, contents)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_full_while_a_commit_is_made_in_the_background(
    template: Path, disk: Path, executor: Any
) -> None:
    place = copytree(template, disk / "store")
    before = view_of(place)
    with ckptstore.open(place, background=ckptstore.Async(executor=executor)) as store:
        store.commit_async(small(STEP), step=STEP).wait()
        ballast = leave_free(disk, 4 * PAGE)
        with pytest.raises(NoSpace, match="make room"):
            store.commit_async({"t": torch.randn(500_000)}, step=STEP + 1).wait()
        ballast.unlink()
        after = store.commit_async({"t": torch.randn(100_000)}, step=STEP + 2).wait()
        assert store.checkout(after.parents[0]).step == STEP
        after.verify()
    assert len(view_of(place).live) == len(before.live) + 2


def test_the_command_frees_a_completely_full_disk(template: Path, disk: Path) -> None:
    place = copytree(template, disk / "store")
    with ckptstore.open(place) as store:
        oldest = store.log()[-1].id
    leave_free(disk, 0)
    assert not free_bytes(disk)
    forgotten = run("-s", str(place), "forget", oldest)
    assert forgotten.code == 0, forgotten.err
    assert view_of(place).forgotten == {oldest}
    collected = run("-s", str(place), "gc", "--now")
    assert collected.code == 0, collected.err
    assert not view_of(place).forgotten
    assert free_bytes(disk) > 0
    with ckptstore.open(place) as store:
        contents = {info.id: small(info.step or 0) for info in store.log()}
        assert len(contents) == STEP - 1
    assert_sound(place, contents)


def test_the_command_says_that_the_disk_is_full(template: Path, disk: Path) -> None:
    place = copytree(template, disk / "store")
    (place / RESERVE_KEY).unlink()
    before = view_of(place)
    ballast = leave_free(disk, 0)
    tagged = run("-s", str(place), "tag", "best", "latest")
    assert tagged.code == 1 and "No space left" in tagged.err and "make room" in tagged.err, tagged
    assert view_of(place) == before
    ballast.unlink()
    assert run("-s", str(place), "tag", "best", "latest").code == 0


def test_a_disk_that_is_full_after_a_lost_answer_does_not_say_what_the_answer_was(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_new, answers = (
        LocalStorage.put_new,
        iter([Unavailable("the answer was lost"), NoSpace("full")]),
    )

    def lossy(self: LocalStorage, key: str, data: bytes) -> bool:
        answer = next(answers, None) if key.startswith("log/") else None
        if not isinstance(answer, NoSpace):
            created = put_new(self, key, data)
        if answer:
            raise answer
        return created

    with ckptstore.open(template) as store:
        monkeypatch.setattr(LocalStorage, "put_new", lossy)
        new = store.commit(small(STEP), step=STEP).id
    assert_sound(template, {commit: small(step) for commit, step in _steps(template).items()})
    assert new in view_of(template).live


def _steps(place: Path) -> dict[CommitId, int]:
    with opened(place) as handle:
        return {commit: row.step or 0 for commit, row in handle.log.replay().commits.items()}
