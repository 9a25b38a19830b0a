"""How is a snapshot read: the objects of a commit by their paths, or a directory of TorchSnapshot?

A path is `RANK/KEY/…`, with `%` and `/` escaped in the key of each level. An object is read in
place if possible.

A directory that TorchSnapshot wrote is a manifest in JSON, and files with the tensors' raw bytes;
the package itself is not needed. Replicated and sharded tensors of several ranks are joined. State
of a single rank is refused: it cannot be told apart from private state.
"""

import base64
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.leaves import NAMES, FlatState
from ckptstore.plugin.model import Box, Node, Shape, intersect, nbytes_of, within
from ckptstore.plugin.reading import Tree
from ckptstore.plugin.snapshots import Snapshot, assemble_nodes, contents_of
from ckptstore.plugin.tensors import held_of, is_distributed, tensors
from ckptstore.plugin.text import near
from ckptstore.plugin.values import values
from ckptstore.plugins.foreign.loaded import (
    SNAPSHOT_METADATA,
    FileBytes,
    Placeholders,
    dtype_from,
    foreign_metadata,
    inside,
    located,
    read_json,
    shape_of,
)

logger = logging.getLogger("ckptstore")

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of DistributedDataParallel and torch.compile; a commit has the names without them."""

_DICTS = ("dict", "OrderedDict")


class NoSuchObject(NotFound, RuntimeError):
    """A snapshot has nothing under a path: `get_manifest` lists its paths."""


@dataclass(frozen=True, slots=True)
class Item:
    """The item of a path: a node of a tree's skeleton."""

    tree: Tree
    node: Node | int

    @property
    def tensor(self) -> int | None:
        """The leaf, if this is a plain tensor; wrappers that only mark it are skipped."""
        node = self.node
        while isinstance(node, Node) and node.type in ("torch.Parameter", "torch.Tensor"):
            (node,) = node.children
        if isinstance(node, Node) or self.tree.schema.kinds[node] != "tensor":
            return None
        return node

    @property
    def is_value(self) -> bool:
        """Whether this is a value in one leaf, or a list of names in the schema."""
        if isinstance(self.node, Node):
            return self.node.type == NAMES
        return self.tree.schema.kinds[self.node] != "tensor"


class Index:
    """The state of one rank, by path without the rank."""

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        self.snapshot = snapshot.of_rank(rank).numbered()
        self.items: dict[str, Item] = {}
        for key, tree in contents_of(self.snapshot).trees.items():
            self.items.update(_items(encode(key), tree, tree.schema.skeleton))

    def read(
        self, path: str, out: Any, *, memory_budget_bytes: int | None, allow_pickle: bool
    ) -> Any:
        """The object under `path`, in `out` if that is a tensor that can hold it.

        The memory budget is raised to the minimum for reading from the store. Raises
        `NoSuchObject`.
        """
        found = self._find(path) or self._find(_without_wrappers(path))
        if found is None:
            raise NoSuchObject(
                f"the rank has nothing at {path!r} in this snapshot{near(path, self.items)}; "
                "get_manifest() lists all paths"
            )
        item, steps = found
        if memory_budget_bytes is not None:
            memory_budget_bytes = max(memory_budget_bytes, 3 * item.tree.chunk_bytes)
        if item.tensor is not None:
            value = self._read_tensor(item.tree, item.tensor, out, memory_budget_bytes)
        else:
            value = self.object(item, memory_budget_bytes, allow_pickle=allow_pickle)
        for step in steps:
            value = value[step]
        return _landed(value, out)

    def object(
        self, item: Item, memory_budget_bytes: int | None = None, *, allow_pickle: bool = False
    ) -> Any:
        """The object at an item, freshly allocated."""
        contents = contents_of(self.snapshot)
        (value,) = assemble_nodes(
            contents.reader,
            contents.commit,
            item.tree,
            [item.node],
            allow_pickle=allow_pickle,
            memory_budget_bytes=memory_budget_bytes,
        )
        return value

    def _find(self, path: str) -> tuple[Item, list[int]] | None:
        """The item at `path`, or above it in a list of values, with the remaining indices."""
        steps: list[int] = []
        while path not in self.items:
            path, _, last = path.rpartition("/")
            if not path or not last.isdecimal():
                return None
            steps.insert(0, int(last))
        item = self.items[path]
        if steps and not (item.is_value and _is_in_list(self.object(item), steps)):
            return None
        return item, steps

    def _read_tensor(
        self, tree: Tree, leaf: int, out: Any, memory_budget_bytes: int | None
    ) -> torch.Tensor:
        path, shape, dtype = (
            tree.schema.paths[leaf],
            tree.schema.shapes[leaf],
            tree.schema.dtypes[leaf],
        )
        if isinstance(out, torch.Tensor) and is_distributed(out):
            self._fill_parts(path, shape, out, memory_budget_bytes)
            return out
        if _can_hold(out, dtype, shape):
            self.snapshot.read_into(out.detach(), path, memory_budget_bytes=memory_budget_bytes)
            return out  # type: ignore[no-any-return]  # a tensor (`_can_hold`)
        value: torch.Tensor = self.snapshot.read(path, memory_budget_bytes=memory_budget_bytes)
        return value

    def _fill_parts(
        self, path: str, shape: Shape, out: torch.Tensor, memory_budget_bytes: int | None
    ) -> None:
        """Read this rank's part of a divided tensor; if `out` has another shape, the overlap."""
        held = held_of(out)
        if len(held.shape) != len(shape):
            raise InvalidInput(
                f"{path} has the shape {list(shape)}, obj_out {list(held.shape)}: wanted as many "
                "dimensions"
            )
        if held.shape != shape:
            logger.warning(
                "%s has the shape %s and obj_out %s: the common part is read",
                path,
                list(shape),
                list(held.shape),
            )
        whole = Box.whole(shape)
        for box, part in held.parts:
            if both := intersect(box, whole):
                self.snapshot.read_into(
                    part[within(both, box).slices],
                    path,
                    both.slices,
                    memory_budget_bytes=memory_budget_bytes,
                )


