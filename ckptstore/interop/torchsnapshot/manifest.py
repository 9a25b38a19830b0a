"""A snapshot's manifest: TorchSnapshot's kinds of entries, made from a commit.

Entries are frozen. Their shapes, offsets and keys are lists, since scripts compare them with lists;
every call makes new ones. As in TorchSnapshot, replicas stand under rank 0 only.
"""

import base64
import collections
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, ClassVar, TypeAlias

from ckptstore.errors import InvalidInput
from ckptstore.interop.torchsnapshot import knobs
from ckptstore.interop.torchsnapshot.reading import Index, Item, keys_of, primitive
from ckptstore.plugin.encoding import Layout, LeafPlacement
from ckptstore.plugin.model import Box, Node, Schema, leaves_of, nbytes_of, width_of
from ckptstore.plugin.snapshots import Snapshot, contents_of
from ckptstore.plugin.values import values

INTERFACE_VERSION = "0.1.0"
"""The release of TorchSnapshot whose interface this is."""

RAW = "buffer_protocol"
"""TorchSnapshot's name for a tensor's plain bytes."""

OTHER = "ckptstore"
"""The serializer of values that are not plain tensors: composed of leaves, without a pickle
(docs/values.md).
"""


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
        """The entry for `value`. Raises `TypeError` if it is not a primitive."""
        name = type(value).__name__
        if name not in cls.supported_types:
            raise TypeError(
                f"a {name} is not a primitive; wanted one of {', '.join(cls.supported_types)}"
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


def is_replicated(entry: Entry) -> bool:
    """Whether every rank can read it, regardless of their number."""
    return bool(getattr(entry, "replicated", False))


def manifest_of(snapshot: Snapshot) -> Manifest:
    """The entries of all ranks. Values are read, tensors are not."""
    layout = snapshot.layout
    shared = {path for tree in contents_of(snapshot).trees.values() for path in tree.schema.paths}
    manifest: Manifest = {}
    for rank in range(layout.world if layout else 1):
        entries = _Entries(Index(snapshot, rank), rank, layout, shared)
        manifest.update((f"{rank}/{path}", entry) for path, entry in entries.all())
    return manifest


class _Entries:
    """The entries of one rank. `shared` are the paths of leaves that are not private."""

    def __init__(self, index: Index, rank: int, layout: Layout | None, shared: set[str]) -> None:
        self._index, self._rank, self._layout, self._shared = index, rank, layout, shared

    def all(self) -> Iterator[tuple[str, Entry]]:
        for path, item in self._index.items.items():
            keys = keys_of(item.node)
            if keys is None:
                yield from self._below(path, item)
            else:
                yield path, _container(item.node, keys)

    def _below(self, path: str, item: Item) -> Iterator[tuple[str, Entry]]:
        schema = item.tree.schema
        leaves = list(leaves_of(item.node))
        common = self._layout is not None and all(
            schema.paths[leaf] in self._shared for leaf in leaves
        )
        placed = self._placed(schema, leaves[0]) if leaves and common else None
        location = schema.paths[leaves[0]] if leaves else ""
        if placed and placed.divided:
            yield path, self._sharded(schema, leaves[0], placed)
        elif common and self._rank:
            return  # a replica
        elif item.tensor is not None:
            yield path, _tensor(schema, item.tensor, common)
        elif item.is_value:
            yield from self._value(path, item, location, common)
        else:
            assert isinstance(item.node, Node)
            yield path, _composite(item.node, schema, leaves, location, common)

    def _placed(self, schema: Schema, leaf: int) -> LeafPlacement | None:
        path = schema.paths[schema.owner(leaf)]
        return self._layout.leaves.get(path) if self._layout else None

    def _value(
        self, path: str, item: Item, location: str, replicated: bool
    ) -> Iterator[tuple[str, Entry]]:
        try:
            value = self._index.object(item)
        except InvalidInput:  # of an unknown class
            yield path, ObjectEntry(location, OTHER, "unknown", replicated)
            return
        yield from _of_value(path, value, location, replicated)

    def _sharded(self, schema: Schema, leaf: int, placed: LeafPlacement) -> ShardedTensorEntry:
        path, dtype, shape = schema.paths[leaf], schema.dtypes[leaf], schema.shapes[leaf]
        # The commit does not record the ranks of a small tensor's parts: the first rank shows all
        # of it.
        small = [Box.whole(shape)] if self._rank == 0 else []
        boxes = list(placed.boxes_of(self._rank)) if placed.boxes else small
        limit = knobs.get_max_shard_size_bytes()
        return ShardedTensorEntry(
            [
                _shard(path, dtype, part, None)
                for box in boxes
                for part in _rows(box, limit // max(prod(box.lengths[1:]) * width_of(dtype), 1))
            ]
        )


def _container(node: Node | int, keys: list[Any]) -> Entry:
    kind = node.type if isinstance(node, Node) else ""
    if kind == "list":
        return ListEntry()
    return OrderedDictEntry(keys) if kind == "OrderedDict" else DictEntry(keys)


def _tensor(schema: Schema, leaf: int, replicated: bool) -> Entry:
    path, dtype, shape = schema.paths[leaf], schema.dtypes[leaf], schema.shapes[leaf]
    limit, nbytes = knobs.get_max_chunk_size_bytes(), nbytes_of(dtype, shape)
    if nbytes <= limit or not shape:
        return TensorEntry(path, RAW, f"torch.{dtype}", list(shape), replicated)
    row_bytes = nbytes // shape[0]
    parts = _rows(Box.whole(shape), -(-shape[0] // -(-nbytes // limit)))
    chunks = [_shard(path, dtype, part, part.offsets[0] * row_bytes) for part in parts]
    return ChunkedTensorEntry(f"torch.{dtype}", list(shape), chunks, replicated)


def _rows(box: Box, rows: int) -> Iterator[Box]:
    """A box cut along its first dimension into parts of `rows` rows, at least one."""
    if not box.lengths:
        yield box
        return
    (offset, *offsets), (length, *lengths) = box
    for first in range(0, length, max(rows, 1)):
        yield Box((offset + first, *offsets), (min(max(rows, 1), length - first), *lengths))


def _shard(path: str, dtype: str, box: Box, start: int | None) -> Shard:
    byte_range = None if start is None else [start, start + nbytes_of(dtype, box.lengths)]
    tensor = TensorEntry(path, RAW, f"torch.{dtype}", list(box.lengths), False, byte_range)
    return Shard(list(box.offsets), list(box.lengths), tensor)


def _composite(
    node: Node, schema: Schema, leaves: list[int], location: str, replicated: bool
) -> Entry:
    """A tensor composed of several leaves, or an object."""
    attrs = {name: values.decode_value(value) for name, value in node.attrs if name != "class"}
    if node.type.startswith(("torch.quantized", "torch.sparse")):
        dtype = str(attrs.get("dtype", f"torch.{schema.dtypes[leaves[-1]]}"))
        return TensorEntry(location, OTHER, dtype, [int(n) for n in attrs["shape"]], replicated)
    if node.type == "torch.thin_subclass":
        dtype, shape = f"torch.{schema.dtypes[leaves[0]]}", list(schema.shapes[leaves[0]])
        return TensorEntry(location, OTHER, dtype, shape, replicated)
    module = "collections" if hasattr(collections, node.type) else "builtins"
    name = node.type if "." in node.type else f"{module}.{node.type}"
    return ObjectEntry(location, OTHER, str(dict(node.attrs).get("class") or name), replicated)


def _of_value(
    path: str, value: Any, location: str, replicated: bool
) -> Iterator[tuple[str, Entry]]:
    """The entry of a value, and the entries in it if it is a list: one leaf holds all of them."""
    cls = type(value)
    if cls is list:
        yield path, ListEntry()
        for i, each in enumerate(value):
            yield from _of_value(f"{path}/{i}", each, location, replicated)
    elif cls.__module__ == "builtins" and cls.__name__ in PrimitiveEntry.supported_types:
        yield path, PrimitiveEntry.from_object(value, replicated=replicated)
    else:
        yield path, ObjectEntry(location, OTHER, f"{cls.__module__}.{cls.__name__}", replicated)
