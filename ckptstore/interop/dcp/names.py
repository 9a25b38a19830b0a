"""Under which names does DCP know the leaves of a commit? Flat names, each with the keys that lead
to it. Pure.

As in DCP's planner, every mapping is taken apart, and every list with a tensor or a mapping in it;
the rest are tensors or objects. The keys of all levels are joined by dots. Details of DCP's names
that a commit's trees do not contain are *marks* in its layout (docs/format.md §7).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptstore.core.model import Box, Node, Schema, Shape
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.restore.reader import Tree
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
    """An item: its place in its tree, and its kind. A tensor is the leaf `tensor` or the boxes
    `parts`; anything else is an object.
    """

    name: str
    keys: Keys
    tree: Tree
    node: Node | int
    path: str
    tensor: int | None = None
    parts: tuple[tuple[Box, int], ...] = ()
    shape: Shape = ()
    """The whole tensor's shape, if there are parts."""


def named(trees: Mapping[str, Tree], marks: Marks, only: str | None = None) -> dict[str, Named]:
    """Every item of a commit by name, in the order of the trees; with `only`, the items of that
    key, without its name.

    Raises `InvalidInput` if two items would have one name.
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
