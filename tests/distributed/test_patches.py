"""Ranks that commit together store what changed of their shards; it restores in any other cut."""

from pathlib import Path

import torch
from torch.distributed.tensor import Shard

import ckptstore
from tests.distributed.layouts import group_of, meet, mesh_of, placed
from tests.distributed.pool import Pool
from tests.net.training import same
from tests.support.patching import nudged, small_chunks_too

SHAPE = (517, 150)
STEPS = 4


def commit(rank: int, path: Path) -> list[int]:
    """The new bytes of each of some commits of four ranks."""
    meet(4)
    found = []
    storage = ckptstore.Storage(chunk_bytes=1 << 16)
    with small_chunks_too(), ckptstore.open(path, storage=storage) as store:
        for step in range(STEPS):
            whole = nudged(SHAPE, step)
            state = {"w": placed(whole, mesh_of(4, False), (Shard(0),)), "step": step}
            found.append(store.commit({"x": state}, step=step).new_bytes)
    return found


def restore(rank: int, path: Path) -> list[bool]:
    """Whether each commit is restored right into columns."""
    meet(4)
    found = []
    with ckptstore.open(path) as store:
        for step in range(STEPS):
            target = placed(torch.zeros(SHAPE), mesh_of(4, False), (Shard(1),))
            store.checkout(step).restore({"x": {"w": target, "step": 0}})
            found.append(same(target.full_tensor(), nudged(SHAPE, step)))
    return found


def test_ranks_store_what_changed(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(commit, tmp_path / "store"):
        assert found[0] > nudged(SHAPE, 0).nbytes
        assert all(nbytes < 30_000 for nbytes in found[1:])
    assert all(map(all, pool.run(restore, tmp_path / "store")))
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(STEPS):
            assert same(store.checkout(step).read("x/w"), nudged(SHAPE, step))
        assert not store.fsck(read_data="all").findings


def commit_anew(rank: int, path: Path, step: int, size: int) -> int:
    """The new bytes of the first commit of `size` ranks that have the store open."""
    meet(4)
    mesh = mesh_of(size, False)
    if rank >= size:
        return 0
    with small_chunks_too(), ckptstore.open(path) as store:
        state = {"w": placed(nudged(SHAPE, step), mesh, (Shard(0),)), "step": step}
        ranks = ckptstore.Ranks(process_group=group_of(size))
        return store.commit({"x": state}, step=step, ranks=ranks).new_bytes


def test_other_ranks_that_go_on_store_what_changed(pool: Pool, tmp_path: Path) -> None:
    """Of the chunks of which one rank has all; others are put together, and whole."""
    pool.run(commit, tmp_path / "store")
    for step, size, most in ((4, 4, 125_000), (5, 3, 90_000), (6, 3, 90_000), (7, 4, 125_000)):
        assert pool.run(commit_anew, tmp_path / "store", step, size)[0] < most
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(8):
            assert same(store.checkout(step).read("x/w"), nudged(SHAPE, step))
        assert not store.fsck(read_data="all").findings
