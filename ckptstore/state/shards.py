"""What does this rank hold of each leaf: boxes of a distributed tensor, a replica, or its own?

Placements apply from the first mesh dimension to the last, each to the indices left by the
previous ones (`torch.distributed.tensor`). A strided shard cuts these into `split_factor`
stretches and each stretch into one part per rank. A rank gets its part of every stretch, so its
indices are several runs, and its shard several boxes. torch's own function gives one box there, and
takes milliseconds.

A rank outside the mesh, or without a part of the tensor, holds no box. A mesh without dimensions
divides nothing: a rank that has the whole tensor holds it, in the mesh or not.

DistributedDataParallel keeps parameters equal and broadcasts the first rank's buffers; optimizers
of such parameters have equal state. Random number generators and data loaders differ by rank.
"""

import fnmatch
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Box, Shape
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.checkpointable import alike, boxes_of, is_checkpointable, local_of
from ckptstore.state.leaf_sources import FlatState, Holding, Mark, Mesh
from ckptstore.state.optimizer_forms import is_named
from ckptstore.state.stateful import RNGState, parameters_of
from ckptstore.state.tensors import TensorSource


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
        return is_checkpointable(tensor)
    return is_dtensor(tensor) or is_sharded_tensor(tensor) or is_checkpointable(tensor)


def shape_of(tensor: torch.Tensor) -> Shape:
    """The shape of a tensor; of a distributed one that of the whole, as far as it has one."""
    if is_checkpointable(tensor) and not is_dtensor(tensor) and not is_sharded_tensor(tensor):
        with suppress(InvalidInput):
            return boxes_of(tensor)[0]
    return tuple(tensor.shape)


def held_of(tensor: Any) -> Held:
    """What this rank holds of a DTensor, a ShardedTensor or a CheckpointableTensor.

    Raises `InvalidInput` for unfinished sums (Partial), for local tensors that are no plain blocks,
    and where a tensor's own memory is not what its placements say.
    """
    if is_dtensor(tensor):
        return _held_of_dtensor(tensor)
    if not is_sharded_tensor(tensor):
        return _held_of_checkpointable(tensor)
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
    """A distributed tensor placed as `tensor` is, of what `make` returns for each of this rank's
    local tensors. `dtype` is that of its elements on a rank without local tensors."""
    if is_dtensor(tensor):
        local = make(_local_of(tensor))
        return _dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    if not is_sharded_tensor(tensor):
        return alike(tensor, make)
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards = [Shard(make(shard.tensor.detach()), shard.metadata) for shard in tensor.local_shards()]
    metadata = deepcopy(tensor.metadata())
    own = [shard.tensor.dtype for shard in shards]
    properties = metadata.tensor_properties
    properties.dtype = own[0] if own else dtype or properties.dtype
    properties.requires_grad = any(shard.tensor.requires_grad for shard in shards)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def without_attributes(tensor: Any) -> Any:
    """A distributed tensor over the same memory, with those attributes alone that its kind has."""
    return with_local(tensor, lambda local: local)


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
    local = tensors.in_huge_pages(tensors.new(local_shape, dtype))
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


