"""Whatever is written to a state from the moment `commit_async` has returned, the commit is what
the state was at the call."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from tests.commit.states import assert_committed, attack, frozen_copy, training
from tests.state.carrying import assert_same

MIB = 1 << 20


def _survives(store: ckptstore.Store, state: dict[str, Any], times: int) -> None:
    for step in range(times):
        wanted = frozen_copy(state)
        pending = store.commit_async(state, step=step)
        with attack(state):
            snapshot = pending.wait()
        assert_committed(snapshot, wanted)
        if step % 20 == 19:  # or a large state would fill the disk
            store.forget(ckptstore.KeepLast(2))
            store.gc(grace_s=0)


def test_a_commit_is_the_state_as_of_the_call(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=65536)) as store:
        _survives(store, training(), 10)


def test_so_is_one_of_more_than_fits_the_staging_memory(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store",
        storage=ckptstore.Storage(chunk_bytes=65536),
        background=ckptstore.Async(staging_bytes=2 * MIB),
    ) as store:
        _survives(store, training(2_000_000), 3)
        assert store.staging.held_bytes <= 2 * MIB


def test_one_tensor_larger_than_all_buffers(tmp_path: Path) -> None:
    tensor = torch.arange(40 * MIB, dtype=torch.int32)
    with ckptstore.open(tmp_path / "store") as store:
        pending = store.commit_async({"t": tensor})
        tensor.zero_()
        assert_same(pending.wait().read("t"), torch.arange(40 * MIB, dtype=torch.int32))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("large", [1000, 300_000, 40 * MIB])
def test_two_hundred_times(tmp_path: Path, large: int) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        _survives(store, training(large), 200)
        assert store.checkout().step == 199
    print(f"{large} floats: 200 commits of 200 are the state as of the call")
