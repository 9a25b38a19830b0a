"""Where do the leaves of a received state go? Into new memory, or into live tensors if wanted.

A peer's claims are checked before memory is allocated for them. A live tensor receives a leaf only
if path, shape and dtype match and it shares memory with no other tensor: writing one leaf must not
change another.

A DTensor goes to a mesh of the ranks and dimension names that the sender gives: the receiver's own
if it has one, else a mesh without process groups, which needs no other rank and equals the mesh of
the training. On such a mesh, this process holds the same part as the peer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.torchft.wire import MeshName, MeshPlacement
from ckptstore.plugin.leaves import FlatState
from ckptstore.plugin.model import Box, Shape
from ckptstore.plugin.reading import Destination, Memory, Tree
from ckptstore.plugin.tensors import Destination as TensorDestination
from ckptstore.plugin.tensors import TensorSource, empty_local, held_of, is_dtensor, tensors
from ckptstore.plugin.text import bytes_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_SHARD = re.compile(r"S\((\d{1,3})\)|_S\((\d{1,3}), (\d{1,6})\)")


Like: TypeAlias = tuple[str, torch.dtype, Shape, MeshPlacement | None]
"""Path, dtype, shape and placement, by which a live tensor and a leaf must agree."""


@dataclass(frozen=True, slots=True)
class Target:
    """One leaf: its tensor or its bytes, and where its boxes go. `live` if that is memory in
    use.
    """

    value: Any
    parts: tuple[tuple[Box | None, Destination], ...] = ()
    live: bool = False


def check_claims(tree: Tree, wanted: Mapping[int, MeshPlacement], max_bytes: int) -> None:
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
    tree: Tree,
    wanted: Mapping[int, MeshPlacement],
    live: FlatState | None,
    meshes: "Iterable[DeviceMesh]",
) -> list[Target]:
    """A target for every leaf of a tree that passed `check_claims`; in tensors of `live` where they
    fit.
    """
    there = dict(_usable(live)) if live else {}
    known = list(meshes)
    return [_target(tree, i, wanted.get(i), there, known) for i in range(len(tree.schema))]


def _target(
    tree: Tree,
    i: int,
    wanted: MeshPlacement | None,
    there: Mapping[Like, Any],
    meshes: "list[DeviceMesh]",
) -> Target:
    schema, content, path = tree.schema, tree.content(i), tree.schema.paths[i]
    if schema.aliases[i] >= 0:
        return Target(None)
    if schema.kinds[i] != "tensor":
        if content.inline is not None:
            return Target(content.inline)
        data = bytearray(tree.raw_bytes(i))
        return Target(data, ((None, Memory(memoryview(data))),))
    dtype, shape = tensors.dtype_of(schema.dtypes[i]), schema.shapes[i]
    tensor: Any = there.get((path, dtype, shape, wanted))
    live = tensor is not None
    if wanted:
        tensor = tensor if live else attach(path, shape, dtype, wanted, meshes)
        if all(tensor.device_mesh is not mesh for mesh in meshes):
            meshes.append(tensor.device_mesh)  # a later leaf in this storage shares memory with it
        held = held_of(tensor)
        _check_same_boxes(tree, i, held.holding.boxes)
        parts = tuple((box, TensorDestination(part)) for box, part in held.parts)
        return Target(tensor, parts, live)
    tensor = tensor if live else tensors.empty(schema.dtypes[i], shape)
    destination = TensorDestination(tensor)
    if content.inline is not None and not live:
        destination.write(0, memoryview(content.inline))
        return Target(tensor)
    return Target(tensor, ((None, destination),), live)


def _check_placed(tree: Tree, i: int) -> int:
    """The bytes that the peer says it holds of a DTensor."""
    content, path = tree.content(i), tree.schema.paths[i]
    boxes = content.boxes or ()
    if (
        tree.schema.kinds[i] != "tensor"
        or tree.schema.aliases[i] >= 0
        or (not boxes and content.inline != b"")
    ):
        raise Corrupt(f"{path} is said to be a DTensor, and is none")
    return sum(prod(box.lengths) for box in boxes) * tree.extent(i)[1]


def _check_same_boxes(tree: Tree, i: int, own: tuple[Box, ...]) -> None:
    """Check that the peer holds the boxes that this rank has, if it has any: with one mesh and the
    same placements, ranks hold the same boxes or others.
    """
    if not own:
        return
    if own != tree.content(i).boxes:
        raise InvalidInput(
            f"the peer does not hold what this rank needs of {tree.schema.paths[i]}: receive from "
            "one with the same place in its mesh"
        )
    tree.check(i)


def _usable(live: FlatState) -> Iterator[tuple[Like, Any]]:
    """The live tensors that may receive a leaf: those that share memory with no other."""
    own = {
        i: [source.tensor]
        for i, source in enumerate(live.leaves)
        if isinstance(source, TensorSource)
    }
    for i, held in live.held.items():
        own[i] = [part.tensor for _, part in held.parts if isinstance(part, TensorSource)]
    tied = set(live.schema.aliases)
    shared = _overlapping([tensor for some in own.values() for tensor in some])
    for i, some in own.items():
        value: Any = live.held[i].origin if i in live.held else some[0]
        if (
            i not in tied
            and (i not in live.held or is_dtensor(value))
            and all(tensors.is_writable_by_range(t) and id(t) not in shared for t in some)
        ):
            where = placed(value) if i in live.held else None
            yield (live.schema.paths[i], value.dtype, tuple(value.shape), where), value


def _overlapping(some: list[torch.Tensor]) -> set[int]:
    """The ids of tensors whose memory overlaps another's."""
    ranges = sorted(
        (str(t.device), t.data_ptr(), t[(-1,) * t.ndim].data_ptr() + t.itemsize, id(t))
        for t in some
        if t.numel()
    )
    shared, last = set[int](), ("", 0, 0, 0)
    for each in ranges:
        if each[0] == last[0] and each[1] < last[2]:
            shared |= {each[3], last[3]}
        last = max(last, each, key=lambda found: (found[0], found[2]))
    return shared


