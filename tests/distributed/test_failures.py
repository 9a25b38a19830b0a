"""A failure on one rank fails all, nothing becomes visible, and the next commit works."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore.commit.transaction import Transaction
from ckptstore.core.options import TIMEOUT_S
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.commit import _Publication
from ckptstore.distributed.coordinator import Coordinator
from ckptstore.distributed.rank_worker import RankWorker
from ckptstore.peers import collective_of
from ckptstore.repository import memory_budget
from ckptstore.repository.pack_writer import PackSet
from tests.distributed.layouts import full, group_of, layout, meet, placed
from tests.distributed.pool import Pool
from tests.support.torch_release import OLD_TORCH


class Refusing(nn.Linear):
    """A module whose `state_dict` raises."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise ValueError("no state today")


def commit_with_one_failing(rank: int, path: Path) -> str:
    meet(4)
    good = {"model": {"w": layout("rows", full(), 4)}}
    with ckptstore.open(path) as store:
        with pytest.raises(
            ckptstore.CkptStoreError, match="rank 2: ValueError: no state today"
        ) as caught:
            store.commit({"model": Refusing(2, 2)} if rank == 2 else good)
        assert list(caught.value.causes) == [2]
        assert caught.value.causes[2].startswith(
            "ValueError: no state today\nraised when the state of model was asked for"
        )
        assert isinstance(caught.value.__cause__, ValueError) == (rank == 2)
        return store.commit(good).id


def commit_with_a_full_disk(rank: int, path: Path) -> str:
    """One rank's packs find no space during the exchange of fragments."""
    meet(4)
    state = {"model": {"w": layout("rows", full(), 4)}}
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(PackSet, "writing", _full)
            with pytest.raises(ckptstore.NoSpace, match="rank 1: NoSpace: no room"):
                store.commit(state)
        assert store.log() == []
        return store.commit(state).id


def _full(*args: Any, **kwargs: Any) -> None:
    raise ckptstore.NoSpace("no room")


def contradict(rank: int, path: Path) -> None:
    """Ranks that disagree on the commit, or on what they hold."""
    meet(4)
    with ckptstore.open(path) as store:
        with pytest.raises(ckptstore.Conflict, match="rank 3 commits step 7"):
            store.commit({"x": {"a": 1}}, step=7 if rank == 3 else 1)
        part = {"x": {"w": layout("rows", full(), 4)}} if rank else {"x": {}}
        with pytest.raises(
            ckptstore.Conflict, match=r"x/w .* not held exactly once by ranks \[1, 2, 3\]"
        ):
            store.commit(part)
        with pytest.raises(ckptstore.Conflict, match="x/a should be the same"):
            store.commit(
                {"x": {"a": torch.tensor(rank)}}, ranks=ckptstore.Ranks(replicated=["x/*"])
            )
        assert store.log() == []


def commit_stages(rank: int, path: Path) -> list[str]:
    """Two stages of two ranks each, with one tensor tied across them, and private leaves."""
    meet(4)
    stage = rank // 2
    torch.manual_seed(0)
    tied = torch.randn(300, 40)
    layers = {
        f"layers.{2 * stage + i}": torch.full((300, 60), float(2 * stage + i)) for i in range(2)
    }
    model = {"embed": tied, **layers} if stage == 0 else {**layers, "head": tied}
    generator = torch.Generator().manual_seed(rank)
    with ckptstore.open(path) as store:
        snapshot = store.commit(
            {
                "model": model,
                "rng": ckptstore.RNGState(),
                "data": {"at": rank, "seen": generator.get_state()},
            },
            step=1,
        )
        assert snapshot.state_dict("data")["at"] == {0: 0, 1: 1, 2: 2, 3: 3}
        return [leaf.path for leaf in snapshot.leaves("model/*")]


def restore_stages(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    torch.manual_seed(0)
    tied = torch.randn(300, 40)
    model = {
        "embed": torch.zeros(300, 40),
        "head": torch.zeros(300, 40),
        **{f"layers.{i}": torch.zeros(300, 60) for i in range(4)},
    }
    with ckptstore.open(path) as store:
        data = {"at": -1, "seen": torch.Generator().get_state()}
        snapshot = store.checkout(1)
        snapshot.restore(
            {"model": model, "data": data},
            ranks=ckptstore.Ranks(process_group=group_of(n)),
            strict=False,
        )
        assert data["at"] == rank
        snapshot.restore(
            {"data": data},
            ranks=ckptstore.Ranks(
                process_group=group_of(n), private_from={i: 3 - i for i in range(n)}
            ),
            strict=False,
        )
        assert data["at"] == 3 - rank
        with pytest.raises(ckptstore.InvalidInput, match=f"rank {rank} has none of its own"):
            snapshot.restore(
                {"data": data},
                ranks=ckptstore.Ranks(
                    process_group=group_of(n), private_from=dict.fromkeys(range(n), 9)
                ),
            )
    assert torch.equal(model["embed"], tied)
    assert torch.equal(model["head"], tied)
    assert all((model[f"layers.{i}"] == i).all() for i in range(4))


def test_a_state_that_one_rank_cannot_give_is_everybodys_error(pool: Pool, tmp_path: Path) -> None:
    ids = pool.run(commit_with_one_failing, tmp_path / "store")
    assert len(set(ids)) == 1
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.id for info in store.log()] == ids[:1]


