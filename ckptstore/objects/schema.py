"""How is the schema of a tree encoded, as one canonical JSON object of columns (docs/format.md
§5), and how do keys share one? Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as new
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

from ckptstore.core.model import LeafKind, Node, Schema, Shape, leaves_of
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.canonical import field

_KINDS = {"tensor", "value", "bytes", "plain"}
_COMBINATIONS = {
    ("tensor", True, True),
    ("tensor", True, False),
    ("value", False, False),
    ("bytes", False, False),
    ("plain", False, False),
}
"""Which kinds may have a dtype, and a shape of at least one dimension."""

_MAX_DIMENSIONS = 64
_MAX_BYTES = 1 << 63


def encode_schema(schema: Schema) -> bytes:
    """The encoded schema. Raises `InvalidInput` for content that canonical JSON cannot hold,
    such as containers nested 100 deep."""
    columns = {
        "paths": schema.paths,
        "kinds": schema.kinds,
        "dtypes": schema.dtypes,
        "shapes": schema.shapes,
        "aliases": schema.aliases,
    }
    try:
        return canonical.encode({"skeleton": _node_to_json(schema.skeleton), **columns})
    except RecursionError as error:
        raise InvalidInput(
            f"containers are nested too deep; wanted {canonical.MAX_DEPTH // 2 - 1} levels at most"
        ) from error


class LastSchemas:
    """A cache of the encoded schemas of the last commit, by key: most commits have the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Schema, bytes]] = {}

    def encode(self, key: str, schema: Schema) -> bytes:
        """Like `encode_schema`, from the cache."""
        known = self._known.get(key)
        if known is None or known[0] != schema:
            known = self._known[key] = schema, encode_schema(schema)
        return known[1]


def decode_schema(data: bytes | memoryview) -> Schema:
    """The inverse of `encode_schema`, except that `attrs` come back sorted by name; raises
    `Corrupt`."""
    obj = canonical.decode(data)
    paths, kinds, dtypes = (_strings(obj, key) for key in ("paths", "kinds", "dtypes"))
    aliases = field(obj, "aliases", list)
    shapes = _shapes(field(obj, "shapes", list))
    if len({len(paths), len(kinds), len(dtypes), len(aliases), len(shapes)}) != 1:
        raise _corrupt("columns are not of one length")
    _check_columns(paths, kinds, dtypes, shapes, aliases)
    numbers: list[int] = []
    skeleton = _node_from_json(obj.get("skeleton"), numbers)
    if numbers != list(range(len(paths))):
        raise _corrupt(f"skeleton does not name the {len(paths)} leaves once each and in order")
    return Schema(
        skeleton, paths, cast(tuple[LeafKind, ...], kinds), dtypes, shapes, tuple(aliases)
    )


@dataclass(slots=True)
class Columns:
    """A schema on its way, column by column. Little is kept of a leaf: Python's cycle collector
    looks through all of it afterwards. Leaves are appended to the columns, all five alike."""

    paths: list[str] = new(default_factory=list)
    kinds: list[LeafKind] = new(default_factory=list)
    dtypes: list[str] = new(default_factory=list)
    shapes: list[Shape] = new(default_factory=list)
    aliases: list[int] = new(default_factory=list)

    def take(self, schema: Schema) -> Node | int:
        """Add the leaves of `schema`; its skeleton, which names them by their numbers here."""
        first = len(self.paths)
        self.paths += schema.paths
        self.kinds += schema.kinds
        self.dtypes += schema.dtypes
        self.shapes += schema.shapes
        self.aliases += [alias if alias < 0 else first + alias for alias in schema.aliases]
        return moved(schema.skeleton, first)

    def schema(self, skeleton: Node | int) -> Schema:
        """The schema of all leaves that were added."""
        return Schema(
            skeleton,
            tuple(self.paths),
            tuple(self.kinds),
            tuple(self.dtypes),
            tuple(self.shapes),
            tuple(self.aliases),
        )


class SharedKey(NamedTuple):
    """One key of a shared tree: the key's own schema, and its leaves in the tree."""

    key: str
    schema: Schema
    leaves: slice


def join_schemas(parts: Sequence[tuple[str, Schema]]) -> Schema:
    """The schema of the tree that keys share, of each key and its own schema."""
    columns = Columns()
    children = tuple([columns.take(schema) for _, schema in parts])
    return columns.schema(Node("dict", children, tuple([key for key, _ in parts])))


def parts_of(schema: Schema) -> Iterator[SharedKey]:
    """The keys that share the tree of `schema`: the inverse of `join_schemas`. Raises `Corrupt` for
    another tree."""
    first = 0
    for key, child in _dict_of_keys(schema).items():
        stop = first + (1 if isinstance(child, int) else sum(1 for _ in leaves_of(child)))
        leaves = slice(first, stop)
        aliases = schema.aliases[leaves]
        if any(0 <= alias < first for alias in aliases):
            raise _corrupt(f"aliases tie {key!r} to another key")
        aliases = tuple([alias if alias < 0 else alias - first for alias in aliases])
        columns = schema.kinds[leaves], schema.dtypes[leaves], schema.shapes[leaves], aliases
        if isinstance(child, int):
            columns = _alike(columns)
        yield SharedKey(key, Schema(moved(child, -first), schema.paths[leaves], *columns), leaves)
        first = stop


