"""What do transports send each other over HTTP/1.1: paths, limits, bodies (docs/torchft.md)? Pure.

Peers are not trusted: each number has a limit, and bytes that do not match their hash are refused.
A description names every chunk of a state by its hash, and ends with its own.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptstore.core.config import MIB, check_chunk_bytes
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import Shape
from ckptstore.distributed.addresses import Address
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.chunk_transfer.chunk_names import BLAKE3, NAMINGS
from ckptstore.objects import canonical

HELLO_PATH = "/ckptstore/1/hello"
_STATE_PATH = "/ckptstore/1/state/"
_CHUNKS_PATH = "/ckptstore/1/chunks/"
_IDS_PATH = "/ckptstore/1/ids/"
_PATH = re.compile(r"/ckptstore/1/(state|chunks|ids)/(-?[0-9]{1,18})")

WAIT_HEADER = "Ckptstore-Wait-Ms"
"""How long the server may wait until a state is served, or numbered chunks have been copied."""

TRANSFER_HEADER = "Ckptstore-Transfer"
"""The receiver's id of its transfer; during a transfer, its state is not withdrawn."""

VERIFY_HEADER = "Ckptstore-Verify"
"""In a request for chunks after damaged ones: the server must compare its chunks with their ids."""

EARLY_HEADER = "Ckptstore-Early"
"""In a state request of a peer that has nothing yet: an outline is enough, and chunks are taken
while others are copied.
"""

NAMES_HEADER = "Ckptstore-Names"
"""In a state request: chunks may be called by these names instead of ids (`chunk_names`)."""

NEAR_HEADER = "Ckptstore-Near"
"""In a chunk request of a peer that can read the server's memory: addresses are enough."""

STEP_HEADER = "Ckptstore-Step"
"""The step that is served, if another one was asked for."""

IDS_PER_REQUEST = 1024
HEAD_BYTES_MAX = 16 << 10
DESCRIPTION_BYTES_MAX = 16 * MIB
METADATA_BYTES_MAX = 256 * MIB
"""Limit for schema and pages of a state together."""

_INVITATION = "ckptstore-transport:"
_INVITATION_BYTES_MAX = 8 << 10
_ADDRESSES_MAX = 32
_MISSING = (1 << 64) - 1
_NO_ID = bytes(CHUNK_ID_BYTES)
_NUMBER = struct.Struct(">24xQ")

Sized: TypeAlias = tuple[bytes, int]
"""A chunk's id and its raw bytes."""


@dataclass(frozen=True, slots=True)
class Near:
    """The process of a transport, for peers on the same host, and the address of its instance in
    its memory.
    """

    where: str
    pid: int
    address: int


@dataclass(frozen=True, slots=True)
class Invitation:
    """How to reach a transport: the secret `token` opens it, and the public `instance` identifies
    it at an address. `names` are the chunk names that it offers besides ids.
    """

    instance: str
    token: str = field(repr=False)
    addresses: tuple[Address, ...]
    names: str = BLAKE3
    near: Near | None = None


@dataclass(frozen=True, slots=True)
class MeshName:
    """A device mesh as all replicas know it: its shape, its ranks row by row, and its dimension
    names.
    """

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of a DTensor leaf on a mesh; the leaf's shape is that of the whole tensor.

    `device` is the sender's device type; a receiver's mesh may have another.
    """

    mesh: MeshName
    placements: tuple[str, ...]
    stride: tuple[int, ...]
    device: str = field(default="cpu", compare=False)


@dataclass(frozen=True, slots=True)
class Description:
    """A served state: schema and pages are chunks as well, and `placed` lists the DTensor leaves.

    Chunks of tensors are called by `names`. An `early` description is an outline: the state is
    still being copied, and its pages have numbers instead of ids.
    """

    step: int
    chunk_bytes: int
    schema: Sized
    pages: tuple[Sized, ...]
    placed: dict[int, Placed]
    early: bool = False
    names: str = BLAKE3

    @property
    def metadata(self) -> tuple[Sized, ...]:
        return (self.schema, *self.pages)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer; `length` bytes follow it."""

    status: int
    length: int
    headers: dict[str, str]


def state_path(step: int) -> str:
    return f"{_STATE_PATH}{step}"


def chunks_path(step: int) -> str:
    return f"{_CHUNKS_PATH}{step}"


def ids_path(step: int) -> str:
    return f"{_IDS_PATH}{step}"


def parse_path(path: str) -> tuple[str, int] | None:
    """`state`, `chunks` or `ids`, and the step; None for any other path."""
    match = _PATH.fullmatch(path)
    return (match[1], int(match[2])) if match else None


def encode_invitation(invitation: Invitation) -> str:
    fields: dict[str, Any] = {
        "id": invitation.instance,
        "token": invitation.token,
        "at": invitation.addresses,
        "names": invitation.names,
    }
    if near := invitation.near:
        fields["near"] = [near.where, near.pid, near.address]
    return _INVITATION + json.dumps(fields, separators=(",", ":"))


