"""A commit like the last one plans nothing anew; one whose tensors have another dtype or shape does. A plan that fails fails on all."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.engine.ranks import commit, lead
from ckptstore.state.ranks.rounds import Peers
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


def commit_badly(rank: int, path: Path) -> tuple[dict[int, str], int]:
    """A commit in which rank 2 cannot work out its moves, and one after it in which it can; what the first failed with."""
    meet(4)
    state = {"x": {"a": placed(torch.arange(CUT[0] * CUT[1]).view(CUT), mesh_of(4, False), (torch.distributed.tensor.Shard(0),))}}

    def failing(*_args):  # type: ignore[no-untyped-def]
        raise MemoryError("no room for the moves")

    with ckptstore.open(path, chunk_bytes=1 << 16) as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit, "moves_of", failing if rank == 2 else commit.moves_of)
            with pytest.raises(ckptstore.CkptStoreError) as caught:
                store.commit(state, step=0, timeout_s=60)
        return caught.value.causes, store.commit(state, step=1).step or 0


def test_a_rank_that_cannot_follow_its_plan_is_everybodys_error(pool: Pool, tmp_path: Path) -> None:
    for causes, step in pool.run(commit_badly, tmp_path / "store"):
        assert list(causes) == [2] and "no room for the moves" in causes[2]
        assert step == 1


def commit_counted(rank: int, path: Path) -> list[list[str]]:
    """The rounds of two commits, and of one for which rank 3 has opened the store anew."""
    meet(4)
    state = {"x": {"a": placed(torch.arange(CUT[0] * CUT[1]).view(CUT), mesh_of(4, False), (torch.distributed.tensor.Shard(0),))}}
    rounds: list[list[str]] = []
    play = Peers.round

    def counting(self: Peers, what: str, *args: Any) -> bytes:
        rounds[-1].append(what.removeprefix("commit: "))
        return play(self, what, *args)

    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store, ckptstore.open(path) as other:
        patch.setattr(Peers, "round", counting)
        for step, used in enumerate((store, store, other if rank == 3 else store)):
            rounds.append([])
            used.commit(state, step=step)
    return rounds


def test_a_commit_takes_three_rounds_and_one_more_after_a_new_plan(pool: Pool, tmp_path: Path) -> None:
    new, known = ["plan", "prepare", "decide", "publish"], ["plan", "decide", "publish"]
    assert pool.run(commit_counted, tmp_path / "store") == [[new, known, new]] * 4


def test_only_what_changes_is_planned(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(commit_alike, tmp_path / "store")
    assert results[0] == [(1, 1), (1, 1), (1, 1), (2, 2), (3, 3)]
    assert results[3] == [(0, 1), (0, 1), (0, 1), (0, 2), (0, 3)]
