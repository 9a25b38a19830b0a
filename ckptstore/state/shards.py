"""Which boxes of a distributed tensor does this rank hold, and where in memory?

Computed from the tensor's mesh and placements (`core.placements`): torch's function gives one box
where a strided shard has several, and takes milliseconds. A rank outside the mesh, or without a
part of the tensor, holds no box. A mesh without dimensions divides nothing: a rank that has the
whole tensor holds it, in the mesh or not.
"""

import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ckptstore.core.model import Box, Shape
from ckptstore.core.placements import Cut, held_boxes, local_shape
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import Holding, Mesh


class Held(NamedTuple):
    """A distributed tensor as this rank has it. `parts` are the holding's boxes and, as views of
    the rank's memory, their elements."""

    shape: Shape
    dtype: torch.dtype
    holding: Holding
    parts: tuple[tuple[Box, torch.Tensor], ...]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether `held_of` is for this tensor. Costs no import of torch.distributed."""
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    return _is_instance(tensor, "torch.distributed.tensor", "DTensor") or _is_instance(
        tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor"
    )


def held_of(tensor: Any) -> Held:
    """What this rank holds of a DTensor or a ShardedTensor.

    Raises `InvalidInput` for unfinished sums (Partial), for local tensors that are no plain blocks,
    and where a tensor's own memory is not what its placements say.
    """
    if _is_instance(tensor, "torch.distributed.tensor", "DTensor"):
        return _held_of_dtensor(tensor)
    shards = (_shard_part(shard) for shard in tensor.local_shards())
    parts = tuple((box, part) for box, part in shards if 0 not in box.lengths)
    metadata = tensor.metadata()  # which has what attributes of the tensor would warn about
    holding = Holding(
        None, (type(tensor.sharding_spec()).__name__,), tuple(box for box, _ in parts)
    )
    return Held(tuple(metadata.size), metadata.tensor_properties.dtype, holding, parts)


def empty_like_held(tensor: Any, dtype: torch.dtype) -> Any:
    """A DTensor or ShardedTensor of any bytes, placed as `tensor` is, with elements of `dtype`."""
    if not is_dtensor(tensor):
        return _empty_like_sharded(tensor, dtype)
    local = torch.empty_like(_local_of(tensor), dtype=dtype)
    return _dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def _empty_like_sharded(tensor: Any, dtype: torch.dtype) -> Any:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    metadata = deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    shards = [
        Shard(torch.empty_like(shard.tensor.detach(), dtype=dtype), shard.metadata)
        for shard in tensor.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def empty_local(
    mesh: Any, placements: Sequence[Any], shape: Shape, stride: Shape, dtype: torch.dtype
) -> Any:
    """A DTensor of any bytes, placed so on `mesh`, without a word to other ranks. Raises ValueError
    for what cannot be placed so."""
    where = mesh.get_coordinate() if mesh.ndim else ()
    if (
        len(placements) != mesh.ndim
        or len(stride) != len(shape)
        or any(p.is_shard() and not 0 <= p.dim < len(shape) for p in placements)
    ):
        raise ValueError(
            f"a tensor of shape {list(shape)} and stride {list(stride)} on {mesh.ndim} mesh "
            "dimensions"
        )
    local_shape = (
        (0,) if where is None else _placed(mesh, tuple(placements), shape, tuple(where)).local_shape
    )
    local = tensors.in_huge_pages(torch.empty(local_shape, dtype=dtype))
    return _dtensor(local, mesh, placements, shape, stride)


def _dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Shape, stride: Shape
) -> Any:
    """`local` as this rank's part of a DTensor; on a mesh without dimensions too, where
    `from_local` empties it on ranks outside."""
    from torch.distributed.tensor import DTensor

    if mesh.ndim:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(
        mesh, (), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def is_dtensor(value: Any) -> bool:
    return _is_instance(value, "torch.distributed.tensor", "DTensor")


def _is_instance(value: Any, module: str, name: str) -> bool:
    return _is_subclass(type(value), module, name)  # type: ignore[arg-type]  # classes are hashable


@lru_cache(256)
def _is_subclass(cls: type, module: str, name: str) -> bool:
    # Whoever has such an object has imported its module.
    known = sys.modules.get(module)
    return known is not None and issubclass(cls, getattr(known, name))


class _Placed(NamedTuple):
    """What a DTensor's placements say of one rank: the boxes that it has, the shape of its part,
    and where in the part each box lies."""

    shape: Shape
    holding: Holding
    local_shape: Shape
    local: tuple[Box, ...]


def _held_of_dtensor(tensor: Any) -> Held:
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    if where is None and not mesh.ndim and tensor._local_tensor.shape == tensor.shape:
        where = ()
    shape, holding, local_shape, local_boxes = _placed(
        mesh, tensor.placements, tensor.shape, None if where is None else tuple(where)
    )
    if where is None:
        return Held(shape, tensor.dtype, holding, ())
    local = _local_of(tensor)
    if local.shape != local_shape:
        raise InvalidInput(
            f"this rank holds {list(local.shape)} of a DTensor of shape {list(shape)} placed as "
            f"{', '.join(holding.placements)}; "
            f"wanted {list(local_shape)}: was it made by from_local without shape and stride? "
            "Commit tensor.full_tensor()"
        )
    boxes = holding.boxes
    if len(boxes) == 1:  # all of what is here
        return Held(shape, tensor.dtype, holding, ((boxes[0], local),))
    parts = tuple(
        [(box, _view(local, place)) for box, place in zip(boxes, local_boxes, strict=True)]
    )
    return Held(shape, tensor.dtype, holding, parts)


@lru_cache(1 << 14)
def _placed(
    mesh: Any, placements: tuple[Any, ...], shape: Shape, where: tuple[int, ...] | None
) -> _Placed:
    """Tensors of one shape are placed alike, layer after layer and commit after commit."""
    if any(placement.is_partial() for placement in placements):
        raise InvalidInput(
            "a DTensor with Partial placements holds unfinished sums; redistribute it to Replicate "
            "or Shard first"
        )
    names, shape = tuple(map(str, placements)), tuple(shape)
    if where is None:
        return _Placed(shape, Holding(_mesh_of(mesh), names, ()), (), ())
    cuts = tuple(
        Cut(placement.dim % len(shape), size, number, getattr(placement, "split_factor", 1))
        for placement, size, number in zip(placements, mesh.shape, where, strict=True)
        if not placement.is_replicate()
    )
    held = held_boxes(shape, cuts)
    holding = Holding(_mesh_of(mesh), names, tuple(each.box for each in held))
    return _Placed(shape, holding, local_shape(shape, cuts), tuple(each.local for each in held))


@lru_cache(256)
def _mesh_of(mesh: Any) -> Mesh:
    return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _local_of(tensor: Any) -> torch.Tensor:
    local: Any = tensor._local_tensor  # to_local() would build a view for autograd
    if type(local) is not torch.Tensor and hasattr(
        local, "wait"
    ):  # the result of a collective that may still be under way
        local = local.wait()
    if local.requires_grad or type(local) is not torch.Tensor:
        local = local.detach()
    if type(local) is not torch.Tensor or not tensors.is_strided(local):
        raise InvalidInput(
            f"this rank's part of a DTensor is a {type(local).__qualname__}, no plain block of "
            "memory; dequantize it first"
        )
    return local


def _shard_part(shard: Any) -> tuple[Box, torch.Tensor]:
    offsets, lengths = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
    local = shard.tensor.detach()
    if tuple(local.shape) != lengths or not tensors.is_strided(local):
        raise InvalidInput(
            f"a shard of a ShardedTensor has the shape {list(local.shape)}; its metadata says "
            f"{list(lengths)}"
        )
    return Box(offsets, lengths), local


def _view(local: torch.Tensor, place: Box) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(*place, strict=True)):
        if length != local.shape[dim]:
            local = local.narrow(dim, offset, length)
    return local
