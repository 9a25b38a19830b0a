"""After damage was seen, new commits do not rely on it, and committing a state again heals older
commits."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import PackId, pack_key
from ckptstore.errors import Corrupt
from ckptstore.maintenance.check import Level
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.store import Store
from tests.maintenance.collecting import ALL, collected
from tests.maintenance.stores import CHUNK_BYTES, assert_equal, check, flip


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {name: torch.randn(20_000, generator=generator) for name in ("first", "second")}
    }


def zeros() -> dict[str, Any]:
    return {"model": {name: torch.zeros(20_000) for name in ("first", "second")}}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    with opened(place) as store:
        store.commit(state(1), step=1)
        store.commit(state(2), step=2)
    return place


def opened(place: Path) -> Store:
    return ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES))


def tensor_pack(place: Path, n: int = -1) -> PackId:
    """The pack of tensors that was registered `n`-th, by default the newest."""
    handle = StoreHandle(place)
    try:
        packs = sorted(handle.log.replay().packs.items())
        return [pack.id for _, pack in packs if not pack.metadata][n]
    finally:
        handle.close()


def damage(place: Path, n: int = -1) -> PackId:
    """Turn a bit of the first chunk of a pack."""
    name = tensor_pack(place, n)
    flip(place / pack_key(name), 5000)
    return name


def assert_whole(place: Path, *steps: int) -> None:
    with opened(place) as store:
        for step in steps:
            assert_equal(store.checkout(step).state_dict(), state(step))


def test_a_state_that_is_committed_again_after_its_restore_failed_is_written_again(
    store: Path,
) -> None:
    with opened(store) as training:
        training.commit(state(2), step=3)  # what this process remembers of its last commit
        damage(store)
        with pytest.raises(Corrupt):
            training.checkout(2).state_dict()
        snapshot = training.commit(state(2), step=4)
        assert snapshot.stats is not None and snapshot.stats.new_bytes >= 160_000
        assert_equal(training.checkout(4).state_dict(), state(2))
        assert_equal(training.checkout(2).state_dict(), state(2))
    with opened(store) as again:
        assert_equal(again.checkout(4).state_dict(), state(2))
        again.reindex()
        assert_equal(again.checkout(2).state_dict(), state(2))


def test_a_run_repeated_from_an_older_commit_does_not_rely_on_damage_that_resume_skipped(
    store: Path,
) -> None:
    damage(store)
    target = zeros()
    with opened(store) as training:
        resumed = training.resume(target)
        assert resumed is not None and resumed.step == 1
    with opened(store) as training:  # as after one more crash
        training.commit(state(2), step=2)
        assert_equal(training.checkout("latest").state_dict(), state(2))


def test_what_fsck_finds_another_process_does_not_rely_on(store: Path) -> None:
    with opened(store) as training:
        training.commit(state(2), step=3)
        damage(store)
        assert check(store, Level.DATA).damaged
        training.commit(state(2), step=4)
        assert_equal(training.checkout(4).state_dict(), state(2))
    assert not any(finding.commits for finding in check(store, Level.DATA).findings)


def test_what_is_wrong_in_a_mapped_tensor_is_not_relied_on(store: Path) -> None:
    with opened(store) as training:
        damage(store)
        snapshot = training.checkout(2)
        for name in state(2)["model"]:
            with suppress(Corrupt):
                snapshot.open(f"model/{name}", verify=True)
        training.commit(state(2), step=3)
    assert_whole(store, 2)


def test_a_pack_that_somebody_deleted_or_cut_is_not_relied_on(store: Path) -> None:
    with opened(store) as training:
        training.commit(state(2), step=3)
        path = store / pack_key(tensor_pack(store))
        path.unlink()
        training.commit(state(2), step=4)
        assert_equal(training.checkout(4).state_dict(), state(2))
        os.truncate(store / pack_key(tensor_pack(store)), 1000)
        training.commit(state(2), step=5)
        assert_equal(training.checkout(5).state_dict(), state(2))


def test_a_pack_that_fsck_reads_whole_is_relied_on_again(store: Path) -> None:
    name = damage(store)
    assert check(store, Level.DATA).damaged
    flip(store / pack_key(name), 5000)
    assert not check(store, Level.DATA).damaged
    with opened(store) as training:
        snapshot = training.commit(state(2), step=3)
        assert snapshot.stats is not None and snapshot.stats.new_bytes < 10_000


@pytest.mark.parametrize("order", ["the damaged copy is older", "the damaged copy is newer"])
def test_gc_keeps_the_copy_of_a_chunk_that_is_sound(store: Path, order: str) -> None:
    name = damage(store)
    check(store, Level.DATA)
    with opened(store) as training:
        more = {"tensor": torch.randn(100_000)} if order == "the damaged copy is newer" else {}
        training.commit({**state(2), "more": more}, step=3)
    if more:  # so that gc would rather have the newer copy
        flip(store / pack_key(name), 5000)
        damage(store)
    copied = [collected(store, ALL).copied_bytes for _ in range(3)]
    assert copied[0] and not copied[2]
    with opened(store) as training:
        assert_equal(training.checkout(2).state_dict(), state(2))
        assert_equal(training.checkout(3).state_dict(), {**state(2), "more": more})
    assert check(store, Level.DATA).findings == ()


def test_gc_leaves_every_copy_of_a_chunk_that_is_damaged_in_all_of_them(store: Path) -> None:
    damage(store)
    check(store, Level.DATA)
    with opened(store) as training:
        training.commit(state(2), step=3)
    damage(store)
    copies = [store / pack_key(tensor_pack(store, n)) for n in (-2, -1)]
    collected(store, ALL)
    assert all(copy.is_file() for copy in copies)


def test_a_commit_that_is_passed_over_is_said_on_stderr_without_any_set_up(store: Path) -> None:
    damage(store)
    script = (
        "import sys, torch, ckptstore\n"
        "target = {'model': {name: torch.zeros(20_000) for name in ('first', 'second')}}\n"
        "with ckptstore.open(sys.argv[1]) as store: store.resume(target)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store)], capture_output=True, text=True, check=True
    )
    assert "skipped commit" in done.stderr and "(step 2)" in done.stderr, done.stderr
