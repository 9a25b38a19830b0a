"""How do DTensors travel between replicas? The sender names mesh and placements; the receiver uses
a mesh of the same ranks and names.

The receiver uses its own mesh if it has one. Otherwise it makes a mesh without process groups,
which needs no other rank and equals the mesh of the training. On a mesh of the same ranks and
names, this process holds the same part as the peer.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.core.model import Shape
from ckptstore.errors import InvalidInput
from ckptstore.interop.chunk_transfer.protocol import MeshName, Placed
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.shards import empty_local, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_SHARD = re.compile(r"S\((\d{1,3})\)")
_STRIDED_SHARD = re.compile(r"_S\((\d{1,3}), (\d{1,6})\)")


def placed_leaves(flat: FlatState) -> dict[int, Placed]:
    """The placement of each DTensor of a state. Raises `InvalidInput` for a ShardedTensor, which
    has no mesh.
    """
    found: dict[int, Placed] = {}
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


def placed(tensor: "DTensor") -> Placed:
    mesh = tensor.device_mesh
    return Placed(
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
    path: str, shape: Shape, dtype: torch.dtype, wanted: Placed, meshes: "Iterable[DeviceMesh]"
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


def _without_groups(path: str, wanted: Placed) -> "DeviceMesh":
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
        ranks = torch.tensor(name.ranks, dtype=torch.int).reshape(name.shape)
        return DeviceMesh(
            wanted.device, ranks, mesh_dim_names=name.names or None, _init_backend=False
        )
    except (ValueError, RuntimeError, AssertionError, OverflowError) as error:
        raise InvalidInput(
            f"{path} lies on {name}, which is no mesh that can be made here: {error}"
        ) from error


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if text == "R":
        return Replicate()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]))
    if match := _STRIDED_SHARD.fullmatch(text):
        from torch.distributed.tensor.placement_types import _StridedShard

        return _StridedShard(int(match[1]), split_factor=int(match[2]))
    raise ValueError(f"{text!r} is no placement that travels")