def test_a_disk_that_is_full_for_one_rank_is_full_for_all(pool: Pool, tmp_path: Path) -> None:
    ids = pool.run(commit_with_a_full_disk, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert torch.equal(store.checkout(ids[0]).read("model/w"), full())


def test_ranks_that_contradict_each_other_are_told(pool: Pool, tmp_path: Path) -> None:
    pool.run(contradict, tmp_path / "store")


def test_pipeline_stages_are_one_state_for_any_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    paths = pool.run(commit_stages, tmp_path / "store")[0]
    assert sorted(paths) == ["model/embed", "model/head", *(f"model/layers.{i}" for i in range(4))]
    for n in (1, 2, 4):
        pool.run(restore_stages, tmp_path / "store", n)


PHASES: dict[str, tuple[type, str]] = {
    "plan": (Collective, "round"),
    "exchange": (Collective, "exchange"),
    "decide": (RankWorker, "report"),
    "receipt": (_Publication, "_receipt"),
    "publish": (Coordinator, "publish"),
    "appended": (Transaction, "append"),
}
"""Where a rank is killed: when it enters a call, or, for the last, when it returns. Only the
coordinator reaches the last two. A silent rank enters and never answers.
"""

SILENCE_S = 15.0


def die(rank: int, path: Path, victim: int, survivors: list[int], phase: str) -> str | None:
    """`victim` is killed in `phase`; the others raise at once, despite a timeout of 300 s, and
    commit without it.
    """
    ranks = sorted([victim, *survivors])
    memory_budget.WINDOW_BYTES = 1  # so that every cut cell is exchanged in a window of its own
    group = dist.new_group(ranks, use_local_synchronization=True)
    silent = phase == "silence"
    assert collective_of(group)
    if silent and rank == victim:
        return None
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        if phase == "appended":  # so that the others have committed before
            store.commit(sharded_over(ranks, 9), ranks=ckptstore.Ranks(process_group=group))
        before = len(store.log())
        if rank == victim:
            owner, name = PHASES[phase]
            reached = getattr(owner, name)

            def kill(*args: Any, **kwargs: Any) -> None:
                if phase == "appended":
                    reached(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, name, kill)
        with pytest.raises(ckptstore.Unavailable) as caught:
            store.commit(
                sharded_over(ranks, before),
                ranks=ckptstore.Ranks(
                    process_group=group, timeout_s=SILENCE_S if silent else TIMEOUT_S
                ),
            )
        assert ranks.index(victim) in caught.value.causes
        assert not silent or list(caught.value.causes) == [ranks.index(victim)], (
            "who was silent, and nobody else"
        )
        assert len(store.log()) == before + (phase == "appended")
        with pytest.raises(ckptstore.Unavailable, match="was lost before"):
            store.commit(sharded_over(ranks, before), ranks=ckptstore.Ranks(process_group=group))
        left = dist.new_group(survivors, use_local_synchronization=True)
        made = store.commit(
            sharded_over(survivors, before + 10), ranks=ckptstore.Ranks(process_group=left)
        )
        newest, *older = store.log()
        assert [newest.id, *newest.parents] == [made.id, *(info.id for info in older[:1])]
        return made.id


def sharded_over(ranks: list[int], number: int) -> dict[str, Any]:
    """Tensors with cells cut by rank edges, of the second one between any two ranks in turn."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    rows, fused = (
        placed(full() + number, mesh, (each,))
        for each in (Shard(0), Shard(1) if OLD_TORCH else _StridedShard(0, split_factor=3))
    )
    return {"w": {"x": rows, "y": torch.arange(200_000.0) + number, "z": fused}}


@pytest.fixture
def doomed() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


def kill_one_by_one(pool: Pool, path: Path, deaths: Sequence[tuple[int, str]]) -> None:
    alive = [0, 1, 2, 3]
    for victim, phase in deaths:
        survivors = [rank for rank in alive if rank != victim]
        results = pool.run(die, path, victim, survivors, phase, ranks=alive)
        ids = [result for rank, result in zip(alive, results, strict=True) if rank != victim]
        assert len(set(ids)) == 1 and isinstance(ids[0], str)
        alive = survivors
    with ckptstore.open(path) as store:
        appended = [phase for _, phase in deaths].count("appended")
        assert len(store.log()) == len(deaths) + 2 * appended
        assert not store.fsck(read_data="100%").damaged


def test_survivors_of_a_killed_rank_raise_and_go_on_without_it(
    doomed: Pool, tmp_path: Path
) -> None:
    kill_one_by_one(doomed, tmp_path / "store", [(3, "silence"), (2, "exchange"), (0, "appended")])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "deaths",
    [
        [(3, "plan"), (2, "exchange")],
        [(0, "silence"), (1, "silence")],
        [(2, "decide"), (3, "receipt")],
        [(0, "plan"), (1, "decide")],
        [(0, "exchange"), (1, "receipt")],
        [(0, "decide"), (1, "publish")],
        [(0, "receipt"), (1, "appended")],
        [(0, "publish"), (3, "decide")],
    ],
    ids=lambda deaths: " ".join(f"{phase} of {victim}" for victim, phase in deaths),
)
def test_any_rank_may_die_in_any_phase(
    doomed: Pool, tmp_path: Path, deaths: list[tuple[int, str]]
) -> None:
    kill_one_by_one(doomed, tmp_path / "store", deaths)
