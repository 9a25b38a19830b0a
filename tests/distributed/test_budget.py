"""The extra memory of a commit or a restore on a rank stays within `memory_budget_bytes`, exchanged
bytes included.
"""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import ckptstore
from tests.distributed.layouts import mesh_of, placed
from tests.distributed.pool import Pool
from tests.restore.counting import peak_buffers, peak_resident

MIB = 1 << 20
BUDGET_BYTES = 4 * MIB
SLACK_BYTES = MIB
RESIDENT_SLACK_BYTES = 8 * MIB
"""Memory that allocators keep, or that is not Python's."""

SMALL = 160
"""Leaves of 256 KiB, of which each rank has a quarter: 40 MiB in all, 30 of them exchanged."""


def state_of(number: int) -> dict[str, DTensor]:
    """Leaves of one chunk each, which one rank assembles from parts, one of them not contiguous."""
    mesh, generator = mesh_of(4, False), torch.Generator().manual_seed(number)
    noise = torch.randn((256, 256), generator=generator)
    small = {str(i): placed(noise + (number * SMALL + i), mesh, (Shard(0),)) for i in range(SMALL)}
    local = torch.randn((512, 2048), generator=generator).t()  # 4 MiB
    return {
        **small,
        "turned": DTensor.from_local(
            local,
            mesh,
            (Shard(0),),
            run_check=False,
            shape=torch.Size((8192, 512)),
            stride=(512, 1),
        ),
    }


def commit_and_restore(rank: int, path: Path) -> tuple[int, int, int, int, str]:
    """Memory peaks of a commit without a budget, a commit with one and a restore with one; resident
    memory of the second.
    """
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=256 << 10), threads=2) as store:
        store.commit({"model": state_of(1)}, memory_budget_bytes=BUDGET_BYTES)
        state = {"model": state_of(2)}
        with peak_buffers() as unbuffered:
            content = store.commit(state, memory_budget_bytes=BUDGET_BYTES).content_id
        state = {"model": state_of(3)}
        with peak_resident() as resident:
            store.commit(state, memory_budget_bytes=BUDGET_BYTES)
        store.commit({"model": state_of(1)})
        state = {"model": state_of(4)}
        with peak_buffers() as free:
            store.commit(state)
        same = {"model": state_of(2)}
        assert store.commit(same).content_id == content, "a budget changes no chunk"
        found = {"model": {name: torch.zeros_like(value) for name, value in same["model"].items()}}
        with peak_buffers() as restored:
            store.checkout().restore(
                found, memory_budget_bytes=BUDGET_BYTES, ranks=ckptstore.Ranks(broadcast=True)
            )
        assert all(
            torch.equal(found["model"][name].to_local(), value.to_local())
            for name, value in same["model"].items()
        )
        with pytest.raises(ckptstore.InvalidInput, match="at least 1310720 "):
            store.commit(same, memory_budget_bytes=MIB)
    return free.bytes, unbuffered.bytes, resident.bytes, restored.bytes, content


def test_ranks_commit_and_restore_within_a_budget(pool: Pool, tmp_path: Path) -> None:
    for free, unbuffered, resident, restored, _ in pool.run(commit_and_restore, tmp_path / "store"):
        assert unbuffered <= BUDGET_BYTES + SLACK_BYTES
        assert resident <= BUDGET_BYTES + RESIDENT_SLACK_BYTES
        assert restored <= BUDGET_BYTES + SLACK_BYTES
        assert free > 2 * BUDGET_BYTES, "without a budget this state takes more"