def shared_keys(schema: Schema) -> tuple[str, ...]:
    """The keys of `parts_of`, in order, of which no parts are made unless leaves are tied."""
    if max(schema.aliases, default=-1) >= 0:
        return tuple(part.key for part in parts_of(schema))
    return _dict_of_keys(schema).keys or ()


def _dict_of_keys(schema: Schema) -> Node:
    node = schema.skeleton
    if isinstance(node, int) or not _all_of(node.keys or (), str) or node.keys is None:
        raise _corrupt("skeleton is no dict of the keys that share it")
    return node


_Columns: TypeAlias = tuple[
    tuple[LeafKind, ...], tuple[str, ...], tuple[Shape, ...], tuple[int, ...]
]


@lru_cache(1024)
def _alike(columns: _Columns) -> _Columns:
    """One shared object for equal columns: thousands of keys of one leaf may be alike."""
    return columns


def moved(node: Node | int, by: int) -> Node | int:
    """`node` with its leaves numbered from `by` on."""
    if isinstance(node, int):
        return node + by
    return replace(node, children=tuple([moved(child, by) for child in node.children]))


def _node_to_json(node: Node | int) -> Any:
    if isinstance(node, int):
        return node
    obj: dict[str, Any] = {
        "type": node.type,
        "children": [_node_to_json(child) for child in node.children],
    }
    if node.keys is not None:
        obj["keys"] = node.keys
    if node.attrs:
        obj["attrs"] = dict(node.attrs)
    return obj


def _node_from_json(obj: Any, numbers: list[int]) -> Node | int:
    """The node; adds the numbers of its leaves to `numbers`. Canonical JSON bounds the nesting
    of `obj`."""
    if type(obj) is int:
        numbers.append(obj)
        return obj
    items = field(obj, "children", list)
    if _all_of(items, int):
        numbers.extend(items)
        children = tuple(items)
    else:
        children = tuple([_node_from_json(item, numbers) for item in items])
    keys = _keys(obj, len(items)) if "keys" in obj else None
    attrs = tuple(sorted(field(obj, "attrs", dict).items())) if "attrs" in obj else ()
    return Node(field(obj, "type", str), children, keys, attrs)


def _keys(obj: Any, count: int) -> tuple[Any, ...]:
    keys = field(obj, "keys", list)
    if len(keys) != count:
        raise _corrupt(f"skeleton has {len(keys)} keys for {count} children")
    if not {str, int}.issuperset(map(type, keys)) and not all(map(_is_key, keys)):
        raise _corrupt("skeleton has keys that are neither strings nor integers nor values")
    return tuple(keys)


def _is_key(key: Any) -> bool:
    return type(key) in (str, int) or (
        isinstance(key, list) and bool(key) and isinstance(key[0], str)
    )


def _strings(obj: Any, key: str) -> tuple[str, ...]:
    items = field(obj, key, list)
    if not _all_of(items, str):
        raise _corrupt(f"{key} are not strings")
    return tuple(items)


def _shapes(items: list[Any]) -> tuple[Shape, ...]:
    if not _all_of(items, list) or not _all_of(chain.from_iterable(items), int):
        raise _corrupt("shapes are not lists of integers")
    return tuple(map(tuple, items))


def _all_of(items: Any, kind: type) -> bool:
    # By type and not by isinstance: it runs in C, and a bool is no number here.
    return set(map(type, items)) <= {kind}


def _check_columns(
    paths: tuple[str, ...],
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    shapes: tuple[Shape, ...],
    aliases: list[Any],
) -> None:
    if len(set(paths)) != len(paths):
        raise _corrupt("paths are not unique")
    if not _KINDS.issuperset(kinds):
        raise _corrupt(f"kinds are not among {sorted(_KINDS)}")
    if not all(map(_fits, set(shapes))):
        raise _corrupt("shapes are not shapes of tensors")
    # Few combinations occur, so that each is looked at once.
    if set(zip(kinds, map(bool, dtypes), map(bool, shapes), strict=True)) - _COMBINATIONS:
        raise _corrupt(
            "leaves have a dtype or a shape without being tensors, or tensors have no dtype"
        )
    if not _all_of(aliases, int) or not (
        set(aliases) <= {-1} or all(-1 <= alias < i for i, alias in enumerate(aliases))
    ):
        raise _corrupt("aliases do not name earlier leaves")


def _fits(shape: Shape) -> bool:
    return len(shape) <= _MAX_DIMENSIONS and min(shape, default=0) >= 0 and prod(shape) < _MAX_BYTES


def _corrupt(what: str) -> Corrupt:
    return Corrupt(f"a schema is damaged: its {what}; run `ckptstore fsck`")
