"""Statistics of tensors that ranks hold in parts, measured when they commit and afterwards."""

from pathlib import Path

import pytest
import torch

import ckptstore
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool


def commit_and_measure(rank: int, path: Path, n: int, step: int) -> None:
    meet(n)
    ranks = ckptstore.Ranks(process_group=group_of(n))
    if rank >= n:
        return
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        state = {"x": {name: layout(name, full() * step, n) for name in LAYOUTS}}
        snap = store.commit(state, step=step, ranks=ranks, stats=step > 1)
        if step > 1:
            assert snap.stats
            assert snap.stats.tensors
            for name in LAYOUTS:
                far = float((full() * step).double().norm())
                assert snap.stats.tensors[f"x/{name}"].norm == pytest.approx(far, rel=1e-6)


def test_every_layout_has_the_statistics_and_the_drift_of_the_whole_tensor(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    pool.run(commit_and_measure, path, 4, 2)
    pool.run(commit_and_measure, path, 2, 3)
    norm = float(full().double().norm())
    with ckptstore.open(path) as store:
        whole = {"x": {name: full() * 5 for name in LAYOUTS}}
        store.commit(whole, step=5, stats=True)
        rows = store.history()
        assert [row.step for row in rows] == [step for step in (2, 3, 5) for _ in LAYOUTS]
        for row in rows:
            assert row.elements == full().numel()
            assert row.norm == pytest.approx(norm * row.step, rel=1e-6)
            assert row.drift_first == pytest.approx(norm * (row.step - 2), rel=1e-6)
            assert row.max == float(torch.max(full()) * row.step)