def placed_leaves(flat: FlatState) -> dict[int, MeshPlacement]:
    """The placement of each DTensor of a state. Raises `InvalidInput` for a ShardedTensor, which
    has no mesh.
    """
    found: dict[int, MeshPlacement] = {}
    for leaf, held in flat.held.items():
        if flat.schema.aliases[leaf] >= 0:
            continue
        if not is_dtensor(held.origin):
            kind = type(held.origin).__name__
            raise InvalidInput(
                f"{flat.schema.paths[leaf]} is a {kind}; of distributed tensors, only DTensors can "
                "be sent: convert it"
            )
        found[leaf] = placed(held.origin)
    return found


def placed(tensor: "DTensor") -> MeshPlacement:
    mesh = tensor.device_mesh
    return MeshPlacement(
        mesh_name(mesh),
        tuple(map(str, tensor.placements)),
        tuple(tensor.stride()),
        mesh.device_type,
    )


def mesh_name(mesh: "DeviceMesh") -> MeshName:
    return MeshName(
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.mesh_dim_names or ()),
    )


def attach(
    path: str,
    shape: Shape,
    dtype: torch.dtype,
    wanted: MeshPlacement,
    meshes: "Iterable[DeviceMesh]",
) -> "DTensor":
    """A DTensor of any bytes, placed as `wanted` on one of this process's `meshes`, or on a mesh
    without process groups.

    Raises `InvalidInput` for a mesh without this process, and for placements that do not fit.
    """
    mesh = next(
        (mesh for mesh in meshes if mesh_name(mesh) == wanted.mesh), None
    ) or _without_groups(path, wanted)
    if wanted.mesh.shape and mesh.get_coordinate() is None:
        raise InvalidInput(
            f"{path} lies on {wanted.mesh}, and rank {mesh.get_rank()} is none of its ranks: "
            "receive from a peer with the same place in its mesh"
        )
    try:
        placements = [_placement(text) for text in wanted.placements]
        tensor: DTensor = empty_local(mesh, placements, shape, wanted.stride, dtype)
        return tensor
    except (ValueError, IndexError, RuntimeError) as error:
        raise InvalidInput(
            f"{path} cannot be placed as {', '.join(wanted.placements)} on {wanted.mesh}: {error}"
        ) from error


def _without_groups(path: str, wanted: MeshPlacement) -> "DeviceMesh":
    """A mesh of these ranks and names. Collectives over it fail, since creating groups needs all of
    its ranks.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    name = wanted.mesh
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidInput(
            f"{path} is a DTensor on {name}, and this process has no rank: call "
            "torch.distributed.init_process_group before it receives, "
            "or pass meshes= to the transport"
        )
    try:
        ranks = torch.tensor(name.ranks, dtype=torch.int, device="cpu").reshape(name.shape)
        return DeviceMesh(
            wanted.device, ranks, mesh_dim_names=name.names or None, _init_backend=False
        )
    except (ValueError, RuntimeError, AssertionError, OverflowError) as error:
        raise InvalidInput(
            f"{path} lies on {name}, which is no mesh that can be made here: {error}"
        ) from error


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match = _SHARD.fullmatch(text)
    if match and match[1]:
        return Shard(int(match[1]))
    if match:
        return _StridedShard(int(match[2]), split_factor=int(match[3]))
    if text != "R":
        raise ValueError(f"{text!r} is no placement that travels")
    return Replicate()