def is_sharded_tensor(value: Any) -> bool:
    return _is_instance(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


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


def _held_of_checkpointable(tensor: Any) -> Held:
    shape, placed = boxes_of(tensor)
    local = local_of(tensor)
    holding = Holding(None, ("CheckpointableTensor",), tuple(box for box, _ in placed))
    return Held(shape, local.dtype, holding, tuple((box, _view(local, at)) for box, at in placed))


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
    runs = [[range(n)] for n in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    boxes, local = [], []
    for chosen in product(*map(_placed_runs, runs)):
        lengths = tuple(len(run) for run, _ in chosen)
        if 0 not in lengths:
            boxes.append(Box(tuple(run.start for run, _ in chosen), lengths))
            local.append(Box(tuple(at for _, at in chosen), lengths))
    own_shape = tuple(sum(map(len, found)) for found in runs)
    return RankPart(own_shape, tuple(boxes), tuple(local))


def _placed_runs(runs: Sequence[range]) -> Iterator[tuple[range, int]]:
    """Each run with where it begins in the rank's own tensor."""
    start = 0
    for run in runs:
        yield run, start
        start += len(run)


def _cut(runs: Sequence[range], cut: Cut) -> list[range]:
    """The part of `runs`, taken as one list of indices, that `cut` leaves to its rank."""
    size = sum(map(len, runs))
    left: list[range] = []
    for i in range(cut.split_factor):
        start, stop = _chunk(size, cut.split_factor, i)
        first, last = _chunk(stop - start, cut.parts, cut.number)
        for run in _slice(runs, start + first, start + last):
            if left and left[-1].stop == run.start:
                left[-1] = range(left[-1].start, run.stop)
            else:
                left.append(run)
    return left


def _chunk(size: int, parts: int, i: int) -> tuple[int, int]:
    """The half-open range of part `i` as `torch.chunk` cuts: all parts as large as the first, as
    long as indices last."""
    each = -(-size // parts)
    return min(i * each, size), min((i + 1) * each, size)


def _slice(runs: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """Indices number `start` to `stop` of the list that `runs` are."""
    for run in runs:
        if part := run[max(start, 0) : max(stop, 0)]:
            yield part
        start, stop = start - len(run), stop - len(run)


@dataclass(frozen=True, slots=True)
class Globs:
    """What the caller knows, by globs of paths: leaves that are replicas, and leaves that are each
    rank's own.

    With `compare`, content decides about what nothing is known of; without it, that is each rank's
    own, equal or not.
    """

    replicated: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    compare: bool = True


def marked(
    app_state: Mapping[str, Any], flats: Mapping[str, FlatState], globs: Globs
) -> dict[str, FlatState]:
    """`flats` with marks."""
    known = _replicas(app_state.values())
    return {
        key: replace(flat, marks=_marks(app_state[key], flat, known, globs))
        for key, flat in flats.items()
    }


@dataclass(frozen=True, slots=True)
class _Replicas:
    """What DistributedDataParallel keeps equal: the memory of parameters and buffers, by address,
    and the parameters themselves, by identity."""

    memory: dict[int, Mark] = field(default_factory=dict)
    parameters: IdentityDict[Any, bool] = field(default_factory=IdentityDict)


def _replicas(values: Iterable[Any]) -> _Replicas:
    known = _Replicas()
    for module in chain.from_iterable(map(_parallel_in, values)):
        for name, parameter in module.module.named_parameters():
            if name not in module.parameters_to_ignore:
                known.parameters[parameter] = True
                known.memory.setdefault(parameter.data_ptr(), "replica")
        for buffer in module.module.buffers() if module.broadcast_buffers else ():
            known.memory[buffer.data_ptr()] = "lead"
    known.memory.pop(0, None)  # of what has no elements
    return known


def _parallel_in(value: Any) -> list[DistributedDataParallel]:
    modules = value.modules() if isinstance(value, torch.nn.Module) else ()
    return [each for each in modules if isinstance(each, DistributedDataParallel)]


def _marks(value: Any, flat: FlatState, known: _Replicas, globs: Globs) -> dict[int, Mark]:
    count = len(flat.schema)
    if is_each_ranks(value):
        return dict.fromkeys(range(count), "private")
    marks: dict[int, Mark] = {}
    if isinstance(value, torch.optim.Optimizer):
        if not is_named(flat.schema.skeleton):
            marks.update((i, "numbered") for i in flat.held)
        if all(each in known.parameters for each in parameters_of(value)):
            marks.update(
                (i, "replica")
                for i, kind in enumerate(flat.schema.kinds)
                if kind == "tensor" and i not in flat.held
            )
    elif known.memory:
        marks.update(
            (i, mark)
            for i, source in enumerate(flat.leaves)
            if isinstance(source, TensorSource)
            and (mark := known.memory.get(source.tensor.data_ptr()))
        )
    wanted = _paths_like(flat.schema.paths, globs.replicated)
    # Buffers that the first rank's count of may differ until the next forward broadcasts them.
    marks.update((i, "replica") for i in wanted if i not in flat.held and marks.get(i) != "lead")
    if not globs.compare and not _parallel_in(value):
        # Otherwise DistributedDataParallel makes ranks do the same, so that the rest is equal too.
        marks = {
            i: marks.get(i, "private") for i in range(count) if i in marks or i not in flat.held
        }
    marks.update((i, "private") for i in _paths_like(flat.schema.paths, globs.private))
    return marks


def _paths_like(paths: Sequence[str], globs: Sequence[str]) -> list[int]:
    return [
        i
        for i, path in enumerate(paths if globs else ())
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs)
    ]


def _is_loader(value: Any) -> bool:
    """Whether `value` hands out data from a place that it remembers: it is iterated over, has a
    state, and is no container."""
    return (
        hasattr(value, "load_state_dict")
        and hasattr(value, "state_dict")
        and hasattr(value, "__iter__")
        and not isinstance(value, Mapping | Sequence | torch.nn.Module)
    )


def is_each_ranks(value: Any) -> bool:
    """Whether the state of `value` belongs to its rank."""
    return isinstance(value, RNGState) or _is_loader(value)


def is_bound_to_world_size(value: Any) -> bool:
    """Whether `value` is a data loader that does not say it can go on with another number of ranks
    (`any_world_size = True`)."""
    return _is_loader(value) and not getattr(value, "any_world_size", False)
