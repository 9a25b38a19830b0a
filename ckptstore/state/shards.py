"""Which boxes of a distributed tensor does this rank hold, and where in memory?

Placements apply from the first mesh dimension to the last, each to the indices left by the
previous ones (`torch.distributed.tensor`). A strided shard cuts these into `split_factor`
stretches and each stretch into one part per rank. A rank gets its part of every stretch, so its
indices are several runs, and its shard several boxes. torch's own function gives one box there, and
takes milliseconds.

A rank outside the mesh, or without a part of the tensor, holds no box. A mesh without dimensions
divides nothing: a rank that has the whole tensor holds it, in the mesh or not.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple, TypeAlias

import torch

from ckptstore.core.model import Box, Shape
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
    return is_dtensor(tensor) or _is_instance(
        tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor"
    )


def held_of(tensor: Any) -> Held:
    """What this rank holds of a DTensor or a ShardedTensor.

    Raises `InvalidInput` for unfinished sums (Partial), for local tensors that are no plain blocks,
    and where a tensor's own memory is not what its placements say.
    """
    if is_dtensor(tensor):
        return _held_of_dtensor(tensor)
    shards = (_shard_part(shard) for shard in tensor.local_shards())
    parts = tuple((box, part) for box, part in shards if 0 not in box.lengths)
    metadata = tensor.metadata()  # which has what attributes of the tensor would warn about
    holding = Holding(
        None, (type(tensor.sharding_spec()).__name__,), tuple(box for box, _ in parts)
    )
    return Held(tuple(metadata.size), metadata.tensor_properties.dtype, holding, parts)


def with_local(
    tensor: Any, make: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> Any:
    """A DTensor or ShardedTensor placed as `tensor` is, of what `make` returns for each of this
    rank's local tensors. `dtype` is that of its elements on a rank without local tensors."""
    if is_dtensor(tensor):
        local = make(_local_of(tensor))
        return _dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards = [Shard(make(shard.tensor.detach()), shard.metadata) for shard in tensor.local_shards()]
    metadata = deepcopy(tensor.metadata())
    own = [shard.tensor.dtype for shard in shards]
    properties = metadata.tensor_properties
    properties.dtype = own[0] if own else dtype or properties.dtype
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
        (0,) if where is None else _placed(mesh, tuple(placements), shape, tuple(where))[-1].shape
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


def check_finished(placements: Sequence[Any]) -> None:
    """Raise `InvalidInput` for a DTensor placed so that its parts must still be summed."""
    if any(placement.is_partial() for placement in placements):
        raise InvalidInput(
            "a DTensor with Partial placements holds unfinished sums; redistribute it to Replicate "
            "or Shard first"
        )


def _held_of_dtensor(tensor: Any) -> Held:
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    if where is None and not mesh.ndim and tensor._local_tensor.shape == tensor.shape:
        where = ()
    shape, holding, part = _placed(
        mesh, tensor.placements, tensor.shape, None if where is None else tuple(where)
    )
    if where is None:
        return Held(shape, tensor.dtype, holding, ())
    local = _local_of(tensor)
    if local.shape != part.shape:
        raise InvalidInput(
            f"this rank holds {list(local.shape)} of a DTensor of shape {list(shape)} placed as "
            f"{', '.join(holding.placements)}; "
            f"wanted {list(part.shape)}: was it made by from_local without shape and stride? "
            "Commit tensor.full_tensor()"
        )
    if len(part.boxes) == 1:  # all of what is here
        return Held(shape, tensor.dtype, holding, ((part.boxes[0], local),))
    parts = tuple(
        [(box, _view(local, place)) for box, place in zip(part.boxes, part.local, strict=True)]
    )
    return Held(shape, tensor.dtype, holding, parts)


@lru_cache(1 << 14)
def _placed(
    mesh: Any, placements: tuple[Any, ...], shape: Shape, where: tuple[int, ...] | None
) -> "tuple[Shape, Holding, RankPart]":
    """What a DTensor's placements say of one rank. Tensors of one shape are placed alike, layer
    after layer and commit after commit."""
    check_finished(placements)
    names, shape = tuple(map(str, placements)), tuple(shape)
    if where is None:
        return shape, Holding(_mesh_of(mesh), names, ()), RankPart((), (), ())
    cuts = tuple(
        Cut(placement.dim % len(shape), size, number, getattr(placement, "split_factor", 1))
        for placement, size, number in zip(placements, mesh.shape, where, strict=True)
        if not placement.is_replicate()
    )
    part = rank_part(shape, cuts)
    return shape, Holding(_mesh_of(mesh), names, part.boxes), part


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


Run: TypeAlias = tuple[int, int]
"""Consecutive indices: the first, and how many."""


class Cut(NamedTuple):
    """One mesh dimension that divides tensor dimension `dim` among `parts` ranks, of which this one
    is number `number`."""

    dim: int
    parts: int
    number: int
    split_factor: int = 1


class RankPart(NamedTuple):
    """What a rank holds of a tensor: the shape of its own tensor, its boxes in global indices, and
    where each of them lies in its own tensor."""

    shape: Shape
    boxes: tuple[Box, ...]
    local: tuple[Box, ...]


def rank_part(shape: Shape, cuts: Sequence[Cut]) -> RankPart:
    """What a rank holds of a tensor of `shape` after `cuts`: boxes in the order of their offsets,
    none if it holds no element.

    Mesh dimensions that replicate cut nothing and are left out of `cuts`.
    """
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    starts = [list(accumulate((length for _, length in found), initial=0)) for found in runs]
    boxes, local = [], []
    for which in product(*(range(len(found)) for found in runs)):
        chosen = [found[i] for found, i in zip(runs, which, strict=True)]
        lengths = tuple(length for _, length in chosen)
        if 0 not in lengths:
            boxes.append(Box(tuple(first for first, _ in chosen), lengths))
            offsets = tuple(found[i] for found, i in zip(starts, which, strict=True))
            local.append(Box(offsets, lengths))
    return RankPart(tuple(found[-1] for found in starts), tuple(boxes), tuple(local))


def _cut(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """The part of `runs`, taken as one list of indices, that `cut` leaves to its rank."""
    size = sum(length for _, length in runs)
    left: list[Run] = []
    for start, stop in _chunks(size, cut.split_factor):
        first, last = _chunk(stop - start, cut.parts, cut.number)
        for run in _slice(runs, start + first, start + last):
            if left and sum(left[-1]) == run[0]:
                left[-1] = (left[-1][0], left[-1][1] + run[1])
            else:
                left.append(run)
    return left


def _chunks(size: int, parts: int) -> Iterator[tuple[int, int]]:
    return (_chunk(size, parts, i) for i in range(parts))


def _chunk(size: int, parts: int, i: int) -> tuple[int, int]:
    """The half-open range of part `i` as `torch.chunk` cuts: all parts as large as the first, as
    long as indices last."""
    each = -(-size // parts)
    return min(i * each, size), min((i + 1) * each, size)


def _slice(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Indices number `start` to `stop` of the list that `runs` are."""
    at = 0
    for first, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield first + low, high - low
        at += length
