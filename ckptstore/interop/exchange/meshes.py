"""DTensors on their way between replicas: a sender names mesh and placements, a receiver finds its own mesh of the same ranks and names.

No mesh is made: that takes all its ranks. On a mesh of the same ranks and names, this process holds what the peer held on its own.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ckptstore.core.model import Shape
from ckptstore.errors import InvalidInput
from ckptstore.interop.exchange.protocol import MeshName, Placed
from ckptstore.state.flat import Flat
from ckptstore.state.ranks.held import empty_local, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_SHARD = re.compile(r"S\((\d{1,3})\)")
_STRIDED_SHARD = re.compile(r"_S\((\d{1,3}), (\d{1,6})\)")


def placed_leaves(flat: Flat) -> dict[int, Placed]:
    """How each DTensor of a state lies. Raises `InvalidInput` for a ShardedTensor, which has no mesh."""
    found: dict[int, Placed] = {}
    for leaf, held in flat.held.items():
        if flat.schema.aliases[leaf] >= 0:
            continue
        if not is_dtensor(held.origin):
            kind = type(held.origin).__name__
            raise InvalidInput(f"{flat.schema.paths[leaf]} is a {kind}; of distributed tensors, only DTensors can be sent: convert it")
        found[leaf] = placed(held.origin)
    return found


def placed(tensor: "DTensor") -> Placed:
    return Placed(mesh_name(tensor.device_mesh), tuple(map(str, tensor.placements)), tuple(tensor.stride()))


def mesh_name(mesh: "DeviceMesh") -> MeshName:
    return MeshName(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh_dim_names or ()))


def attach(path: str, shape: Shape, dtype: torch.dtype, wanted: Placed, meshes: "Iterable[DeviceMesh]") -> "DTensor":
    """A DTensor of any bytes, placed as `wanted` says on one of this process's `meshes`.

    Raises `InvalidInput` if none of them has these ranks and names, and for placements that do not fit.
    """
    meshes = list(meshes)
    mesh = next((mesh for mesh in meshes if mesh_name(mesh) == wanted.mesh), None)
    if mesh is None:
        known = ", ".join(sorted({str(mesh_name(mesh)) for mesh in meshes})) or "none"
        raise InvalidInput(f"{path} lies on {wanted.mesh}, and this process's meshes are: {known}; pass meshes= to the transport")
    try:
        placements = [_placement(text) for text in wanted.placements]
        tensor: DTensor = empty_local(mesh, placements, shape, wanted.stride, dtype)
        return tensor
    except (ValueError, IndexError, RuntimeError) as error:
        raise InvalidInput(f"{path} cannot be placed as {', '.join(wanted.placements)} on {wanted.mesh}: {error}") from error


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
