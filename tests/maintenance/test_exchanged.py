"""A store moved, restored or replaced while a process has it open: only readable commits are
acknowledged."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import ckptstore
from ckptstore.core.ids import CONFIG_KEY, log_key
from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.log.log import Log
from ckptstore.storage import open_storage
from tests.log.builders import STORE, Wrapped, commit, open_log


def _state(i: int) -> dict[str, object]:
    return {"w": torch.full((4000,), float(i)), "i": i}


def _moved(store: Path, copy: Path) -> None:
    store.rename(store.with_name("moved"))


def _deleted(store: Path, copy: Path) -> None:
    shutil.rmtree(store)


def _put_back(store: Path, copy: Path) -> None:
    shutil.rmtree(store)
    copy.rename(store)


def _overwritten(store: Path, copy: Path) -> None:
    with ckptstore.open(copy) as other:
        for i in (20, 21):
            other.commit(_state(i), step=i)
    shutil.copytree(copy, store, dirs_exist_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(_state(1), step=1)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    return tmp_path / "store"


@pytest.mark.parametrize("happens", [_moved, _deleted, _put_back, _overwritten])
def test_a_process_that_has_it_open_commits_and_collects_no_more(
    store: Path, happens: Callable[[Path, Path], None]
) -> None:
    with ckptstore.open(store) as trainer:
        for i in (10, 11):
            trainer.commit(_state(i), step=i)
        happens(store, store.with_name("copy"))
        for attempt in (
            lambda: trainer.commit(_state(12), step=12),
            trainer.gc,
            lambda: trainer.tag("best", 1),
        ):
            with pytest.raises(
                Corrupt,
                match="entry 3 of the log, which this process has read or written, is no longer in",
            ):
                attempt()
    if happens in (_moved, _deleted):
        assert not store.exists()
    else:
        with ckptstore.open(store) as again:
            again.gc(grace_s=0)
            steps = [info.step for info in again.log()]
            assert steps == ([21, 20, 1] if happens is _overwritten else [1])
            for i in (step for step in steps if step is not None):
                assert torch.equal(again.checkout(i).read("w"), torch.full((4000,), float(i)))
            again.commit(_state(13), step=13)
            assert not again.fsck(read_data="100%").damaged


def test_a_store_without_its_config_acknowledges_nothing(store: Path) -> None:
    """`rm -rf` takes one file after the other, and may take the head of the log last."""
    with ckptstore.open(store) as trainer:
        trainer.commit(_state(10), step=10)
        config = (store / CONFIG_KEY).read_bytes()
        (store / CONFIG_KEY).unlink()
        for attempt in (
            lambda: trainer.commit(_state(12), step=12),
            trainer.gc,
            lambda: trainer.tag("best", 1),
        ):
            with pytest.raises(Corrupt, match=r"has lost its ckptstore\.json"):
                attempt()
        (store / CONFIG_KEY).write_bytes(config)
        trainer.commit(_state(13), step=13)
        assert [info.step for info in trainer.log()] == [13, 10, 1]


def test_an_entry_that_was_created_while_the_config_went_is_not_acknowledged(
    tmp_path: Path,
) -> None:
    storage = open_storage(tmp_path / "store", fsync=False)

    def create(create_new: Callable[[str, bytes], bool], key: str, data: bytes) -> bool:
        created = create_new(key, data)
        storage.delete(CONFIG_KEY)
        return created

    storage.put(CONFIG_KEY, b"{}")
    log = Log(Wrapped(storage, create), STORE, 1, with_config=True)
    with pytest.raises(Corrupt, match=r"has lost its ckptstore\.json"):
        log.append(commit(1))


@pytest.mark.parametrize("races", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_beside_rm_no_commit_is_acknowledged_that_began_without_the_config(
    tmp_path: Path, races: int
) -> None:
    acknowledged = 0
    for race in range(races):
        place = tmp_path / str(race)
        with ckptstore.open(place) as trainer:
            for step in range(20):
                trainer.commit(_state(step), step=step)
            removing = subprocess.Popen(["rm", "-rf", str(place)], stderr=subprocess.DEVNULL)
            with suppress(CkptStoreError):
                for step in range(20, 2000):
                    begun = (place / CONFIG_KEY).exists()
                    trainer.commit(_state(step), step=step)
                    assert begun, f"step {step} of race {race} was acknowledged"
                    acknowledged += 1
            removing.wait()
        shutil.rmtree(place, ignore_errors=True)
    print(
        f"{races} races with rm -rf, {acknowledged} commits acknowledged before the config had gone"
    )


def test_a_store_that_is_moved_before_its_first_commit_is_missed(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as trainer:
        (tmp_path / "store").rename(tmp_path / "moved")
        with pytest.raises(NotFound, match="no store at"):
            trainer.commit(_state(1))
        assert not (tmp_path / "store").exists()
        ckptstore.open(tmp_path / "store").close()
        with pytest.raises(Corrupt, match="another store than it was"):
            trainer.commit(_state(1))


@pytest.mark.parametrize("place", ["local", "memory"])
def test_nothing_is_appended_behind_an_entry_that_is_not_there(place: str, tmp_path: Path) -> None:
    storage = (
        open_storage(f"memory://{uuid4()}")
        if place == "memory"
        else open_storage(tmp_path / "store", fsync=False)
    )
    log = open_log(storage)
    for i in (1, 2):
        log.append(commit(i))
    last = storage.read(log_key(2))
    storage.delete(log_key(2))
    with pytest.raises(Corrupt, match="entry 2 of the log"):
        log.append(commit(3))
    assert storage.size(log_key(3)) is None
    storage.put(log_key(2), last)
    assert log.append(commit(3)).n == 3
