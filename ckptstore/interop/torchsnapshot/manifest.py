"""What is in a snapshot's manifest? TorchSnapshot's kinds of entries, made from a commit by
`views`.

Entries are frozen. Their shapes, offsets and keys are lists, since scripts compare them with lists;
every call makes new ones. A path is `RANK/KEY/…`, with `%` and `/` escaped in the key of each
level.
"""

import base64
import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from ckptstore.errors import InvalidInput
from ckptstore.interop.torchsnapshot.errors import NoSuchObject

INTERFACE_VERSION = "0.1.0"
"""The release of TorchSnapshot whose interface this is."""


@dataclass(frozen=True)
class Entry:
    """The entry of one path. `type` names the kind."""

    type: str


@dataclass(frozen=True)
class TensorEntry(Entry):
    """A tensor. `location` is the path of its leaf in the commit, or of its components."""

    type: str = field(default="Tensor", init=False)
    location: str
    serializer: str
    dtype: str
    shape: list[int]
    replicated: bool
    byte_range: list[int] | None = None

    @property
    def byte_range_tuple(self) -> tuple[int, int] | None:
        return None if self.byte_range is None else (self.byte_range[0], self.byte_range[1])


@dataclass(frozen=True)
class Shard:
    """A box of a tensor."""

    offsets: list[int]
    sizes: list[int]
    tensor: TensorEntry


@dataclass(frozen=True)
class ShardedTensorEntry(Entry):
    """One rank's part of a tensor that several ranks divided."""

    type: str = field(default="ShardedTensor", init=False)
    shards: list[Shard]


@dataclass(frozen=True)
class ChunkedTensorEntry(Entry):
    """A large tensor. `chunks` are ranges of its rows, unrelated to the store's chunks."""

    type: str = field(default="ChunkedTensor", init=False)
    dtype: str
    shape: list[int]
    chunks: list[Shard]
    replicated: bool


@dataclass(frozen=True)
class ObjectEntry(Entry):
    """A value that is neither a tensor nor a primitive, or a container that TorchSnapshot would
    pickle.
    """

    type: str = field(default="object", init=False)
    location: str
    serializer: str
    obj_type: str
    replicated: bool


@dataclass(frozen=True)
class ListEntry(Entry):
    type: str = field(default="list", init=False)


@dataclass(frozen=True)
class DictEntry(Entry):
    type: str = field(default="dict", init=False)
    keys: list[str | int]


@dataclass(frozen=True)
class OrderedDictEntry(Entry):
    type: str = field(default="OrderedDict", init=False)
    keys: list[str | int]


@dataclass(frozen=True)
class PrimitiveEntry(Entry):
    """A number, a string, bytes or a boolean. `type` is the name of its class."""

    supported_types: ClassVar[tuple[str, ...]] = ("int", "str", "bool", "bytes", "float")

    serialized_value: str
    replicated: bool
    readable: str | None = None

    @classmethod
    def from_object(cls, value: Any, *, replicated: bool = False) -> "PrimitiveEntry":
        """The entry for `value`. Raises `TypeError` if it is no primitive."""
        name = type(value).__name__
        if name not in cls.supported_types:
            raise TypeError(
                f"a {name} is no primitive; wanted one of {', '.join(cls.supported_types)}"
            )
        if name == "float":
            return cls(
                name, base64.b64encode(struct.pack("<d", value)).decode(), replicated, str(value)
            )
        return cls(
            name, base64.b64encode(value).decode() if name == "bytes" else str(value), replicated
        )

    def get_value(self) -> int | str | bool | bytes | float:
        return primitive(self.type, self.serialized_value)


def primitive(kind: str, text: str) -> int | str | bool | bytes | float:
    """The value of the manifest's `text`. Raises `InvalidInput` for an unknown kind, `ValueError`
    for invalid text.
    """
    if kind == "bool" and text in ("True", "False"):
        return text == "True"
    if kind == "float":
        return float(struct.unpack("<d", base64.b64decode(text, validate=True))[0])
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    if kind in ("int", "str"):
        return int(text) if kind == "int" else text
    raise InvalidInput(f"an entry of the manifest is of the unknown type {kind[:40]!r}")


Manifest: TypeAlias = dict[str, Entry]
"""Entries by `RANK/KEY/…`."""


@dataclass(frozen=True)
class SnapshotMetadata:
    """The number of ranks that took a snapshot, and its manifest."""

    version: str
    world_size: int
    manifest: Manifest

    def to_yaml(self) -> str:
        """As TorchSnapshot writes it: JSON, which is YAML as well."""
        return json.dumps(asdict(self), sort_keys=False, indent=2)


def is_container_entry(entry: Entry) -> bool:
    return isinstance(entry, ListEntry | DictEntry | OrderedDictEntry)


def is_dict_entry(entry: Entry) -> bool:
    return isinstance(entry, DictEntry | OrderedDictEntry)


def is_replicated(entry: Entry) -> bool:
    """Whether every rank can read it, regardless of their number."""
    return bool(getattr(entry, "replicated", False))


def encode(key: str) -> str:
    """A key, escaped for a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def split_rank(path: str) -> tuple[int, str]:
    """The rank at the start of a path, and the rest. Raises `NoSuchObject` for a path without
    one.
    """
    rank, _, rest = path.partition("/")
    if not rank.isdecimal() or not rest:
        raise NoSuchObject(
            f"{path!r} is no path of a snapshot: wanted RANK/KEY/…, as in '0/model/weight'; "
            "get_manifest() has them all"
        )
    return int(rank), rest
