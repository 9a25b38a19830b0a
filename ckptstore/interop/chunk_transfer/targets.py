"""Where do the leaves of a received state go? Into new memory, or into live tensors if wanted.

A peer's claims are checked before memory is allocated for them. A live tensor receives a leaf only
if path, shape and dtype match and it shares memory with no other tensor: writing one leaf must not
change another.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.core.geometry import intersect
from ckptstore.core.model import Box, LeafContent, Shape
from ckptstore.core.text import bytes_text
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.chunk_transfer.meshes import attach, placed
from ckptstore.interop.chunk_transfer.protocol import Placed
from ckptstore.restore.reader import Destination, Memory, Tree
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.leaves import Destination as TensorDestination
from ckptstore.state.leaves import TensorSource
from ckptstore.state.shards import held_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BOXES_MAX = 256


@dataclass(frozen=True, slots=True)
class Target:
    """One leaf: its final value, and where its boxes go. `live` if that is memory in use."""

    value: Any
    parts: tuple[tuple[Box | None, Destination], ...] = ()
    live: bool = False


def check_claims(tree: Tree, wanted: Mapping[int, Placed], max_bytes: int) -> None:
    """Raise `Corrupt` for contradictory leaves, `InvalidInput` for a state that is too large."""
    total = 0
    for i in range(len(tree.schema)):
        if i in wanted:
            total += _check_placed(tree, i)
        elif tree.schema.aliases[i] < 0:
            if tree.content(i).boxes is not None:
                raise Corrupt(
                    f"{tree.schema.paths[i]} comes in boxes, and is said to be no DTensor"
                )
            tree.check(i)
            total += tree.raw_bytes(i)
    if total > max_bytes:
        raise InvalidInput(
            f"a peer's state has {bytes_text(total)}, and {bytes_text(max_bytes)} may be received: "
            "free memory, or pass max_bytes"
        )


def make_targets(
    tree: Tree, wanted: Mapping[int, Placed], live: FlatState | None, meshes: "Iterable[DeviceMesh]"
) -> list[Target]:
    """A target for every leaf of a tree that passed `check_claims`; in tensors of `live` where they
    fit.
    """
    there = dict(_usable(live)) if live else {}
    known = list(meshes)
    return [_target(tree, i, wanted.get(i), there, known) for i in range(len(tree.schema))]


def _target(
    tree: Tree, i: int, wanted: Placed | None, there: Mapping[str, Any], meshes: "list[DeviceMesh]"
) -> Target:
    schema, content = tree.schema, tree.content(i)
    if schema.aliases[i] >= 0:
        return Target(None)
    if schema.kinds[i] != "tensor":
        if content.inline is not None:
            return Target(content.inline)
        data = bytearray(tree.raw_bytes(i))
        return Target(data, ((None, Memory(memoryview(data))),))
    dtype, shape = tensors.dtype_of(schema.dtypes[i]), schema.shapes[i]
    found = there.get(schema.paths[i])
    if wanted:
        fits = (
            found is not None
            and hasattr(found, "device_mesh")
            and placed(found) == wanted
            and _is_like(found, dtype, shape)
        )
        tensor = found if fits else attach(schema.paths[i], shape, dtype, wanted, meshes)
        assert tensor is not None
        if all(tensor.device_mesh is not mesh for mesh in meshes):
            meshes.append(tensor.device_mesh)  # a later leaf in this storage shares memory with it
        held = held_of(tensor)
        _check_covered(schema.paths[i], content, [box for box, _ in held.parts])
        return Target(
            tensor, tuple((box, TensorDestination(part)) for box, part in held.parts), fits
        )
    fits = found is not None and not hasattr(found, "device_mesh") and _is_like(found, dtype, shape)
    tensor = found if found is not None and fits else tensors.empty(schema.dtypes[i], shape)
    destination = TensorDestination(tensor)
    if content.inline is not None and not fits:
        destination.write(0, memoryview(content.inline))
        return Target(tensor)
    return Target(tensor, ((None, destination),), fits)


def _is_like(tensor: Any, dtype: torch.dtype, shape: Shape) -> bool:
    return tensor.dtype == dtype and tuple(tensor.shape) == shape


def _check_placed(tree: Tree, i: int) -> int:
    """Check the bytes that the peer holds of a DTensor."""
    content, path = tree.content(i), tree.schema.paths[i]
    boxes = content.boxes or ()
    if (
        tree.schema.kinds[i] != "tensor"
        or tree.schema.aliases[i] >= 0
        or (not boxes and content.inline != b"")
    ):
        raise Corrupt(f"{path} is said to be a DTensor, and is none")
    if len(boxes) > BOXES_MAX:
        raise Corrupt(f"{path} comes in {len(boxes)} boxes; wanted at most {BOXES_MAX}")
    shape, width = tree.extent(i)
    if any(
        len(box.lengths) != len(shape)
        or any(o + n > s for o, n, s in zip(*box, shape, strict=True))
        for box in boxes
    ):
        raise Corrupt(f"{path} comes in boxes that do not lie in its shape {list(shape)}")
    if any(intersect(a, b) for a, b in combinations(boxes, 2)):
        raise Corrupt(f"{path} comes in boxes that overlap")
    if boxes:
        tree.check(i)
    return sum(prod(box.lengths) for box in boxes) * width


def _check_covered(path: str, content: LeafContent, boxes: list[Box]) -> None:
    """Check that the peer's boxes do not overlap, so that their volumes add up."""
    for box in boxes:
        shared = (intersect(box, theirs) for theirs in content.boxes or ())
        if sum(prod(each.lengths) for each in shared if each) != prod(box.lengths):
            raise InvalidInput(
                f"the peer does not hold what this rank needs of {path}: receive from one with the "
                "same place in its mesh"
            )


def _usable(live: FlatState) -> Iterator[tuple[str, Any]]:
    """By path, the live tensors that may receive a leaf: those that share memory with no other."""
    found: list[tuple[int, Any, list[torch.Tensor]]] = []
    for i, source in enumerate(live.leaves):
        if i in live.held:
            own = [part.tensor for _, part in live.held[i].parts if isinstance(part, TensorSource)]
            found.append((i, live.held[i].origin, own))
        elif isinstance(source, TensorSource):
            found.append((i, source.tensor, [source.tensor]))
    tied = set(live.schema.aliases)
    shared = _overlapping([tensor for _, _, own in found for tensor in own])
    for i, value, own in found:
        alone = i not in tied and live.schema.aliases[i] < 0
        if alone and all(
            tensors.is_writable_by_range(tensor) and id(tensor) not in shared for tensor in own
        ):
            yield live.schema.paths[i], value


def _overlapping(some: list[torch.Tensor]) -> set[int]:
    """The ids of tensors whose memory overlaps another's."""
    ranges = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _reach_bytes(t), id(t))
        for t in some
        if t.numel()
    )
    shared: set[int] = set()
    last: tuple[str, int, int, int] = ("", 0, 0, 0)
    for each in ranges:
        if each[0] == last[0] and each[1] < last[2]:
            shared.update((each[3], last[3]))
        if each[0] != last[0] or each[2] > last[2]:
            last = each
    return shared


def _reach_bytes(tensor: torch.Tensor) -> int:
    return (
        sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    ) * tensor.itemsize
