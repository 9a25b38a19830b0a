"""How do a trainer and its worker exchange messages? As JSON, bytes and, at times, a descriptor.

A message is two lengths (big-endian, 8 bytes each), the JSON, and the bytes. Nothing is unpickled,
so neither side can run code in the other.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptstore import errors
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.core.ids import CommitId
from ckptstore.errors import CkptStoreError
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.staging_buffers import BufferSource, Place

_LENGTHS = struct.Struct(">QQ")
_MOST_FDS = 1


class Message(NamedTuple):
    """`says` is JSON, `blob` the bytes it refers to, `fd` a received descriptor or -1."""

    says: dict[str, Any]
    blob: bytes = b""
    fd: int = -1


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. Raises `OSError` if the other side has closed."""
    text = json.dumps(message.says).encode()
    head = _LENGTHS.pack(len(text), len(message.blob))
    if message.fd >= 0:
        socket.send_fds(connection, [head], [message.fd])
    else:
        connection.sendall(head)
    connection.sendall(text)
    connection.sendall(message.blob)


def receive(connection: socket.socket) -> Message | None:
    """The next message, or None if the other side has closed."""
    try:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, _MOST_FDS)
        fd = fds[0] if fds else -1
        text_bytes, blob_bytes = _LENGTHS.unpack(
            head + _exactly(connection, _LENGTHS.size - len(head))
        )
        return Message(
            json.loads(_exactly(connection, text_bytes)), _exactly(connection, blob_bytes), fd
        )
    except (OSError, EOFError):
        return None


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    got = 0
    while got < nbytes:
        n = connection.recv_into(memoryview(data)[got:])
        if not n:
            raise EOFError
        got += n
    return bytes(data)


def describe(flats: Mapping[str, FlatState], label: CommitMetadata) -> tuple[dict[str, Any], bytes]:
    """A staged state and its metadata as JSON and a blob.

    A leaf refers to the staging buffer, wholly or in part, or to bytes or chunk ids in the blob.
    """
    blob = Blob()
    keys = [
        [key, blob.put(encode_schema(flat.schema)), [blob.leaf(source) for source in flat.leaves]]
        for key, flat in flats.items()
    ]
    return {"keys": keys, "label": label_to(label)}, bytes(blob.data)


class Blob:
    """Bytes sent along with JSON, which refers to them by start and stop."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, data: bytes | memoryview) -> list[int]:
        self.data.extend(data)
        return [len(self.data) - len(data), len(self.data)]

    def leaf(self, source: Source) -> dict[str, Any]:
        places = source.places if isinstance(source, BufferSource) else ()
        said = {"nbytes": source.nbytes, "width": source.width, "places": places}
        if source.known_ids is not None:
            said["known"] = self.put(source.known_ids)
        elif not places:
            memory = source.view(0, source.nbytes)
            assert memory is not None  # other leaves are bytes
            said["bytes"] = self.put(memory)
        return said


def leaf_from(said: Mapping[str, Any], blob: bytes, arena: memoryview) -> Source:
    """The inverse of `Blob.leaf`."""
    nbytes, width = said["nbytes"], said["width"]
    if "bytes" in said:
        place = Place(0, nbytes, said["bytes"][0])
        return BufferSource(memoryview(blob), [place], nbytes, width)
    known = blob[slice(*said["known"])] if "known" in said else None
    return BufferSource(arena, [Place(*place) for place in said["places"]], nbytes, width, known)


def label_to(label: CommitMetadata) -> dict[str, Any]:
    return {
        name: getattr(label, name)
        for name in ("run", "step", "message", "metrics", "tags", "parents")
    }


def label_from(said: Mapping[str, Any]) -> CommitMetadata:
    """The inverse of `label_to`."""
    metrics = tuple((str(name), float(value)) for name, value in said["metrics"])
    parents = tuple(CommitId(commit) for commit in said["parents"])
    return CommitMetadata(
        said["run"], said["step"], said["message"], metrics, tuple(said["tags"]), parents
    )


def flats_from(keys: Sequence[Any], blob: bytes, arena: memoryview) -> dict[str, FlatState]:
    """The state that `describe` described."""
    return {
        key: FlatState(
            decode_schema(blob[slice(*where)]), [leaf_from(leaf, blob, arena) for leaf in leaves]
        )
        for key, where, leaves in keys
    }


def failure_to(error: Exception) -> Message:
    """A worker's message about a failed commit."""
    kind, text = (
        (type(error), str(error))
        if isinstance(error, CkptStoreError)
        else (CkptStoreError, f"{type(error).__name__}: {error}")
    )
    return Message(
        {
            "failed": kind.__name__,
            "text": text,
            "causes": {str(rank): why for rank, why in getattr(error, "causes", {}).items()},
        }
    )


def error_from(said: Mapping[str, Any]) -> CkptStoreError:
    """The inverse of `failure_to`, as one of our errors."""
    cls = getattr(errors, said["failed"], CkptStoreError)
    error: CkptStoreError = cls(said["text"])
    error.causes = {int(rank): why for rank, why in said["causes"].items()}
    return error
