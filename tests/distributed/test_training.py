"""Unchanged modules and optimizers on many ranks: FSDP2 and DDP are trained, committed, and resumed
on another number of ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptstore
from tests.distributed.layouts import group_of, meet, mesh_of
from tests.distributed.pool import Pool
from tests.support.torch_release import FSDP2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 1031), nn.BatchNorm1d(1031), nn.ReLU(), nn.Linear(1031, 7))


def sharded(n: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = network()
    fully_shard(module, mesh=mesh_of(n, False))
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def replicated(n: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = DistributedDataParallel(network(), process_group=group_of(n))
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int
) -> list[float]:
    """The losses of some steps. Every rank sees the same batch, so that sums do not depend on the
    number of ranks.
    """
    losses = []
    for step in range(start, stop):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        loss = module(torch.randn(8, 60)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }


MAKE = {"fsdp": sharded, "ddp": replicated}


def train_and_commit(rank: int, path: Path, kind: str) -> tuple[list[float], str, int, int]:
    """Three steps, a commit, three more; returns the losses of the latter, which a run without a
    commit has too.
    """
    meet(4)
    module, optimizer = MAKE[kind](4)
    with ckptstore.open(path, run=kind) as store:
        first = store.commit({"model": module, "optimizer": optimizer}, step=0)
        untouched = [len(optimizer.state), train(module, optimizer, 0, 3)]
        snapshot = store.commit(
            {"model": module, "optimizer": optimizer, "rng": ckptstore.RNGState()}, step=3
        )
        store.commit({"model": module, "optimizer": optimizer}, tag=f"{kind}-without-rng")
        losses = train(module, optimizer, 3, 6)
    plain, plain_optimizer = MAKE[kind](4)
    assert untouched == [0, train(plain, plain_optimizer, 0, 3)]
    assert losses == train(plain, plain_optimizer, 3, 6)
    assert first.step == 0
    return losses, snapshot.content_id, snapshot.new_bytes, snapshot.logical_bytes


def resume_and_train(
    rank: int, path: Path, kind: str, n: int, run: str
) -> tuple[list[float], dict[str, torch.Tensor]] | None:
    """Resume `run` as `kind` on `n` ranks and go on."""
    meet(n)
    if rank >= n:
        return None
    module, optimizer = MAKE[kind](n) if n > 1 else (network(), None)
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=1e-3)
    with ckptstore.open(path, run=run) as store:
        snapshot = store.checkout(f"{run}@3")
        snapshot.restore(
            {"model": module, "optimizer": optimizer, "rng": ckptstore.RNGState()},
            ranks=ckptstore.Ranks(process_group=group_of(n)),
        )
        again = store.commit(
            {"model": module, "optimizer": optimizer},
            ranks=ckptstore.Ranks(process_group=group_of(n)),
        )
        assert again.content_id == store.checkout(f"{run}-without-rng").content_id
        assert again.new_bytes <= 0.01 * again.logical_bytes
    state = {
        name.removeprefix("module."): value for name, value in whole(module.state_dict()).items()
    }
    return train(module, optimizer, 3, 6), state


@pytest.fixture(scope="module")
def trained(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[float]]]:
    path = tmp_path_factory.mktemp("training") / "store"
    losses = {}
    for kind in MAKE:
        results = pool.run(train_and_commit, path, kind)
        assert len({result[1] for result in results}) == 1
        losses[kind] = results[0][0]
    return path, losses


@FSDP2
@pytest.mark.parametrize("run", ["fsdp", "ddp"])
@pytest.mark.parametrize(("kind", "n"), [("fsdp", 4), ("fsdp", 2), ("ddp", 3), ("fsdp", 1)])
def test_training_goes_on_where_it_stopped(
    pool: Pool, trained: tuple[Path, dict[str, list[float]]], run: str, kind: str, n: int
) -> None:
    path, losses = trained
    with ckptstore.open(path, run=run) as store:
        wanted = store.checkout(3).state_dict("model")
    for result in pool.run(resume_and_train, path, kind, n, run)[:n]:
        got, state = result
        assert got == pytest.approx(losses[run], rel=1e-5)
        if kind == run and n == 4:
            assert got == losses[run]
        assert set(state) == set(wanted)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def commit_replicas(rank: int, path: Path) -> tuple[int, int, int, int]:
    meet(4)
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))))
    with ckptstore.open(path) as store:
        snapshot = store.commit({"model": module})
        module.module[0].weight.data[0, 0] += rank == 2
        with pytest.raises(
            ckptstore.Conflict,
            match=r"model/0\.weight is one tensor on ranks \[0, 1, 2, 3\], but rank",
        ):
            store.commit({"model": module}, ranks=ckptstore.Ranks(trust_replicated=False))
        written = sum(
            file.stat().st_size
            for file in path.glob(f"packs/*/*-{rank}-*")
            if not file.name.endswith(".2")
        )
    return snapshot.new_bytes, snapshot.logical_bytes, written, rank


def test_replicas_cost_one_copy_that_all_ranks_write(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(commit_replicas, tmp_path / "store")
    new_bytes, logical_bytes, _, _ = results[0]
    assert new_bytes == pytest.approx(logical_bytes, rel=0.01)
    written = [result[2] for result in results]
    assert max(written) <= 1.1 * sum(written) / 4, written