def split_rank(path: str) -> tuple[int, str]:
    """The rank at the start of a path, and the rest. Raises `NoSuchObject` for a path without
    one.
    """
    rank, _, rest = path.partition("/")
    if not rank.isdecimal() or not rest:
        raise NoSuchObject(
            f"{path!r} is not the path of an object: wanted RANK/KEY/…, as in '0/model/weight'; "
            "get_manifest() lists all paths"
        )
    return int(rank), rest


def encode(key: str) -> str:
    """A key, escaped for a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def keys_of(node: Node | int) -> list[Any] | None:
    """The keys or numbers of the children of a container for each of which TorchSnapshot has an
    entry; None for what has one entry."""
    if not isinstance(node, Node):
        return None
    if node.type == "list":
        return list(range(len(node.children)))
    if node.type not in _DICTS:
        return None
    keys = [key if type(key) is str else values.decode_key(key) for key in node.keys or ()]
    is_plain = all(isinstance(key, str | int) for key in keys)
    return keys if is_plain and len(set(map(str, keys))) == len(keys) else None


def _items(path: str, tree: Tree, node: Node | int) -> Iterator[tuple[str, Item]]:
    while isinstance(node, Node) and node.type == "stateful":
        (node,) = node.children
    yield path, Item(tree, node)
    keys = keys_of(node)
    if isinstance(node, Node) and keys is not None:
        for key, child in zip(keys, node.children, strict=True):
            yield from _items(f"{path}/{encode(str(key))}", tree, child)


def _without_wrappers(path: str) -> str:
    key, slash, name = path.partition("/")
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return key + slash + name


def _is_in_list(value: Any, steps: list[int]) -> bool:
    """Whether nested lists of `value` have an element at `steps`."""
    for step in steps:
        if type(value) is not list or step >= len(value):
            return False
        value = value[step]
    return True


def _can_hold(out: Any, dtype: str, shape: Shape) -> bool:
    return (
        isinstance(out, torch.Tensor)
        and type(out) in (torch.Tensor, torch.nn.Parameter)
        and tensors.is_strided(out)
        and tensors.is_writable_by_range(out)
        and tuple(out.shape) == shape
        and tensors.DTYPE_NAMES[out.dtype] == dtype
    )


def _landed(value: Any, out: Any) -> Any:
    """`out` with the values of a compatible tensor, else `value`: as documented, `out` is ignored
    if it does not fit.
    """
    if value is out or not isinstance(value, torch.Tensor) or not isinstance(out, torch.Tensor):
        return value
    if (out.shape, out.dtype, out.layout) != (value.shape, value.dtype, value.layout):
        mine, theirs = (f"{each.dtype}{list(each.shape)}" for each in (out, value))
        logger.warning("obj_out is %s and the object %s: a new tensor is returned", mine, theirs)
        return value
    with torch.no_grad():
        return out.copy_(value)


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


def read_directory(root: Path, *, allow_pickle: bool = False) -> dict[str, FlatState]:
    """The state in a TorchSnapshot directory; raw tensors are read when they are stored, piece by
    piece.

    Raises `InvalidInput` for any other directory, for names that leave it, for incomplete tensors
    and manifests, and, unless `allow_pickle`, for objects that need unpickling.
    """
    path = root / SNAPSHOT_METADATA
    with foreign_metadata(path, "a manifest of TorchSnapshot"):
        document = read_json(path)
        entries = _merged(root, document["manifest"], int(document["world_size"]))
        return _Directory(root, entries, allow_pickle=allow_pickle).flatten()


class _Directory:
    """One reading of a manifest."""

    def __init__(self, root: Path, entries: dict[str, Any], *, allow_pickle: bool) -> None:
        self._root, self._entries, self._allow_pickle = root, entries, allow_pickle
        self._places = Placeholders()
        self._read: set[str] = set()
        self._below: dict[str, list[str]] = {}
        for path in self._entries:
            if "/" in path:
                self._below.setdefault(path.rpartition("/")[0], []).append(path)

    def flatten(self) -> dict[str, FlatState]:
        state = {unquote(path): self._value(path) for path in self._entries if "/" not in path}
        if stray := self._entries.keys() - self._read:
            raise InvalidInput(
                f"{self._root}: the containers around {min(stray)} do not have it; the manifest "
                "is incomplete"
            )
        return self._places.flatten(state, allow_pickle=self._allow_pickle)

    def _value(self, path: str) -> Any:
        entry = self._entries[path]
        self._read.add(path)
        kind = entry["type"]
        below = {child.rpartition("/")[2]: child for child in self._below.get(path, ())}
        if kind in _DICTS:
            children = {unquote(name): child for name, child in below.items()}
            for key in entry["keys"]:
                if str(key) not in children:
                    raise self._incomplete(f"{path}/{encode(str(key))}")
            return {key: self._value(children[str(key)]) for key in entry["keys"]}
        if kind == "list":
            for index in map(str, range(len(below))):
                if index not in below:
                    raise self._incomplete(f"{path}/{index}")
            return [self._value(below[str(index)]) for index in range(len(below))]
        if kind == "Tensor":
            origin = [0] * len(entry["shape"])
            piece = {"offsets": origin, "sizes": entry["shape"], "tensor": entry}
            return self._tensor(path, [piece], None)
        if kind in ("ChunkedTensor", "ShardedTensor"):
            pieces = entry["chunks" if kind == "ChunkedTensor" else "shards"]
            return self._tensor(path, pieces, entry.get("shape"))
        if kind == "object":
            where = f"{path} in {self._root}"
            return self._piece(path, entry, None).load(where, allow_pickle=self._allow_pickle)
        return primitive(kind, entry["serialized_value"])

    def _incomplete(self, path: str) -> InvalidInput:
        return InvalidInput(f"{self._root}: the manifest is incomplete: it has no entry for {path}")

    def _tensor(self, path: str, pieces: list[dict[str, Any]], whole: Any) -> torch.Tensor:
        """A placeholder for a tensor of shape `whole`; None if only its pieces say it."""
        where = f"{path} in {self._root}"
        dtype = dtype_from(where, pieces[0]["tensor"]["dtype"])
        boxed = []
        for each in pieces:
            box = Box(shape_of(each["offsets"]), shape_of(each["sizes"]))
            boxed.append((box, self._piece(path, each["tensor"], nbytes_of(dtype, box.lengths))))
        shape = None if whole is None else shape_of(whole)
        return self._places.put(where, dtype, shape, boxed)

    def _piece(self, path: str, entry: dict[str, Any], nbytes: int | None) -> FileBytes:
        """Where an entry's bytes are. `nbytes` is the size of a tensor, which may be raw."""
        file, serializer = entry["location"], entry["serializer"]
        raw = nbytes is not None and serializer == "buffer_protocol"
        if not raw and serializer != "torch_save":
            raise InvalidInput(
                f"{self._root}: {file} is serialized as {serializer!r}; wanted torch_save"
            )
        size: Any = nbytes if raw else inside(self._root, file).stat().st_size
        start, stop = entry.get("byte_range") or (0, size)
        if raw and stop - start != nbytes:
            raise InvalidInput(
                f"{self._root}: {path} has {nbytes} bytes, and {stop - start} are stored"
            )
        return located(path, self._root, file, start, stop - start, raw=raw)


def _merged(root: Path, manifest: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The entries of all ranks as one state: shards joined, replicas and containers once."""
    merged: dict[str, Any] = {}
    for ranked, entry in manifest.items():
        rank, _, path = ranked.partition("/")
        known = merged.get(path)
        if known is None:
            merged[path] = dict(entry)
        elif entry["type"] == known["type"] == "ShardedTensor":
            seen = [piece["offsets"] for piece in known["shards"]]
            known["shards"] = known["shards"] + [
                piece for piece in entry["shards"] if piece["offsets"] not in seen
            ]
        elif entry["type"] in _DICTS and known["type"] == entry["type"]:
            known["keys"] = known["keys"] + [
                key for key in entry["keys"] if key not in known["keys"]
            ]
        elif entry["type"] != "list" and entry != known:
            raise InvalidInput(
                f"{root}: each of {world_size} ranks has {path} for itself (rank {rank}); load it "
                "with TorchSnapshot"
            )
    return merged
