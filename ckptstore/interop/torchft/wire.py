"""What do transports send each other over HTTP/1.1: paths, names, limits, bodies (docs/torchft.md)?
Pure.

Peers are not trusted: each number has a limit, and bytes that do not match their hash are refused.
A description names every chunk of a state, and ends with its own BLAKE3 hash. A chunk's name is its
checksum, as a store has it, which detects accidental damage but not deliberate forgery
(docs/decisions/036-chunks-travel-under-fast-checksums.md).
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import BaseModel, Field, StringConstraints
from xxhash import xxh3_128

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.torchft.invitation import Invitation, invitation_of
from ckptstore.plugin.encoding import canonical
from ckptstore.plugin.model import (
    CHECKSUM_BYTES,
    CHUNK_ID_BYTES,
    MIB,
    Shape,
    check_chunk_bytes,
    checksum,
    digest,
)
from ckptstore.plugin.writing import items_of

_PATH = re.compile(r"/ckptstore/1/(state|chunks)/(-?[0-9]{1,18})")

WAIT_HEADER = "Ckptstore-Wait-Ms"
"""How long the server may wait until a state is served."""

TRANSFER_HEADER = "Ckptstore-Transfer"
"""The receiver's id of its transfer; during a transfer, its state is not withdrawn."""

VERIFY_HEADER = "Ckptstore-Verify"
"""In a request for chunks after damaged ones: the server must compare its chunks with their
names."""

CHUNKS_PER_REQUEST = 1024
DESCRIPTION_BYTES_MAX = 16 * MIB
METADATA_BYTES_MAX = 256 * MIB
"""Limit for schema and pages of a state together."""

_NAME_ENDING = b"XXH3 of a chunk."
"""The end of every chunk name, which makes it as long as an id: pages hold it as they hold ids."""

_INVITATION = "ckptstore-transport:"
_INVITATION_BYTES_MAX = 8 << 10

Sized: TypeAlias = tuple[bytes, int]
"""A chunk's name and its raw bytes."""


Word: TypeAlias = Annotated[str, StringConstraints(max_length=200, pattern=r"^\P{C}*$")]
"""Printable text, as in a header."""
Size: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Sizes: TypeAlias = tuple[Size, ...]


class _Described(BaseModel):
    """A description as it travels, where DTensors name meshes by their number."""

    step: Annotated[int, Field(strict=True)]
    chunk_bytes: Size
    metadata: Annotated[list[tuple[Word, Size]], Field(min_length=1)]
    meshes: list[tuple[Sizes, Sizes, tuple[Word, ...]]]
    placed: list[tuple[Size, Size, tuple[Word, ...], Sizes, Word]]
    patches: tuple[Word, Size] | None = None


@dataclass(frozen=True, slots=True)
class MeshName:
    """A device mesh as all replicas know it: its shape, its ranks row by row, and its dimension
    names.
    """

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """The placement of a DTensor leaf on a mesh; the leaf's shape is that of the whole tensor.

    `device` is the sender's device type; a receiver's mesh may have another.
    """

    mesh: MeshName
    placements: tuple[str, ...]
    stride: tuple[int, ...]
    device: str = field(default="cpu", compare=False)


@dataclass(frozen=True, slots=True)
class Description:
    """A served state: its `metadata`, the schema and then the pages, are chunks as well, and
    `placed` lists the DTensor leaves. `patches` is a chunk that lists patches, if there are any.
    """

    step: int
    chunk_bytes: int
    metadata: tuple[Sized, ...]
    placed: Mapping[int, MeshPlacement]
    patches: Sized | None = None


class ServedPatch(NamedTuple):
    """A chunk that the sender has as a patch of `base`, by name. The patch has `nbytes`, and is
    served under a name of its own, as chunks are.
    """

    chunk: bytes
    base: bytes
    patch: bytes
    nbytes: int


_SERVED_PATCH = struct.Struct(f"<{CHUNK_ID_BYTES}s{CHUNK_ID_BYTES}s{CHUNK_ID_BYTES}sI")
SERVED_PATCH_BYTES = _SERVED_PATCH.size
"""Of a patch in the list; a state has at most one for each of its chunks."""


def path_of(kind: str, step: int) -> str:
    """The path of the `state` or the `chunks` of a step."""
    return f"/ckptstore/1/{kind}/{step}"


def parse_path(path: str) -> tuple[str, int] | None:
    """The inverse of `path_of`; None for any other path."""
    match = _PATH.fullmatch(path)
    return (match[1], int(match[2])) if match else None


