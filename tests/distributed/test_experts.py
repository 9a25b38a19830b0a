"""Experts on some ranks, one each or divided over a small mesh, beside shared layers: one state on
any other layout.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from tests.distributed.layouts import group_of, meet, placed
from tests.distributed.pool import Pool

EXPERTS = 4
SHAPE = (300, 90)


@cache
def mesh(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)


@cache
def grid(n: int, experts: int) -> DeviceMesh:
    """`n` ranks: experts are divided over the first dimension, each expert over the second."""
    return DeviceMesh(
        "cpu",
        torch.arange(n).view(experts, -1),
        mesh_dim_names=("experts", "rows"),
        _init_backend=False,
    )


def expert(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def dense() -> torch.Tensor:
    return expert(99)


def stacked() -> torch.Tensor:
    return torch.stack([expert(number) for number in range(EXPERTS)])


def model(rank: int, n: int, filled: bool) -> dict[str, Any]:
    """The model of rank `rank` of `n`: its own experts, one shared by two ranks, and all experts
    stacked on a two-dimensional mesh.
    """

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if filled else torch.zeros_like(tensor)

    own = {f"own.{e}": of(expert(e)) for e in range(EXPERTS) if e % n == rank}
    pairs = {
        f"pairs.{e}": placed(of(expert(e)), mesh(*where), (Shard(0),))
        for e in (0, 1)
        if rank in (where := _pair(e, n))
    }
    all_of_them = grid(n, 2 if n == 4 else 1)
    return {
        **own,
        **pairs,
        "stacked": placed(of(stacked()), all_of_them, (Shard(0), Shard(1))),
        "router": placed(of(dense()), all_of_them, (Replicate(), Replicate())),
        "dense": placed(of(dense()), mesh(*range(n)), (Shard(0),)),
    }


def _pair(number: int, n: int) -> tuple[int, ...]:
    """The ranks that share an expert: neighbors of four ranks, all ranks of fewer."""
    return (2 * number, 2 * number + 1) if n == 4 else tuple(range(n))


def commit(rank: int, path: Path, n: int) -> float:
    """Commit as `n` ranks; returns the new part of the state."""
    meet(n)
    if rank >= n:
        return 0.0
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        snapshot = store.commit(
            {"model": model(rank, n, True)},
            step=n,
            ranks=ckptstore.Ranks(process_group=group_of(n)),
        )
        return snapshot.new_bytes / snapshot.logical_bytes


def restore(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    wanted = model(rank, n, True)
    with ckptstore.open(path) as store:
        for committed in (2, 4):
            state = {"model": model(rank, n, False)}
            # A rank takes its part of the whole.
            store.checkout(committed).restore(
                state,
                ranks=ckptstore.Ranks(process_group=group_of(n), broadcast=True),
                strict=False,
            )
            for name, value in wanted.items():
                assert torch.equal(local(state["model"][name]), local(value)), (committed, n, name)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def test_experts_find_other_ranks_and_other_meshes(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert max(pool.run(commit, path, 2)) > 0.2
    assert max(pool.run(commit, path, 4)) <= 0.02, "one state, whoever held it"
    with ckptstore.open(path) as store:
        for number in range(EXPERTS):
            assert torch.equal(store.checkout(4).read(f"model/own.{number}"), expert(number))
        assert torch.equal(store.checkout(4).read("model/pairs.1"), expert(1))
        assert torch.equal(store.checkout(4).read("model/stacked"), stacked())
    for n in (1, 2, 4):
        pool.run(restore, path, n)
