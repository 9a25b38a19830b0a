"""The leaves of a commit under the names that DCP gives them.

As DCP's planner does, every mapping is taken apart, and every list with a tensor or a mapping in
it; what remains are tensors and objects. Dots join the keys of all levels. Details of DCP's names
that a commit's trees do not contain are *marks* in its layout (docs/format.md §7).
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch

from ckptstore.core.model import Box, Node, Schema, Shape
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.restore.restore import assemble_nodes
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state import containers, paths, values

_TENSORS = ("torch.Parameter", "torch.Tensor", "torch.thin_subclass")
"""Node types that are one plain tensor with an attribute."""

_COMPOSITES = (
    "torch.sparse_",
    "torch.quantized",
    "torch.nested",
    "torch.jagged",
    "torch.subclass",
    *_TENSORS,
)

Keys: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an item: text for mappings, numbers for lists."""

DCP_VERSION = "1.0.0"
"""The version in DCP's metadata; torch before 2.8 has none."""

FLAT_KEY = "model"
"""The key for a state dict without nesting."""


@dataclass(slots=True)
class Marks:
    """Details of DCP's names: `flat` is a key that is not part of them; `items` are paths of
    containers that are one item each; `raw` are paths of bytes that the planner made; `rank` marks
    one rank's part, and `parts` has the shapes of tensors of which that rank held boxes only.
    """

    flat: str | None = None
    items: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    rank: int | None = None
    parts: dict[str, Shape] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Marks":
        """The marks in a commit's layout. Raises `Corrupt`."""
        document = snapshot.layout.dcp if snapshot.layout else None
        if document is None:
            return cls()
        try:
            flat, items, raw = document["flat"], document["items"], document["raw"]
            parts = {path: tuple(shape) for path, shape in document["parts"].items()}
            return cls(flat, items, raw, document["rank"], parts)
        except (AttributeError, KeyError, TypeError) as error:
            raise Corrupt(
                f"the layout of commit {snapshot.id[:12]} is damaged: {error!r}; run `ckptstore "
                "fsck`"
            ) from error


@dataclass(frozen=True, slots=True)
class Named:
    """An item and its place in its tree. An object has no `parts`. A tensor of `shape` has one, the
    whole, or the boxes of it that one rank saved alone, each with its leaf.
    """

    name: str
    keys: Keys
    tree: Tree
    node: Node | int
    path: str
    parts: tuple[tuple[Box, int], ...] = ()
    shape: Shape = ()

    @property
    def is_whole(self) -> bool:
        """Whether this is a tensor in one leaf."""
        return len(self.parts) == 1 and self.parts[0][0].lengths == self.shape


class CommitItems:
    """The items of a commit by name, in the order of its trees; with `key`, those of that key,
    without its name.

    Raises `InvalidInput` if two items would have one name, `Corrupt` for a damaged layout.
    """

    def __init__(self, snapshot: Snapshot, key: str | None, *, allow_pickle: bool) -> None:
        self.snapshot, self.marks = snapshot, Marks.of(snapshot)
        self._allow_pickle = allow_pickle
        self._whole = frozenset(self.marks.items)
        self.by_name: dict[str, Named] = {}
        unnamed = self.marks.flat if key is None else key
        for own, tree in contents_of(snapshot).trees.items():
            if key is not None and own != key:
                continue
            containers.check(tree.schema.skeleton)
            keys: Keys = () if own == unnamed else (own,)
            for item in self._below(tree, tree.schema.skeleton, keys, paths.segment(own)):
                other = self.by_name.setdefault(item.name, item)
                if other is not item:
                    raise InvalidInput(
                        f"{other.path} and {item.path} are both {item.name!r} for DCP; read them "
                        "natively, or one key (key=…)"
                    )

    def objects(self, items: Iterable[Named]) -> dict[str, Any]:
        """The objects of `items`, by name. The tensors in them are read together."""
        wanted, contents = list(items), contents_of(self.snapshot)
        found: dict[str, Any] = {}
        for tree in contents.trees.values():
            if not (own := [item for item in wanted if item.tree is tree]):
                continue
            made = assemble_nodes(
                contents.reader,
                contents.commit,
                tree,
                [item.node for item in own],
                allow_pickle=self._allow_pickle,
            )
            found.update(zip((item.name for item in own), made, strict=True))
        return found

    def _below(self, tree: Tree, node: Node | int, keys: Keys, path: str) -> Iterator[Named]:
        if isinstance(node, Node) and node.type == "stateful":
            yield from self._below(tree, node.children[0], keys, path)
        elif (
            isinstance(node, Node)
            and path not in self._whole
            and path not in self.marks.parts
            and is_divided(node, tree.schema)
        ):
            names: Iterable[str | int] = (
                range(len(node.children)) if node.keys is None else map(_text, node.keys)
            )
            below = paths.below(node, path)
            for name, child, own in zip(names, node.children, below, strict=True):
                yield from self._below(tree, child, (*keys, name), own)
        elif not keys:
            raise InvalidInput(
                f"{path} is one item and has no name without its key; leave key= out"
            )
        else:
            parts, shape = self._parts(tree.schema, node, path)
            yield Named(".".join(map(str, keys)), keys, tree, node, path, parts, shape)

    def _parts(
        self, schema: Schema, node: Node | int, path: str
    ) -> tuple[tuple[tuple[Box, int], ...], Shape]:
        """The boxes and the shape of the tensor at `node`; none for an object."""
        if isinstance(node, Node) and path in self.marks.parts:
            return tuple(_boxes(schema, node, path)), self.marks.parts[path]
        while isinstance(node, Node) and node.type in _TENSORS:
            node = node.children[0]
        if isinstance(node, Node) or schema.kinds[node] != "tensor":
            return (), ()
        shape = schema.shapes[node]
        return ((Box((0,) * len(shape), shape), node),), shape


def is_divided(node: Node | int, schema: Schema) -> bool:
    """Whether DCP takes the object at `node` apart."""
    if isinstance(node, int):
        return False
    if containers.is_mapping(node.type):
        return True
    return node.type == "list" and any(
        _is_tensor(child, schema) or is_divided(child, schema) for child in node.children
    )


def _is_tensor(node: Node | int, schema: Schema) -> bool:
    if isinstance(node, int):
        return schema.kinds[node] == "tensor"
    return node.type.startswith(_COMPOSITES)


def _boxes(schema: Schema, node: Node, path: str) -> Iterator[tuple[Box, int]]:
    """The boxes that one rank saved, which are leaves named by their offsets."""
    for key, child in zip(node.keys or (), node.children, strict=True):
        if not isinstance(child, int):
            raise Corrupt(
                f"{path} is marked as boxes of a tensor, but holds other values; run `ckptstore "
                "fsck`"
            )
        offsets = tuple(int(n) for n in key.split(",")) if key else ()
        yield Box(offsets, schema.shapes[child]), child


def _text(key: Any) -> str:
    return str(values.decode_key(key))


def dumped(value: Any) -> io.BytesIO:
    """An object in the bytes of DCP's own planner, for planners that read bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def keeps(planner: Any, base: type, *methods: str) -> bool:
    """Whether a planner is DCP's own, as far as `methods` go."""
    return isinstance(planner, base) and all(
        getattr(type(planner), method) is getattr(base, method) for method in methods
    )