def name_of(data: bytes | memoryview) -> bytes:
    """The name of a chunk: its checksum, made as long as an id."""
    return name_with(checksum(data))


def name_with(summed: bytes) -> bytes:
    """The name of the chunk that has this checksum."""
    return summed + _NAME_ENDING


def name_of_pieces(pieces: Iterable[bytes | memoryview]) -> bytes:
    """The name of a chunk, each piece hashed as it comes."""
    hashed = xxh3_128()
    for piece in pieces:
        hashed.update(piece)
    return name_with(hashed.digest())


def checksum_of(name: bytes) -> bytes:
    """The checksum of the chunk that has this name."""
    return name[:CHECKSUM_BYTES]


def encode_invitation(invitation: Invitation) -> str:
    return _INVITATION + json.dumps(asdict(invitation))


def decode_invitation(text: str) -> Invitation:
    """The inverse of `encode_invitation`; raises `InvalidInput`."""
    try:
        if not text.startswith(_INVITATION) or len(text) > _INVITATION_BYTES_MAX:
            raise ValueError("it is something else")
        return invitation_of(json.loads(text.removeprefix(_INVITATION)))
    except ValueError as error:
        raise InvalidInput(
            f"this is no metadata of a StoreTransport: it begins with {text[:40]!r}; both replicas "
            "need the same kind of transport"
        ) from error


def encode_description(description: Description) -> bytes:
    meshes = list(dict.fromkeys(placed.mesh for placed in description.placed.values()))
    listed = description.patches
    body = canonical.encode(
        {
            "step": description.step,
            "chunk_bytes": description.chunk_bytes,
            "metadata": [[chunk.hex(), nbytes] for chunk, nbytes in description.metadata],
            "patches": listed and [listed[0].hex(), listed[1]],
            "meshes": [[mesh.shape, mesh.ranks, mesh.names] for mesh in meshes],
            "placed": [
                [leaf, meshes.index(p.mesh), p.placements, p.stride, p.device]
                for leaf, p in description.placed.items()
            ],
        }
    )
    return body + digest(body)


def decode_description(data: bytes) -> Description:
    """The inverse of `encode_description`; raises `Corrupt`."""
    body, wanted = data[:-CHUNK_ID_BYTES], data[-CHUNK_ID_BYTES:]
    if len(data) <= CHUNK_ID_BYTES or digest(body) != wanted:
        raise Corrupt(
            f"a peer's description of its state does not match its hash ({len(data)} bytes came)"
        )
    try:
        described = _description(_Described.model_validate_json(body))
    except (ValueError, IndexError) as error:
        raise Corrupt(
            f"a peer's description of its state cannot be read: {error!r:.200}"
        ) from error
    listed = [described.patches] if described.patches else []
    if sum(nbytes for _, nbytes in (*described.metadata, *listed)) > METADATA_BYTES_MAX:
        raise Corrupt(
            f"a peer's description of its state names more than {METADATA_BYTES_MAX} bytes of "
            "metadata"
        )
    return described


def _description(said: _Described) -> Description:
    meshes = [MeshName(*mesh) for mesh in said.meshes]
    placed = {
        leaf: MeshPlacement(meshes[mesh], placements, stride, device)
        for leaf, mesh, placements, stride, device in said.placed
    }
    metadata = tuple(map(_sized, said.metadata))
    patches = _sized(said.patches) if said.patches else None
    return Description(said.step, check_chunk_bytes(said.chunk_bytes), metadata, placed, patches)


def _sized(said: tuple[str, int]) -> Sized:
    name, nbytes = bytes.fromhex(said[0]), said[1]
    if len(name) != CHUNK_ID_BYTES:
        raise ValueError("a chunk name has another length")
    return name, nbytes


def encode_patches(patches: Iterable[ServedPatch]) -> bytes:
    return b"".join(_SERVED_PATCH.pack(*patch) for patch in patches)


def decode_patches(data: bytes | memoryview) -> list[ServedPatch]:
    """The inverse of `encode_patches`; raises `Corrupt`."""
    if len(data) % _SERVED_PATCH.size:
        raise Corrupt(f"a peer's list of patches has {len(data)} bytes, which is no whole number")
    return [ServedPatch(*row) for row in _SERVED_PATCH.iter_unpack(data)]


def decode_names(body: bytes) -> list[bytes] | None:
    """The chunks that a request names; None for an invalid request."""
    count, rest = divmod(len(body), CHUNK_ID_BYTES)
    return items_of(body) if not rest and 0 < count <= CHUNKS_PER_REQUEST else None


def encode_request(
    method: str, path: str, host: str, headers: Mapping[str, str], body: bytes
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
