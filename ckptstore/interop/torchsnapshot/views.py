"""How does a commit look as a manifest? Every rank's containers, tensors and values under
TorchSnapshot's paths.

`Index` finds the item of a path in one rank's state, by schemas alone; entries are made from it. As
in TorchSnapshot, replicas stand under rank 0 only.
"""

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptstore.core.geometry import nbytes_of, width_of
from ckptstore.core.model import Box, Node, Schema, Shape, leaves_of
from ckptstore.errors import InvalidInput
from ckptstore.interop.torchsnapshot import knobs
from ckptstore.interop.torchsnapshot.manifest import (
    ChunkedTensorEntry,
    DictEntry,
    Entry,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    encode,
)
from ckptstore.objects.documents import Layout, Placed
from ckptstore.restore.reader import Tree
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state import values
from ckptstore.state.containers import NAMES

RAW = "buffer_protocol"
"""TorchSnapshot's name for a tensor's plain bytes."""

OTHER = "ckptstore"
"""The serializer of values that are no plain tensors: composed of leaves, without a pickle
(docs/values.md).
"""

NO_VALUE = object()

_DICTS = ("dict", "OrderedDict")


@dataclass(frozen=True, slots=True)
class Item:
    """The item of a path: a node of the key's skeleton, and the keys that lead to it from the key's
    state.
    """

    key: str
    node: Node | int
    trail: tuple[Any, ...]

    @property
    def leaf(self) -> int | None:
        """The leaf's number, if it is one; wrappers that only mark a tensor are skipped."""
        node = self.node
        while isinstance(node, Node) and node.type in ("torch.Parameter", "torch.Tensor"):
            (node,) = node.children
        return node if isinstance(node, int) else None


class Index:
    """The state of one rank, by path without the rank."""

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        self.snapshot = snapshot.of_rank(rank).numbered()
        self.trees: Mapping[str, Tree] = contents_of(self.snapshot).trees
        self.items: dict[str, Item] = {}
        for key, tree in self.trees.items():
            for path, item in _items(key, tree.schema.skeleton):
                self.items[path] = item

    def path_of(self, item: Item, leaf: int) -> str:
        """The path of a leaf in the commit."""
        return self.trees[item.key].schema.paths[leaf]

    def value_of(self, item: Item) -> Any:
        """The value of a value item, or the list of numbers in the schema; `NO_VALUE` for anything
        else.
        """
        if isinstance(item.node, Node):
            return (
                values.decode_value(dict(item.node.attrs)["names"])
                if item.node.type == NAMES
                else NO_VALUE
            )
        if self.trees[item.key].schema.kinds[item.node] == "tensor":
            return NO_VALUE
        return self.snapshot.read(self.path_of(item, item.node))


def manifest_of(snapshot: Snapshot) -> Manifest:
    """The entries of all ranks. Values are read, tensors are not."""
    layout = snapshot.layout
    shared = {path for tree in contents_of(snapshot).trees.values() for path in tree.schema.paths}
    manifest: Manifest = {}
    for rank in range(layout.world if layout else 1):
        entries = _Entries(Index(snapshot, rank), rank, layout, shared)
        manifest.update((f"{rank}/{path}", entry) for path, entry in entries.all())
    return manifest


def is_flattened(node: Node) -> bool:
    """Whether TorchSnapshot has an entry for each child of a container, instead of one for the
    whole.
    """
    if node.type == "list":
        return True
    if node.type not in _DICTS:
        return False
    keys = [_key(key) for key in node.keys or ()]
    return all(isinstance(key, str | int) for key in keys) and len(
        {str(key) for key in keys}
    ) == len(keys)


def _items(key: str, root: Node | int) -> Iterator[tuple[str, Item]]:
    waiting: list[tuple[str, Item]] = [(encode(key), Item(key, root, ()))]
    while waiting:
        path, item = waiting.pop()
        node = item.node
        while isinstance(node, Node) and node.type == "stateful":
            (node,) = node.children
        yield path, Item(key, node, item.trail)
        if isinstance(node, Node) and is_flattened(node):
            names = range(len(node.children)) if node.keys is None else map(_key, node.keys)
            below = list(zip(names, node.children, strict=True))
            waiting.extend(
                (f"{path}/{encode(str(name))}", Item(key, child, (*item.trail, name)))
                for name, child in reversed(below)
            )


def _key(encoded: Any) -> Any:
    return encoded if type(encoded) is str else values.decode_key(encoded)


