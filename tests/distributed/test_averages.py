"""Commits of different numbers of ranks are added, however their ranks held the leaves."""

from pathlib import Path

import torch

import ckptstore
from ckptstore.averages import combine, mean
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool


def commit_layouts(rank: int, path: Path, n: int, step: int) -> None:
    meet(n)
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank >= n:
        return
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        state = {"x": {name: layout(name, full() * step, n) for name in LAYOUTS}, "step": step}
        store.commit(state, step=step, ranks=ranks)


def test_the_mean_of_commits_of_four_and_two_ranks_is_that_of_whole_tensors(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    pool.run(commit_layouts, path, 4, 1)
    pool.run(commit_layouts, path, 2, 3)
    with ckptstore.open(path) as store:
        store.commit({"x": {name: full() * 5 for name in LAYOUTS}, "step": 5}, step=5)
        made = combine(store, [5, 1, 3], mean(3), select="x/*")
        for name in LAYOUTS:
            torch.testing.assert_close(made.read(f"x/{name}"), full() * 3)
        assert made.read("step") == 3
        last = combine(store, [5, 3], mean(2), select="step")
        assert all(torch.equal(last.read(f"x/{name}"), full() * 3) for name in LAYOUTS)
