"""How do a trainer and its worker exchange messages? As JSON, bytes and, at times, a descriptor.

Nothing is unpickled, so neither side can run code in the other.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptstore import errors
from ckptstore.commit.commit import CommitRequest, Flats
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.transaction import CommitStats, Committed
from ckptstore.core.ids import CommitId
from ckptstore.core.model import Schema
from ckptstore.distributed import framing
from ckptstore.distributed.describe import decode_description, encode_description
from ckptstore.errors import CkptStoreError
from ckptstore.objects.documents import decode_document, encode_document
from ckptstore.objects.schema import LastSchemas
from ckptstore.state.leaf_sources import FlatState, HeldLeaf, Source, leaves_of
from ckptstore.state.staging_buffers import BufferSource, ElsewhereSource

_ARENA, _BYTES, _KNOWN = "arena", "bytes", "known"


class Message(NamedTuple):
    """`says` is JSON, `blob` the bytes it refers to, `fd` a received descriptor or -1."""

    says: dict[str, Any]
    blob: bytes = b""
    fd: int = -1


def send(connection: "Connection[Any, Any]", message: Message) -> None:
    """Send a message. Raises `OSError` if the other side has closed."""
    connection.send_bytes(json.dumps([message.says, message.fd >= 0]).encode())
    connection.send_bytes(message.blob)
    if message.fd >= 0:
        send_handle(connection, message.fd, 0)


def receive(connection: "Connection[Any, Any]") -> Message | None:
    """The next message, or None if the other side has closed."""
    try:
        says, has_fd = json.loads(connection.recv_bytes())
        blob = connection.recv_bytes()
        return Message(says, blob, recv_handle(connection) if has_fd else -1)
    except (OSError, EOFError):
        return None


def state_to(
    label: CommitMetadata, flats: Flats, request: CommitRequest, schemas: LastSchemas
) -> Message:
    """A staged state, or a rank's part of one: its description, and where each leaf's bytes lie: in
    the staging buffer, in the blob, or in the store, by chunk ids in the blob."""
    description = encode_description(flats, schemas)
    blob = bytearray(description)
    says = {
        "label": asdict(label),
        "ranks": {
            "canonical": request.ranks.canonical,
            "trust_replicated": request.ranks.trust_replicated,
        },
        "started": request.started,
        "description": len(description),
        "sources": [_leaf_to(source, blob) for source in leaves_of(flats)],
        "group": None,
    }
    return Message(says, bytes(blob))


def state_from(
    message: Message, arena: memoryview, schemas: dict[bytes, Schema]
) -> tuple[CommitMetadata, Flats]:
    """The inverse of `state_to`, for a buffer mapped at `arena`."""
    says, blob = message.says["label"], memoryview(message.blob)
    label = CommitMetadata(
        says["run"],
        says["step"],
        says["message"],
        tuple((str(name), float(value)) for name, value in says["metrics"]),
        tuple(says["tags"]),
        tuple(CommitId(commit) for commit in says["parents"]),
    )
    trees = decode_description(message.blob[: message.says["description"]], schemas)
    sources = (_leaf_from(said, blob, arena) for said in message.says["sources"])
    flats = {}
    for tree in trees:
        leaves = [next(sources) for _ in range(len(tree.schema))]
        held = {
            n: HeldLeaf(holding, tuple((box, next(sources)) for box in holding.boxes))
            for n, holding in tree.held.items()
        }
        flats[tree.key] = FlatState(tree.schema, leaves, held, tree.marks)
    return label, flats


def _leaf_to(source: Source, blob: bytearray) -> list[Any]:
    if isinstance(source, BufferSource):
        return [_ARENA, source.offset, source.nbytes, source.nbytes, source.width]
    kind, data = _KNOWN, memoryview(source.known_ids or b"")
    if source.known_ids is None:
        memory = source.view(0, source.nbytes)
        assert memory is not None  # other leaves are bytes
        kind, data = _BYTES, memory
    blob.extend(data)
    return [kind, len(blob) - len(data), len(data), source.nbytes, source.width]


def _leaf_from(said: Sequence[Any], blob: memoryview, arena: memoryview) -> Source:
    kind, at, size, nbytes, width = said
    if kind == _KNOWN:
        return ElsewhereSource(bytes(blob[at : at + size]), nbytes, width)
    return BufferSource(arena if kind == _ARENA else blob, at, nbytes, width)


def committed_to(committed: Committed) -> Message:
    """A worker's message about a commit that is durable."""
    says = {"done": committed.id, "stats": asdict(committed.stats), "leaves": list(committed.ids)}
    _, stored = encode_document(committed.document)
    return Message(says, framing.pack([stored, *committed.ids.values()]))


def committed_from(message: Message, flats: Flats = MappingProxyType({})) -> Committed:
    """The inverse of `committed_to`; `flats` is the state, if this process held all of it."""
    says, commit = message.says, CommitId(message.says["done"])
    stored, *ids = framing.unpack(message.blob)
    return Committed(
        commit,
        decode_document(stored, commit),
        CommitStats(**says["stats"]),
        {key: flat.schema for key, flat in flats.items()},
        dict(zip(says["leaves"], ids, strict=True)),
    )


def failure_to(error: Exception) -> Message:
    """A worker's message about a failed commit."""
    kind, text = (
        (type(error), str(error))
        if isinstance(error, CkptStoreError)
        else (CkptStoreError, f"{type(error).__name__}: {error}")
    )
    causes: Mapping[int, str] = getattr(error, "causes", {})
    return Message({"failed": kind.__name__, "text": text, "causes": list(causes.items())})


def error_from(message: Message) -> CkptStoreError:
    """The inverse of `failure_to`, as one of our errors."""
    cls = getattr(errors, message.says["failed"], CkptStoreError)
    error: CkptStoreError = cls(message.says["text"])
    error.causes = {int(rank): why for rank, why in message.says["causes"]}
    return error