class _Entries:
    """The entries of one rank. `shared` are the paths of leaves that are not private."""

    def __init__(self, index: Index, rank: int, layout: Layout | None, shared: set[str]) -> None:
        self._index, self._rank, self._layout, self._shared = index, rank, layout, shared

    def all(self) -> Iterator[tuple[str, Entry]]:
        for path, item in self._index.items.items():
            if isinstance(item.node, Node) and is_flattened(item.node):
                yield path, _container(item.node)
            else:
                yield from self._below(path, item)

    def _below(self, path: str, item: Item) -> Iterator[tuple[str, Entry]]:
        schema = self._index.trees[item.key].schema
        leaves = list(leaves_of(item.node))
        placed = self._placed(schema, leaves[0]) if leaves else None
        common = self._layout is not None and all(
            schema.paths[leaf] in self._shared for leaf in leaves
        )
        if common and placed and placed.divided:
            yield path, self._sharded(schema, leaves[0], placed)
        elif not (common and self._rank):
            yield from self._whole(path, item, schema, leaves, common)

    def _placed(self, schema: Schema, leaf: int) -> Placed | None:
        alias = schema.aliases[leaf]
        return (
            self._layout.leaves.get(schema.paths[alias if alias >= 0 else leaf])
            if self._layout
            else None
        )

    def _whole(
        self, path: str, item: Item, schema: Schema, leaves: list[int], replicated: bool
    ) -> Iterator[tuple[str, Entry]]:
        leaf = item.leaf
        if leaf is not None and schema.kinds[leaf] == "tensor":
            yield (
                path,
                _tensor(schema.paths[leaf], schema.dtypes[leaf], schema.shapes[leaf], replicated),
            )
        elif isinstance(item.node, Node) and item.node.type != NAMES:
            yield path, _composite(item.node, schema, leaves, replicated)
        else:
            yield from self._value(
                path, item, schema.paths[leaves[0]] if leaves else "", replicated
            )

    def _value(
        self, path: str, item: Item, location: str, replicated: bool
    ) -> Iterator[tuple[str, Entry]]:
        try:
            value = self._index.value_of(item)
        except InvalidInput:  # of an unknown class
            yield path, ObjectEntry(location, OTHER, "unknown", replicated)
            return
        yield from _of_value(path, value, location, replicated)

    def _sharded(self, schema: Schema, leaf: int, placed: Placed) -> ShardedTensorEntry:
        path, dtype, shape = schema.paths[leaf], schema.dtypes[leaf], schema.shapes[leaf]
        # The commit does not record the ranks of a small tensor's parts: the first rank shows all
        # of it.
        small = [Box((0,) * len(shape), shape)] if self._rank == 0 else []
        boxes = list(placed.boxes_of(self._rank)) if placed.boxes else small
        return ShardedTensorEntry([shard for box in boxes for shard in _shards(path, dtype, box)])


def _container(node: Node) -> Entry:
    if node.keys is None:
        return ListEntry()
    keys = [_key(key) for key in node.keys]
    return OrderedDictEntry(keys) if node.type == "OrderedDict" else DictEntry(keys)


def _tensor(path: str, dtype: str, shape: Shape, replicated: bool) -> Entry:
    limit, nbytes = knobs.get_max_chunk_size_bytes(), nbytes_of(dtype, shape)
    if nbytes <= limit or not shape:
        return TensorEntry(path, RAW, f"torch.{dtype}", list(shape), replicated)
    rows = -(-shape[0] // -(-nbytes // limit))
    row_bytes = nbytes // shape[0]
    chunks = [
        _shard(
            path,
            dtype,
            Box((first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])),
            (first * row_bytes),
        )
        for first in range(0, shape[0], rows)
    ]
    return ChunkedTensorEntry(f"torch.{dtype}", list(shape), chunks, replicated)


def _shards(path: str, dtype: str, box: Box) -> Iterator[Shard]:
    """One box, cut along its first dimension into parts of at most the maximum size."""
    if not box.lengths:
        yield _shard(path, dtype, box, None)
        return
    row_bytes = prod(box.lengths[1:]) * width_of(dtype)
    rows = max(knobs.get_max_shard_size_bytes() // max(row_bytes, 1), 1)
    for first in range(0, box.lengths[0], rows):
        part = Box(
            (box.offsets[0] + first, *box.offsets[1:]),
            (min(rows, box.lengths[0] - first), *box.lengths[1:]),
        )
        yield _shard(path, dtype, part, None)


def _shard(path: str, dtype: str, box: Box, start: int | None) -> Shard:
    byte_range = None if start is None else [start, start + nbytes_of(dtype, box.lengths)]
    tensor = TensorEntry(path, RAW, f"torch.{dtype}", list(box.lengths), False, byte_range)
    return Shard(list(box.offsets), list(box.lengths), tensor)


def _composite(node: Node, schema: Schema, leaves: list[int], replicated: bool) -> Entry:
    """A tensor composed of several leaves, or an object."""
    attrs = dict(node.attrs)
    location = schema.paths[leaves[0]] if leaves else ""
    if node.type.startswith(("torch.quantized", "torch.sparse")):
        shape = [int(n) for n in values.decode_value(attrs["shape"])]
        known = "dtype" in attrs
        dtype = (
            str(values.decode_value(attrs["dtype"]))
            if known
            else f"torch.{schema.dtypes[leaves[-1]]}"
        )
        return TensorEntry(location, OTHER, dtype, shape, replicated)
    if node.type == "torch.thin_subclass":
        return TensorEntry(
            location,
            OTHER,
            f"torch.{schema.dtypes[leaves[0]]}",
            list(schema.shapes[leaves[0]]),
            replicated,
        )
    name = attrs.get("class") or (
        node.type if "." in node.type else f"{_module_of(node.type)}.{node.type}"
    )
    return ObjectEntry(location, OTHER, str(name), replicated)


def _module_of(container: str) -> str:
    return "collections" if hasattr(collections, container) else "builtins"


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
