"""A commit like the last one reuses its plan; another dtype or shape makes a new one. A plan that
fails, fails on all ranks.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.distributed import commit, coordinator
from ckptstore.distributed.collective import Collective
from tests.distributed.layouts import LAYOUTS, layout, meet, mesh_of, placed
from tests.distributed.pool import Pool

CUT = (517, 150)
"""Rank edges cut its cells."""

CHANGES = ["dtype", "shape", "placement", "mesh", "values", "memory", "ties"]


def commit_alike(rank: int, path: Path) -> list[tuple[int, int]]:
    """Commits on four ranks; returns, after each, how often the coordinator planned and this rank
    computed its moves.
    """
    meet(4)
    found, counts = [], {"plans": 0, "moves": 0}

    def counting(name: str, function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with (
        pytest.MonkeyPatch.context() as patch,
        ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store,
    ):
        patch.setattr(coordinator, "plan_ranks", counting("plans", coordinator.plan_ranks))
        patch.setattr(commit, "decode_task", counting("moves", commit.decode_task))
        for step, (shape, dtype) in enumerate(
            [(CUT, torch.float32)] * 3 + [(CUT, torch.int32), ((511, 150), torch.int32)]
        ):
            whole = (torch.arange(shape[0] * shape[1]) * (step + 1)).view(shape).to(dtype)
            state = {
                name: placed(whole + i, mesh_of(4, False), (torch.distributed.tensor.Shard(0),))
                for i, name in enumerate("abc")
            }
            snapshot = store.commit({"x": state}, step=step)
            assert all(
                torch.equal(snapshot.read(f"x/{name}"), whole + i) for i, name in enumerate("abc")
            )
            found.append((counts["plans"], counts["moves"]))
    return found


class Changing:
    """Four tensors on four ranks, changed in one way at a time, drawn from a seed that all ranks
    share.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._kinds: dict[str, list[Any]] = {
            name: [CUT, torch.float32, "rows", i] for i, name in enumerate("abcd")
        }
        self._tied: dict[str, str] = {}
        self._tensors = self._placed()

    def change(self, what: str) -> None:
        kind = self._kinds[self.random.choice("abcd")]
        shape, dtype, where, offset = kind
        if what == "dtype":
            kind[1] = self.random.choice(
                [each for each in (torch.float32, torch.int32, torch.float64) if each != dtype]
            )
        elif what == "shape":
            kind[0] = self.random.choice(
                [each for each in (CUT, (511, 150), (150, 517), (3, 40)) if each != shape]
            )
        elif what in ("placement", "mesh"):
            kind[2] = self.random.choice(
                [each for each in LAYOUTS if each != where and LAYOUTS[each][0] == (what == "mesh")]
            )
        elif what == "ties":
            self._tied = dict([self.random.sample("abcd", 2)])
        elif what == "values":  # in the same memory
            kind[3] = offset + 1
            for name, tensor in self._placed().items():
                self._tensors[name].to_local().copy_(tensor.to_local())
        if what not in ("nothing", "ties", "values"):
            self._tensors = self._placed()

    def state(self) -> dict[str, Any]:
        return {name: self._tensors[self._tied.get(name, name)] for name in self._tensors}

    def wholes(self) -> dict[str, torch.Tensor]:
        return {name: self._whole(self._tied.get(name, name)) for name in self._kinds}

    def _placed(self) -> dict[str, Any]:
        return {name: layout(kind[2], self._whole(name), 4) for name, kind in self._kinds.items()}

    def _whole(self, name: str) -> torch.Tensor:
        shape, dtype, _, offset = self._kinds[name]
        return (torch.arange(shape[0] * shape[1]) + offset).view(shape).to(dtype)


def commit_changing(rank: int, path: Path, seed: int) -> list[tuple[str, bool, bool]]:
    """Commits to one store, each of a state with one change. Returns the kind of change, whether
    all values were restored, and, for two of them, whether a store object without plans produces
    the same content.
    """
    meet(4)
    changing, found = Changing(seed), []
    compared = changing.random.sample(range(1, 1 + len(CHANGES)), 2)
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as kept:
        for step, what in enumerate(["nothing", *changing.random.sample(CHANGES, len(CHANGES))]):
            changing.change(what)
            snapshot, alike = kept.commit({"x": changing.state()}, step=step), True
            if step in compared:
                with ckptstore.open(path) as fresh:
                    alike = (
                        fresh.commit({"x": changing.state()}, step=step).content_id
                        == snapshot.content_id
                    )
            same = all(
                torch.equal(snapshot.read(f"x/{name}"), whole)
                for name, whole in changing.wholes().items()
            )
            found.append((what, same, alike))
    return found


