"""Which tensors say by their attributes that they are boxes of a larger one, and which boxes?

torch 2.14 calls them `CheckpointableTensor`: any tensor with the attributes of `GEOMETRY`, of
whatever class, is a shard. Older releases of torch do not look for the attributes; a commit does
under all of them. Elements that lie in none of the boxes are padding: nobody stores or writes them.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple, TypeAlias

import torch

from ckptstore.core.geometry import intersect
from ckptstore.core.model import Box, Shape
from ckptstore.core.tiling import overlapping
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors

GEOMETRY = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

MARK = GEOMETRY[0]
"""What no other tensor has: who meets many tensors looks for it first."""

_Shapes: TypeAlias = tuple[Shape, ...]


class Placed(NamedTuple):
    """A box of the whole tensor, and where it lies in the local one."""

    box: Box
    local: Box


def is_checkpointable(tensor: Any) -> bool:
    """Whether `boxes_of` is for this tensor, unless its class says what it holds."""
    return hasattr(tensor, MARK) and all(hasattr(tensor, name) for name in GEOMETRY)


def boxes_of(tensor: Any) -> tuple[Shape, tuple[Placed, ...]]:
    """The shape of the whole tensor, and the boxes of it that `tensor` has, without empty ones.

    Raises `InvalidInput` for attributes that are not the boxes of any tensor, or not in this one.
    """
    try:
        shape = _shape(tensor.global_shape)
        starts, places, sizes = (tuple(map(_shape, getattr(tensor, name))) for name in GEOMETRY[1:])
    except TypeError as error:
        raise InvalidInput(
            f"a CheckpointableTensor whose attributes are no sizes ({error}); wanted a tuple of "
            "integers as global_shape, and tuples of these as global_offsets, local_offsets and "
            "local_sizes"
        ) from error
    return shape, _placed(shape, starts, places, sizes, tuple(tensor.shape))


def is_whole(tensor: Any) -> bool:
    """Whether `tensor` is all of the whole, and nothing else."""
    shape, placed = boxes_of(tensor)
    return placed == (Placed(Box.whole(shape), Box.whole(tuple(tensor.shape))),)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that the boxes of `tensor` lie in. Raises `InvalidInput` if it is no block."""
    if tensors.wraps_others(tensor) or not tensors.is_strided(tensor):
        raise InvalidInput(
            f"a CheckpointableTensor is a {type(tensor).__qualname__} of layout {tensor.layout}, "
            "no plain block of memory; give its attributes to a plain tensor"
        )
    plain = tensor.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def alike(tensor: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `make` returns for the memory of `tensor`, as the same boxes of the same whole."""
    made = make(local_of(tensor))
    for name in GEOMETRY:
        setattr(made, name, getattr(tensor, name))
    return made


def _shape(sizes: Any) -> Shape:
    return tuple(map(index, sizes))


@lru_cache(1 << 14)
def _placed(
    shape: Shape, starts: _Shapes, places: _Shapes, sizes: _Shapes, local: Shape
) -> tuple[Placed, ...]:
    """The boxes in the order of their offsets. Tensors are divided alike, commit after commit."""
    if len({len(starts), len(places), len(sizes)}) > 1:
        raise InvalidInput(
            f"a CheckpointableTensor has {len(starts)} global_offsets, {len(places)} local_offsets "
            f"and {len(sizes)} local_sizes; wanted one of each for each shard"
        )
    columns = (starts, places, sizes)
    if {len(each) for column in columns for each in column} - {len(shape)} or (
        starts and len(local) != len(shape)
    ):
        raise InvalidInput(
            f"a CheckpointableTensor of shape {list(local)} has shards of {list(shape)}, its "
            "global_shape; wanted as many dimensions in both, in all offsets and in all sizes"
        )
    found = [
        Placed(Box(start, size), Box(at, size))
        for start, at, size in zip(*columns, strict=True)
        if 0 not in size
    ]
    for box, own in found:
        for there, whole, what in ((box, shape, "global_shape"), (own, local, "own shape")):
            if intersect(there, Box.whole(whole)) != there:
                raise InvalidInput(
                    f"a shard of a CheckpointableTensor at {list(there.offsets)} of sizes "
                    f"{list(there.lengths)} lies outside of its {what} {list(whole)}"
                )
    if clash := next(overlapping([own for _, own in found]), None):
        raise InvalidInput(
            "two shards of a CheckpointableTensor have elements of its memory in common: those at "
            f"the local_offsets {list(clash[0].offsets)} and {list(clash[1].offsets)}"
        )
    return tuple(sorted(found))
