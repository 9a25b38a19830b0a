"""A commit like the last one plans nothing anew; one whose tensors have another dtype or shape does."""

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.engine.ranks import commit, lead
from tests.ranks.layouts import meet, mesh_of, placed
from tests.ranks.pool import Pool

CUT = (517, 150)
"""Edges between ranks cut its cells."""


def commit_alike(rank: int, path: Path) -> list[tuple[int, int]]:
    """Commits on four ranks; after each, how often the coordinator has planned and this rank has worked out its moves."""
    meet(4)
    found, counts = [], {"plans": 0, "moves": 0}

    def counting(name: str, function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path, chunk_bytes=1 << 16) as store:
        patch.setattr(lead, "plan_ranks", counting("plans", lead.plan_ranks))
        patch.setattr(commit, "moves_of", counting("moves", commit.moves_of))
        for step, (shape, dtype) in enumerate([(CUT, torch.float32)] * 3 + [(CUT, torch.int32), ((511, 150), torch.int32)]):
            whole = (torch.arange(shape[0] * shape[1]) * (step + 1)).view(shape).to(dtype)
            state = {name: placed(whole + i, mesh_of(4, False), (torch.distributed.tensor.Shard(0),)) for i, name in enumerate("abc")}
            snapshot = store.commit({"x": state}, step=step)
            assert all(torch.equal(snapshot.read(f"x/{name}"), whole + i) for i, name in enumerate("abc"))
            found.append((counts["plans"], counts["moves"]))
    return found


def test_only_what_changes_is_planned(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(commit_alike, tmp_path / "store")
    assert results[0] == [(1, 1), (1, 1), (1, 1), (2, 2), (3, 3)]
    assert results[3] == [(0, 1), (0, 1), (0, 1), (0, 2), (0, 3)]