def test_whatever_changes_between_commits_is_noticed(pool: Pool, tmp_path: Path, seed: int) -> None:
    for found in pool.run(commit_changing, tmp_path / "store", seed):
        assert {what for what, _, _ in found} == {"nothing", *CHANGES}
        assert all(same and alike for _, same, alike in found), found


def commit_badly(rank: int, path: Path) -> tuple[dict[int, str], int]:
    """A commit in which rank 2 fails to compute its moves, and a good one after it; returns the
    first one's error.
    """
    meet(4)
    state = {
        "x": {
            "a": placed(
                torch.arange(CUT[0] * CUT[1]).view(CUT),
                mesh_of(4, False),
                (torch.distributed.tensor.Shard(0),),
            )
        }
    }

    def failing(*_args):  # type: ignore[no-untyped-def]
        raise MemoryError("no room for the moves")

    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit, "decode_task", failing if rank == 2 else commit.decode_task)
            with pytest.raises(ckptstore.CkptStoreError) as caught:
                store.commit(state, step=0, ranks=ckptstore.Ranks(timeout_s=60))
        return caught.value.causes, store.commit(state, step=1).step or 0


def test_a_rank_that_cannot_follow_its_plan_is_everybodys_error(pool: Pool, tmp_path: Path) -> None:
    for causes, step in pool.run(commit_badly, tmp_path / "store"):
        assert list(causes) == [2] and "no room for the moves" in causes[2]
        assert step == 1


def commit_counted(rank: int, path: Path) -> list[list[str]]:
    """The rounds of two commits, and of one after rank 3 reopened the store."""
    meet(4)
    state = {
        "x": {
            "a": placed(
                torch.arange(CUT[0] * CUT[1]).view(CUT),
                mesh_of(4, False),
                (torch.distributed.tensor.Shard(0),),
            )
        }
    }
    rounds: list[list[str]] = []
    play = Collective.round

    def counting(self: Collective, what: str, *args: Any) -> bytes:
        rounds[-1].append(what.removeprefix("commit: "))
        return play(self, what, *args)

    with (
        pytest.MonkeyPatch.context() as patch,
        ckptstore.open(path) as store,
        ckptstore.open(path) as other,
    ):
        patch.setattr(Collective, "round", counting)
        for step, used in enumerate((store, store, other if rank == 3 else store)):
            rounds.append([])
            used.commit(state, step=step)
    return rounds


def test_a_commit_takes_three_rounds_and_one_more_after_a_new_plan(
    pool: Pool, tmp_path: Path
) -> None:
    new, known = ["plan", "prepare", "decide", "publish"], ["plan", "decide", "publish"]
    assert pool.run(commit_counted, tmp_path / "store") == [[new, known, new]] * 4


def test_only_what_changes_is_planned(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(commit_alike, tmp_path / "store")
    assert results[0] == [(1, 1), (1, 1), (1, 1), (2, 2), (3, 3)]
    assert results[3] == [(0, 1), (0, 1), (0, 1), (0, 2), (0, 3)]


def commit_in_two_groups(rank: int, path: Path) -> list[bool]:
    """Commits of ranks 0 and 1, of 1 and 2, and of 0 and 1 again, each with its own store object:
    rank 1 has a part of every one. Returns whether each commit has the values of its ranks.
    """
    meet(4)
    pairs = [[0, 1], [1, 2], [0, 1]]
    groups = [torch.distributed.new_group(pair) for pair in pairs]
    found = []
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        for step, (pair, group) in enumerate(zip(pairs, groups, strict=True)):
            if rank in pair:
                whole = torch.arange(1 << 18) + step
                alike = ckptstore.Ranks(process_group=group, replicated=["x/*"])
                snapshot = store.commit({"x": {"a": whole}}, step=step, ranks=alike)
                found.append(torch.equal(snapshot.read("x/a"), whole))
            torch.distributed.barrier()
    return found


def test_a_rank_keeps_no_plan_of_another_group(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(commit_in_two_groups, tmp_path / "store")
    assert results == [[True, True], [True, True, True], [True], []]