def decode_invitation(text: str) -> Invitation:
    """The inverse of `encode_invitation`; raises `InvalidInput`."""
    try:
        if not text.startswith(_INVITATION) or len(text) > _INVITATION_BYTES_MAX:
            raise ValueError(f"it begins with {text[:40]!r}")
        fields = json.loads(text.removeprefix(_INVITATION))
        addresses = tuple((str(host), int(port)) for host, port in fields["at"][:_ADDRESSES_MAX])
        return Invitation(
            _word(fields["id"]),
            _word(fields["token"]),
            addresses,
            _names(fields),
            _near(fields.get("near")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"this is no metadata of a StoreTransport: {error}; both replicas need the same kind "
            "of transport"
        ) from error


def encode_description(description: Description) -> bytes:
    meshes = list(dict.fromkeys(placed.mesh for placed in description.placed.values()))
    body = canonical.encode(
        {
            "step": description.step,
            "chunk_bytes": description.chunk_bytes,
            "metadata": [[chunk.hex(), nbytes] for chunk, nbytes in description.metadata],
            "meshes": [[mesh.shape, mesh.ranks, mesh.names] for mesh in meshes],
            "placed": [
                [leaf, meshes.index(p.mesh), p.placements, p.stride]
                for leaf, p in description.placed.items()
            ],
            "devices": [p.device for p in description.placed.values()],
            "names": description.names,
            **({"early": True} if description.early else {}),
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
        said = canonical.decode(body)
        meshes = [
            MeshName(_numbers(shape), _numbers(ranks), tuple(map(_word, names)))
            for shape, ranks, names in said["meshes"]
        ]
        devices = map(_word, said.get("devices") or ["cpu"] * len(said["placed"]))
        placed = {
            _number(leaf): Placed(
                meshes[_number(mesh)], tuple(map(_word, placements)), _numbers(stride), device
            )
            for (leaf, mesh, placements, stride), device in zip(
                said["placed"], devices, strict=True
            )
        }
        schema, *pages = [(_id(chunk), _number(nbytes)) for chunk, nbytes in said["metadata"]]
        chunk_bytes, early = check_chunk_bytes(said["chunk_bytes"]), said.get("early") is True
        described = Description(
            int(said["step"]), chunk_bytes, schema, tuple(pages), placed, early, _names(said)
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, Corrupt) as error:
        raise Corrupt(
            f"a peer's description of its state cannot be read: {error!r:.200}"
        ) from error
    if sum(nbytes for _, nbytes in described.metadata) > METADATA_BYTES_MAX:
        raise Corrupt(
            f"a peer's description of its state names more than {METADATA_BYTES_MAX} bytes of "
            "metadata"
        )
    return described


def encode_number(number: int) -> bytes:
    """The placeholder for the id of chunk `number` until it has been copied. No hash has this
    form.
    """
    return _NUMBER.pack(number)


def decode_number(chunk: bytes) -> int | None:
    """The number in a placeholder; None for an id."""
    number: int = _NUMBER.unpack(chunk)[0]
    return number if chunk == _NUMBER.pack(number) else None


def split_ids(body: bytes) -> list[bytes] | None:
    """The ids that a chunk request names; None for an invalid request."""
    count, rest = divmod(len(body), CHUNK_ID_BYTES)
    if rest or not 0 < count <= IDS_PER_REQUEST:
        return None
    return [body[i : i + CHUNK_ID_BYTES] for i in range(0, len(body), CHUNK_ID_BYTES)]


def encode_ids(ids: Sequence[bytes | None]) -> bytes:
    """The answer to an id request: None for a chunk that is not served."""
    return b"".join(chunk or _NO_ID for chunk in ids)


def decode_ids(data: bytes) -> list[bytes | None]:
    found = (data[i : i + CHUNK_ID_BYTES] for i in range(0, len(data), CHUNK_ID_BYTES))
    return [chunk if chunk != _NO_ID else None for chunk in found]


def encode_sizes(sizes: Sequence[int | None]) -> bytes:
    """The start of an answer with chunks: their sizes, None for a chunk that is not served."""
    return struct.pack(f">{len(sizes)}Q", *(_MISSING if size is None else size for size in sizes))


def encode_places(places: Sequence[int | None]) -> bytes:
    """Follows the sizes for a near peer: the addresses of chunks, None for one whose bytes
    follow.
    """
    return encode_sizes(places)


def decode_places(data: bytes) -> list[int | None]:
    return decode_sizes(data)


def sizes_bytes(count: int) -> int:
    """The encoded length of this many sizes or addresses."""
    return 8 * count


def decode_sizes(data: bytes) -> list[int | None]:
    return [
        None if size == _MISSING else size for size in struct.unpack(f">{len(data) // 8}Q", data)
    ]


def encode_request(
    method: str, path: str, host: str, headers: dict[str, str], body: bytes
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def decode_head(data: bytes) -> Head:
    """The head of an answer, up to its empty line. Raises `Corrupt` for one that is not HTTP/1.1 or
    lacks a length.
    """
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines if line)
    }
    status, length = rest[:3], headers.get("content-length", "")
    if (
        version != "HTTP/1.1"
        or not status.isdecimal()
        or not length.isdecimal()
        or len(length) > 18
    ):
        raise Corrupt(f"a peer answered {first[:80]!r}, which is not what a transport says")
    return Head(int(status), int(length), headers)


def _word(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise ValueError(f"{value!r:.80} is no word")
    return value


def _names(said: Any) -> str:
    names = said.get("names", BLAKE3)
    if names not in NAMINGS:
        raise ValueError(
            f"{names!r:.80} are no names of chunks; wanted one of {', '.join(NAMINGS)}"
        )
    return str(names)


def _near(said: Any) -> Near | None:
    if said is None:
        return None
    where, pid, address = said
    return Near(_word(where), _number(pid) % (1 << 31), _number(address) % (1 << 63))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no size")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_number, values))


def _id(text: Any) -> bytes:
    data = bytes.fromhex(_word(text))
    if len(data) != CHUNK_ID_BYTES:
        raise ValueError(f"{text!r:.80} is no chunk id")
    return data
