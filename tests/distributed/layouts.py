"""One tensor placed on ranks in all the ways that a checkpoint must carry, made without
communication."""

import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.torch_release import OLD_TORCH

SHAPE = (517, 150)
"""Divided unevenly by 2, 3 and 4; five cells of 64 KiB."""

LAYOUTS: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "replicate": (False, (Replicate(),)),
    "rows": (False, (Shard(0),)),
    "columns": (False, (Shard(1),)),
    "mesh": (True, (Shard(0), Shard(1))),
    "strided": (True, (_StridedShard(0, split_factor=2), Shard(0))),
    "fused": (False, (_StridedShard(0, split_factor=3),)),
    "hybrid": (True, (Replicate(), Shard(0))),
}
"""By name, whether the mesh has two dimensions, and the placements."""

if OLD_TORCH:
    del LAYOUTS["strided"], LAYOUTS["fused"]


def full() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


@cache
def group_of(n: int) -> Any:
    """The group of the first `n` ranks. Every rank of the pool must ask for it."""
    return dist.new_group(list(range(n)))


@cache
def mesh_of(n: int, two_dimensional: bool) -> DeviceMesh:
    """The first `n` ranks as a mesh. Every rank of the pool must ask for it."""
    ranks = torch.arange(n)
    return DeviceMesh(
        "cpu",
        ranks.view(-1, 2)
        if two_dimensional and n % 2 == 0
        else ranks.view(1, n)
        if two_dimensional
        else ranks,
    )


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    """`tensor` on `mesh`, cut by torch's own placements."""
    local, where = tensor, mesh.get_coordinate()
    assert where is not None
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            parts = placement._split_tensor(
                local, mesh.size(dim), with_padding=False, contiguous=True
            )[0]
            local = parts[where[dim]]
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def layout(name: str, tensor: torch.Tensor, n: int) -> DTensor:
    two_dimensional, placements = LAYOUTS[name]
    return placed(tensor, mesh_of(n, two_dimensional), placements)


def meet(n: int) -> None:
    """Make the groups for `n` ranks: to be called by every rank, member or not."""
    group_of(n)
    mesh_of(n, False)
    mesh_of(n, True)


def sharded(tensor: torch.Tensor, n: int) -> ShardedTensor:
    rank, rows = dist.get_rank(group_of(n)), -(-tensor.shape[0] // n)
    local = tensor[rank * rows : (rank + 1) * rows].clone()
    shard = LocalShard.from_tensor_and_offsets(local, [rank * rows, 0], dist.get_rank())
    return init_from_local_shards([shard], *tensor.shape, process_group=group_of(n))


def local(value: Any) -> torch.Tensor:
    if isinstance(value, ShardedTensor):
        return value.local_shards()[0].tensor
    return value.to_local() if hasattr(value, "to_local") else value


def quietly(rank: int, task: Any, *args: Any) -> Any:
    """Silences DCP's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task(rank, *args)
