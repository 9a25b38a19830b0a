"""What a trainer and its worker say to each other: messages of JSON, bytes beside it, and now and then a file descriptor.

A message is two lengths (big-endian, 8 bytes each), JSON, and the bytes. Neither side trusts the other with code: nothing is unpickled.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptstore.core.ids import CommitId
from ckptstore.engine.label import Label
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.state.arenas import ArenaSource, PartSource
from ckptstore.state.flat import Flat, Source

_LENGTHS = struct.Struct(">QQ")
_MOST_FDS = 1


class Message(NamedTuple):
    """`says` is JSON, `blob` the bytes that it refers to, `fd` a descriptor that came along, or -1."""

    says: dict[str, Any]
    blob: bytes = b""
    fd: int = -1


def send(connection: socket.socket, message: Message) -> None:
    """Raises `OSError` if nobody listens any more."""
    text = json.dumps(message.says).encode()
    head = _LENGTHS.pack(len(text), len(message.blob))
    if message.fd >= 0:
        socket.send_fds(connection, [head], [message.fd])
    else:
        connection.sendall(head)
    connection.sendall(text)
    connection.sendall(message.blob)


def receive(connection: socket.socket) -> Message | None:
    """The next message, or None if the other side is gone."""
    try:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, _MOST_FDS)
        fd = fds[0] if fds else -1
        text_bytes, blob_bytes = _LENGTHS.unpack(head + _exactly(connection, _LENGTHS.size - len(head)))
        return Message(json.loads(_exactly(connection, text_bytes)), _exactly(connection, blob_bytes), fd)
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


def describe(flats: Mapping[str, Flat], label: Label) -> tuple[dict[str, Any], bytes]:
    """A staged state and its label as JSON and a blob. A leaf lies in the arena, whole or in part, or else its bytes or its chunks' ids lie
    in the blob."""
    blob = bytearray()

    def put(data: bytes | memoryview) -> list[int]:
        blob.extend(data)
        return [len(blob) - len(data), len(blob)]

    def leaf(source: Source) -> dict[str, Any]:
        if isinstance(source, ArenaSource):
            return {"arena": [source.offset, source.offset + source.nbytes], "width": source.width}
        if source.known_ids is not None:
            places = source.places if isinstance(source, PartSource) else ()
            return {"known": put(source.known_ids), "places": places, "nbytes": source.nbytes, "width": source.width}
        memory = source.view(0, source.nbytes)
        assert memory is not None  # what is not in the arena is bytes
        return {"bytes": put(memory), "width": source.width}

    keys = [[key, put(encode_schema(flat.schema)), [leaf(source) for source in flat.leaves]] for key, flat in flats.items()]
    said = {name: getattr(label, name) for name in ("run", "step", "message", "metrics", "tags", "parents")}
    return {"keys": keys, "label": said}, bytes(blob)


def label_from(said: Mapping[str, Any]) -> Label:
    """The label that `describe` was given."""
    metrics = tuple((str(name), float(value)) for name, value in said["metrics"])
    parents = tuple(CommitId(commit) for commit in said["parents"])
    return Label(said["run"], said["step"], said["message"], metrics, tuple(said["tags"]), parents)


def flats_from(keys: Sequence[Any], blob: bytes, source: Any) -> dict[str, Flat]:
    """The state that `describe` was given; `source(leaf, blob)` makes each leaf's source."""
    return {key: Flat(decode_schema(blob[slice(*where)]), [source(leaf, blob) for leaf in leaves]) for key, where, leaves in keys}
