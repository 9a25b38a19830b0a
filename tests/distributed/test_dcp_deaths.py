"""A rank is killed in the middle of `dcp.save`: the others are told, and the store is unchanged or
has the whole checkpoint.
"""

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DeviceMesh, Shard

import ckptstore
from ckptstore.commit.parts import PartsCommitter
from ckptstore.interop.dcp import StoreReader, StoreWriter
from ckptstore.log.log import Log
from ckptstore.repository.pack_writer import PackSet
from tests.distributed.layouts import full, placed, quietly
from tests.distributed.pool import Pool
from tests.support.checker import assert_no_garbage_after_gc
from tests.support.patching import roundings

PHASES: dict[str, tuple[Any, str, bool]] = {
    "a plan of its own": (StoreWriter, "prepare_local_plan", False),
    "a global plan": (StoreWriter, "prepare_global_plan", True),
    "nothing written": (PartsCommitter, "write", False),
    "packs not durable": (PackSet, "wait", False),
    "everything written": (PartsCommitter, "write", True),
    "nothing published": (PartsCommitter, "publish", False),
    "no entry": (Log, "append", False),
    "an entry": (Log, "append", True),
}
"""Where the victim is killed: when it enters a call, or returns from it. After the global plan,
only the coordinator, rank 0, reaches calls other than writing.
"""

RANKS = 3


def state(ranks: list[int], number: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    return {
        "w": placed(full() + number, mesh, (Shard(0),)),
        "same": torch.arange(100_000.0) + number,
        **{name: placed(each, mesh, (Shard(0),)) for name, each in mixed(number).items()},
        "number": number,
    }


def mixed(number: int) -> dict[str, torch.Tensor]:
    """Masters, and weights that are their rounding, of which each rank has enough of to say so."""
    masters = torch.randn(RANKS * 256, 1024, generator=torch.Generator().manual_seed(number))
    return {"half": masters.to(torch.bfloat16), "single": masters}


def die(rank: int, path: Path, victim: int, phase: str) -> None:
    """Kill rank `victim` in the second save. The others load the first checkpoint, or the second if
    it exists, and save a third.
    """
    everybody = list(range(RANKS))
    group = dist.new_group(everybody)
    dcp.save(state(everybody, 1), storage_writer=StoreWriter(path, step=1), process_group=group)
    if rank == victim:
        kill_at(*PHASES[phase])
    # Gloo fails among the survivors too, with its own errors.
    with pytest.raises((CheckpointException, RuntimeError)):
        dcp.save(state(everybody, 2), storage_writer=StoreWriter(path, step=2), process_group=group)
    survivors = [each for each in everybody if each != victim]
    left = dist.new_group(survivors, use_local_synchronization=True)
    there = 2 if phase == "an entry" else 1
    found = state(survivors, 0)
    dcp.load(found, storage_reader=StoreReader(path), process_group=left)
    assert (
        torch.equal(found["w"].to_local(), state(survivors, there)["w"].to_local())
        and found["number"] == there
    )
    dcp.save(state(survivors, 3), storage_writer=StoreWriter(path, step=3), process_group=left)


def kill_at(owner: Any, name: str, afterwards: bool) -> None:
    reached = getattr(owner, name)

    def kill(*args: Any, **kwargs: Any) -> None:
        if afterwards:
            reached(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill)


def check(path: Path, victim: int, phase: str) -> None:
    with closing(Pool(RANKS)) as doomed:
        results = doomed.run(quietly, die, path, victim, phase)
    assert [isinstance(result, EOFError) for result in results] == [
        rank == victim for rank in range(RANKS)
    ]
    with ckptstore.open(path) as store:
        contents = {info.id: contents_of(info.step) for info in store.log() if info.step}
        assert sorted(content["model"]["number"] for content in contents.values()) == (
            [1, 2, 3] if phase == "an entry" else [1, 3]
        )
        assert len(roundings(store)) >= RANKS
        assert not store.fsck(read_data="100%").damaged
    assert_no_garbage_after_gc(path, contents)


def contents_of(number: int) -> dict[str, Any]:
    plain = {"w": full() + number, "same": torch.arange(100_000.0) + number, "number": number}
    return {"model": plain | mixed(number)}


@pytest.mark.soak
def test_a_coordinator_killed_before_its_entry_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    check(tmp_path / "store", 0, "no entry")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_the_coordinator_may_die_in_any_phase(tmp_path: Path, phase: str) -> None:
    check(tmp_path / "store", 0, phase)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "phase", ["a plan of its own", "nothing written", "packs not durable", "everything written"]
)
def test_any_other_rank_may_die_in_any_phase(tmp_path: Path, phase: str) -> None:
    check(tmp_path / "store", 2, phase)
