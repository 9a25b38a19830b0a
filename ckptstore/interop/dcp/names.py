"""What DCP calls the leaves of a commit: flat names, and the keys that lead to each. Pure.

Every mapping is taken apart, and every list in which there is a tensor or a mapping, as DCP's
planner does it; what is left is a tensor or an object. The keys of a level are joined by dots. What
the trees of a commit that DCP saved do not say of its names are *marks*, which lie in the commit's
layout (docs/format.md §7).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptstore.core.model import Box, Node, Schema, Shape
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.state import containers, paths, values

_TENSORS = ("torch.Parameter", "torch.Tensor", "torch.thin_subclass")
"""Node types that are one plain tensor, and something about it."""

_COMPOSITES = (
    "torch.sparse_",
    "torch.quantized",
    "torch.nested",
    "torch.jagged",
    "torch.subclass",
    *_TENSORS,
)

Keys: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an item: text for those of mappings, numbers for places in lists."""


DCP_VERSION = "1.0.0"
"""Of the metadata that DCP writes; torch before 2.8 has none."""

FLAT_KEY = "model"
"""The key that a state dict without anything nested becomes."""


@dataclass(slots=True)
class Marks:
    """What DCP's names are: `flat` is the key whose name is no part of them; `items` are paths of
    containers that are one item each; `raw` those of bytes that the planner made; `rank` says that
    this is what one rank had, `parts` the shapes of tensors of which it had boxes only."""

    flat: str | None = None
    items: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    rank: int | None = None
    parts: dict[str, Shape] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        parts = {path: list(shape) for path, shape in self.parts.items()}
        return {
            "flat": self.flat,
            "items": self.items,
            "raw": self.raw,
            "rank": self.rank,
            "parts": parts,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Marks":
        parts = {path: tuple(shape) for path, shape in document["parts"].items()}
        return cls(document["flat"], document["items"], document["raw"], document["rank"], parts)


@dataclass(frozen=True, slots=True)
class Named:
    """An item: where it is in its tree, and what it is. A tensor is the leaf `tensor`, or the boxes
    `parts`; anything else an object."""

    name: str
    keys: Keys
    tree: Tree
    node: Node | int
    path: str
    tensor: int | None = None
    parts: tuple[tuple[Box, int], ...] = ()
    shape: Shape = ()
    """Of the whole tensor, where there are parts of it."""


def named(trees: Mapping[str, Tree], marks: Marks, only: str | None = None) -> dict[str, Named]:
    """Every item of a commit by its name, in the order of the trees; those of the key `only`,
    without its name, if that is given.

    Raises `InvalidInput` where two items would have one name.
    """
    found: dict[str, Named] = {}
    flat = marks.flat if only is None else only
    for key, tree in trees.items():
        if only is not None and key != only:
            continue
        containers.check(tree.schema.skeleton)
        keys: Keys = () if key == flat else (key,)
        for item in _Walk(tree, marks).items(tree.schema.skeleton, keys, paths.segment(key)):
            other = found.setdefault(item.name, item)
            if other is not item:
                raise InvalidInput(
                    f"{other.path} and {item.path} are both {item.name!r} for DCP; read them "
                    "natively, or one key (key=…)"
                )
    return found


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
    return (
        schema.kinds[node] == "tensor"
        if isinstance(node, int)
        else node.type.startswith(_COMPOSITES)
    )


class _Walk:
    """The items of one tree."""

    def __init__(self, tree: Tree, marks: Marks) -> None:
        self._tree, self._schema, self._marks = tree, tree.schema, marks
        self._whole = frozenset(marks.items)

    def items(self, node: Node | int, keys: Keys, path: str) -> Iterator[Named]:
        if isinstance(node, Node) and node.type == "stateful":
            yield from self.items(node.children[0], keys, path)
        elif isinstance(node, Node) and path in self._marks.parts:
            parts = tuple(self._parts(node, path))
            yield Named(
                _name(keys, path),
                keys,
                self._tree,
                node,
                path,
                parts=parts,
                shape=self._marks.parts[path],
            )
        elif isinstance(node, Node) and path not in self._whole and is_divided(node, self._schema):
            below: list[str | int] = (
                list(range(len(node.children)))
                if node.keys is None
                else [_text(key) for key in node.keys]
            )
            for key, child, own in zip(below, node.children, paths.below(node, path), strict=True):
                yield from self.items(child, (*keys, key), own)
        else:
            yield Named(_name(keys, path), keys, self._tree, node, path, tensor=self._tensor(node))

    def _tensor(self, node: Node | int) -> int | None:
        while isinstance(node, Node) and node.type in _TENSORS:
            node = node.children[0]
        return node if isinstance(node, int) and self._schema.kinds[node] == "tensor" else None

    def _parts(self, node: Node, path: str) -> Iterator[tuple[Box, int]]:
        for key, child in zip(node.keys or (), node.children, strict=True):
            if not isinstance(child, int):
                raise Corrupt(
                    f"{path} is marked as boxes of a tensor, and is none; run `ckptstore fsck`"
                )
            offsets = tuple(int(n) for n in key.split(",")) if key else ()
            yield Box(offsets, self._schema.shapes[child]), child


def _name(keys: Keys, path: str) -> str:
    if not keys:
        raise InvalidInput(f"{path} is one item and has no name without its key; leave key= out")
    return ".".join(map(str, keys))


def _text(key: Any) -> str:
    return str(values.decode_key(key))
