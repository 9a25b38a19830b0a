"""How do ranks describe their states, and how are the descriptions merged into one? Pure.

A rank's description (schemas, and the boxes of each leaf) is sent before any byte moves. It changes
only with the state's structure, so later commits send its digest. Reports give the content of
leaves whose replication is unknown, before a writer is assigned.

Leaves under one path are one leaf if kind, dtype and shape agree. Mappings are merged key by key.
Where ranks have different nodes in one place, a node of type `ranks` has each rank's node under its
number. Leaves with different content, and leaves known to belong to one rank, become such a node
later (`finish`).
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, get_args, overload

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Box, LeafKind, Node, Schema, Shape, leaves_of
from ckptstore.distributed.framing import damaged, numbers_of, pack, table, tuples, unpack
from ckptstore.errors import Conflict
from ckptstore.objects.schema import LastSchemas, decode_schema
from ckptstore.state.leaf_sources import (
    NAMES,
    RANKS,
    FlatState,
    Holding,
    Mark,
    Mesh,
    attributes_in,
    paths_of_leaves,
    segment,
)


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """How a rank holds the leaves of a tree: `held` has for each the number of the holding, -1 for
    none, and `marks` what is known of it. Ranks that hold leaves alike share one object; what they
    hold of them differs.

    Leaves of one number in `codes`, also of other keys of a rank, are held and marked alike.
    """

    held: Sequence[int]
    marks: Mapping[int, Mark]
    codes: Sequence[int]


@dataclass(frozen=True, slots=True)
class RankTree:
    """One key of the state on one rank. A leaf that is neither held by one of `holdings` nor marked
    is held whole."""

    key: str
    schema: Schema
    schema_bytes: bytes
    ways: Ways
    holdings: Sequence[Holding]

    @property
    def marks(self) -> Mapping[int, Mark]:
        return self.ways.marks

    @property
    def held(self) -> dict[int, Holding]:
        """The holdings of all leaves that ranks divide, by number."""
        return {i: self.holdings[n] for i, n in enumerate(self.ways.held) if n >= 0}

    def holding(self, leaf: int) -> Holding | None:
        """How this rank holds a leaf that ranks divide; None of any other."""
        number = self.ways.held[leaf]
        return None if number < 0 else self.holdings[number]


@dataclass(slots=True)
class Described:
    """What descriptions share: the parts of those that were decoded, by their bytes. A part of
    thousands of ranks is decoded once."""

    schemas: dict[bytes, Schema] = field(default_factory=dict)
    meshes: dict[Any, Mesh] = field(default_factory=dict)
    ways: dict[tuple[bytes, bytes], Ways] = field(default_factory=dict)

    def schema(self, data: bytes) -> Schema:
        if data not in self.schemas:
            self.schemas[data] = decode_schema(zlib.decompress(data))
        return self.schemas[data]

    def mesh(self, encoded: Any) -> Mesh:
        """One object for equal meshes, since those of many ranks are slow to compare."""
        if encoded not in self.meshes:
            shape, ranks = encoded
            row = range(*ranks) if isinstance(ranks, tuple) else numbers_of(ranks)
            self.meshes[encoded] = Mesh(shape, tuple(row))
        return self.meshes[encoded]

    def ways_of(self, held: bytes, marks: bytes) -> Ways:
        if (held, marks) not in self.ways:
            numbers = numbers_of(held)
            marked = numbers_of(marks) or [-1] * len(numbers)
            names = {i: _MARKS[n] for i, n in enumerate(marked) if n >= 0}
            codes = [n * (len(_MARKS) + 1) + marked[i] for i, n in enumerate(numbers)]
            self.ways[held, marks] = Ways(numbers, names, codes)
        return self.ways[held, marks]

    def forget(self, kept: Sequence[RankTree]) -> None:
        """Keep the parts of these trees only."""
        schemas = {tree.schema_bytes for tree in kept}
        self.schemas = {data: each for data, each in self.schemas.items() if data in schemas}
        self.meshes, self.ways = {}, {}


_MARKS: tuple[Mark, ...] = get_args(Mark)


def encode_description(flats: Mapping[str, FlatState], schemas: LastSchemas) -> bytes:
    meshes: dict[Mesh | None, int] = {}
    holdings: dict[Holding, int] = {}
    known: IdentityDict[Holding, int] = IdentityDict()  # a mesh of many ranks is slow to hash
    trees = []
    for key, flat in flats.items():
        held = [-1] * len(flat.schema)
        for leaf, (holding, _, _) in flat.held.items():
            if holding not in known:
                known[holding] = holdings.setdefault(holding, len(holdings))
            held[leaf] = known[holding]
        schema = _compressed(schemas.encode(key, flat.schema))
        trees.append([key, table(held), _encode_marks(flat), schema])
    # Layers repeat, so most leaves share their holding with others.
    distinct = [
        [meshes.setdefault(mesh, len(meshes)), names, boxes] for mesh, names, boxes in holdings
    ]
    meshed = [mesh and _encode_mesh(mesh) for mesh in meshes]
    return pack({"meshes": meshed, "holdings": distinct, "trees": trees})


@lru_cache(64)
def _compressed(schema: bytes) -> bytes:
    """A schema for a message: rank 0 gets one of each rank."""
    return zlib.compress(schema, 1)


def _encode_marks(flat: FlatState) -> bytes:
    marked = [-1] * len(flat.schema) if flat.marks else []
    for leaf, mark in flat.marks.items():
        marked[leaf] = _MARKS.index(mark)
    return table(marked)


def _encode_mesh(mesh: Mesh) -> list[Any]:
    """The shape, and the ranks: as the arguments of a range, where they are one."""
    ranks = mesh.ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    row = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks else range(0)
    return [mesh.shape, [row.start, row.stop, row.step] if ranks == tuple(row) else table(ranks)]


def decode_description(data: bytes, known: Described) -> list[RankTree]:
    """The inverse of `encode_description`; `known` has what earlier ones share with it. Raises
    `Corrupt`."""
    head = unpack(data)
    try:
        meshes = [mesh and known.mesh(tuples(mesh)) for mesh in head["meshes"]]
        holdings = tuple(
            Holding(meshes[mesh], tuple(names), tuple(Box(*box) for box in tuples(boxes)))
            for mesh, names, boxes in head["holdings"]
        )
        trees = []
        for key, held, marks, schema_bytes in head["trees"]:
            schema, ways = known.schema(schema_bytes), known.ways_of(held, marks)
            if len(ways.held) != len(schema) or max(ways.held, default=-1) >= len(holdings):
                raise ValueError(f"{len(ways.held)} leaves in place of {len(schema)}")
            trees.append(RankTree(key, schema, schema_bytes, ways, holdings))
        return trees
    except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        raise damaged(f"the description of its state: {error!r}") from error


OF_RANKS = "ranks"
"""The attribute of a group's names that has, by rank number, the names that this rank had."""


def _is_of_ranks(node: Node | int) -> bool:
    return isinstance(node, Node) and node.type == NAMES and OF_RANKS in dict(node.attrs)


def _united(node: Node | int) -> Node | int:
    """`node` without the attribute that lists each rank's own names."""
    if isinstance(node, int) or not _is_of_ranks(node):
        return node
    return replace(node, attrs=tuple((k, each) for k, each in node.attrs if k != OF_RANKS))


class Holder(NamedTuple):
    """A rank that holds a leaf, and the leaf's number there."""

    rank: int
    leaf: int


@dataclass(frozen=True, slots=True)
class SameHolders(Sequence[Holder]):
    """The holders of a leaf that has one number on all ranks: those of a tree share `ranks`."""

    ranks: tuple[int, ...]
    leaf: int

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Holder]:
        return (Holder(rank, self.leaf) for rank in self.ranks)

    @overload
    def __getitem__(self, at: int) -> Holder: ...

    @overload
    def __getitem__(self, at: slice) -> "SameHolders": ...

    def __getitem__(self, at: int | slice) -> "Holder | SameHolders":
        if isinstance(at, slice):
            return SameHolders(self.ranks[at], self.leaf)
        return Holder(self.ranks[at], self.leaf)


@dataclass(slots=True)
class MergedLeaf:
    """A leaf of the whole state. `alias` is an earlier leaf's number or -1. An `owned` leaf lies
    below the number of its only holder already, so it is not divided again."""

    path: str
    kind: LeafKind
    dtype: str
    shape: Shape
    holders: Sequence[Holder]
    alias: int = -1
    owned: bool = False


@dataclass(slots=True)
class MergedTree:
    """One key of the whole state; `trees` are the trees of the ranks that have it."""

    key: str
    skeleton: Node | int
    leaves: list[MergedLeaf]
    trees: dict[int, RankTree] = field(default_factory=dict)


def schema_of(skeleton: Node | int, rows: Sequence[Sequence[Any]]) -> Schema:
    """The schema of leaves with (path, kind, dtype, shape, alias) each."""
    return Schema(skeleton, *(zip(*rows, strict=True) if rows else ((),) * 5))


Finished: TypeAlias = tuple[Schema, list[tuple[int, int | None]]]
"""A schema, and for each of its leaves the merged leaf and the rank that owns it, if private."""


def merge(by_rank: Sequence[Sequence[RankTree]]) -> list[MergedTree]:
    """All keys of any rank, in the order of the first rank that has each."""
    keys: dict[str, dict[int, RankTree]] = {}
    for rank, trees in enumerate(by_rank):
        for tree in trees:
            keys.setdefault(tree.key, {})[rank] = tree
    return [_merge_key(key, trees) for key, trees in keys.items()]


def finish(tree: MergedTree, private: frozenset[int]) -> Finished:
    """The whole state, with the leaves numbered `private` divided by rank."""
    found: list[tuple[int, int | None]] = []
    # A leaf tied to a divided leaf is divided too, so that each rank's leaves stay tied.
    tied = frozenset(i for i, leaf in enumerate(tree.leaves) if leaf.alias in private)
    skeleton = _divide(tree.skeleton, tree, private | tied, found)
    numbers = {each: i for i, each in enumerate(found)}
    rows = []
    paths = dict(paths_of_leaves(skeleton, segment(tree.key)))
    for (i, rank), number in numbers.items():
        leaf = tree.leaves[i]
        alias = numbers.get((leaf.alias, rank), -1) if leaf.alias >= 0 else -1
        rows.append((paths[number], leaf.kind, leaf.dtype, leaf.shape, alias))
    return schema_of(skeleton, rows), found


def _divide(
    node: Node | int, tree: MergedTree, private: frozenset[int], found: list[tuple[int, int | None]]
) -> Node | int:
    if isinstance(node, Node):
        below = node.children
        if any(map(_is_of_ranks, below)) and private.isdisjoint(leaves_of(node)):
            # Which rank had which of a group's names matters only where options are divided too.
            below = tuple(map(_united, below))
        children = tuple(_divide(child, tree, private, found) for child in below)
        return Node(node.type, children, node.keys, node.attrs)
    if node not in private:
        found.append((node, None))
        return len(found) - 1
    ranks = [holder.rank for holder in tree.leaves[node].holders]
    first = len(found)
    found.extend((node, rank) for rank in ranks)
    return Node(RANKS, tuple(range(first, first + len(ranks))), tuple(ranks))


def _merge_key(key: str, trees: dict[int, RankTree]) -> MergedTree:
    first = next(iter(trees.values()))
    if all(tree.schema_bytes == first.schema_bytes for tree in trees.values()):
        return _same(key, first.schema, trees)
    merged = MergedTree(key, 0, [], trees)
    merged.skeleton = _Merger(merged, trees).merge(
        [(rank, tree.schema.skeleton) for rank, tree in trees.items()]
    )
    for leaf, path in paths_of_leaves(merged.skeleton, segment(key)):
        merged.leaves[leaf].path = path
    _join_aliases(merged)
    return merged


def _same(key: str, schema: Schema, trees: dict[int, RankTree]) -> MergedTree:
    ranks = tuple(trees)
    leaves = [
        MergedLeaf(
            schema.paths[i],
            schema.kinds[i],
            schema.dtypes[i],
            schema.shapes[i],
            SameHolders(ranks, i),
        )
        for i in range(len(schema))
    ]
    for i, alias in enumerate(schema.aliases):
        if 0 <= alias < i and any(_has_elements(tree, i) for tree in trees.values()):
            leaves[i].alias = alias
    return MergedTree(key, schema.skeleton, leaves, trees)


class _Merger:
    """Walks the skeletons of several ranks in parallel and collects the merged leaves."""

    def __init__(self, merged: MergedTree, trees: Mapping[int, RankTree]) -> None:
        self._merged, self._trees = merged, trees

    def merge(self, nodes: Sequence[tuple[int, Node | int]]) -> Node | int:
        """The merged node for the nodes that ranks have in one place."""
        if all(isinstance(node, int) for _, node in nodes):
            found = {self._what(rank, node) for rank, node in nodes if isinstance(node, int)}
            if len(found) == 1:
                return self._leaf(
                    [Holder(rank, node) for rank, node in nodes if isinstance(node, int)]
                )
        elif all(isinstance(node, Node) for _, node in nodes):
            inner = [(rank, node) for rank, node in nodes if isinstance(node, Node)]
            attrs = _joint_attrs(inner)
            if (
                attrs is not None
                and len({(node.type, node.keys is None) for _, node in inner}) == 1
            ):
                if inner[0][1].keys is not None:
                    return self._mapping(inner, attrs)
                if len({len(node.children) for _, node in inner}) == 1:
                    return self._sequence(inner, attrs)
        return self._divided(nodes)

    def _mapping(
        self, nodes: Sequence[tuple[int, Node]], attrs: tuple[tuple[str, Any], ...]
    ) -> Node:
        below: dict[Any, tuple[Any, list[tuple[int, Node | int]]]] = {}
        for rank, node in nodes:
            for key, child in node.items():
                below.setdefault(_hashable(key), (key, []))[1].append((rank, child))
        children = tuple(self.merge(found) for _, found in below.values())
        return Node(nodes[0][1].type, children, tuple(key for key, _ in below.values()), attrs)

    def _sequence(
        self, nodes: Sequence[tuple[int, Node]], attrs: tuple[tuple[str, Any], ...]
    ) -> Node:
        children = tuple(
            self.merge([(rank, node.children[i]) for rank, node in nodes])
            for i in range(len(nodes[0][1].children))
        )
        return Node(nodes[0][1].type, children, None, attrs)

    def _divided(self, nodes: Sequence[tuple[int, Node | int]]) -> Node:
        """Each rank's node, under the rank's number."""
        self._check_attributes(nodes)
        children = tuple(self._own(rank, node) for rank, node in nodes)
        return Node(RANKS, children, tuple(rank for rank, _ in nodes))

    def _check_attributes(self, nodes: Sequence[tuple[int, Node | int]]) -> None:
        """Raise `Conflict` if ranks have set different attributes on their parts of one tensor. One
        tensor has one set of attributes, so these cannot be kept per rank."""
        of_ranks = [attributes_in(node) for _, node in nodes]
        differ = {name for each in of_ranks for name in each}
        differ = {name for name in differ if len({repr(each.get(name)) for each in of_ranks}) > 1}
        if not differ:
            return
        leaves = [(self._trees[rank], leaf) for rank, node in nodes for leaf in leaves_of(node)]
        if any(_is_part(tree, leaf) for tree, leaf in leaves):
            tree, leaf = leaves[0]
            raise Conflict(
                f"{tree.schema.paths[leaf]} is divided among ranks {[rank for rank, _ in nodes]}, "
                f"which have set different attributes on it: {', '.join(sorted(differ))}; set them "
                "alike on all ranks, or store what is each rank's own under a key of its own and "
                "delete the attribute"
            )

    def _own(self, rank: int, node: Node | int) -> Node | int:
        if isinstance(node, int):
            number = self._leaf([Holder(rank, node)])
            self._merged.leaves[number].owned = True
            return number
        return replace(node, children=tuple(self._own(rank, child) for child in node.children))

    def _leaf(self, holders: Sequence[Holder]) -> int:
        leaf = MergedLeaf("", *self._what(*holders[0]), tuple(holders))
        self._merged.leaves.append(leaf)
        return len(self._merged.leaves) - 1

    def _what(self, rank: int, leaf: int) -> tuple[LeafKind, str, Shape]:
        schema = self._trees[rank].schema
        return schema.kinds[leaf], schema.dtypes[leaf], schema.shapes[leaf]


def _is_part(tree: RankTree, leaf: int) -> bool:
    """Whether a rank holds less of a leaf than all of it."""
    whole = Box.whole(tree.schema.shapes[leaf])
    holding = tree.holding(leaf)
    return holding is not None and holding.boxes != (whole,)


def _join_aliases(tree: MergedTree) -> None:
    """A leaf stays an alias if, on every rank that has elements of it, it is an alias of one and
    the same leaf.
    """
    if not any(alias >= 0 for each in tree.trees.values() for alias in each.schema.aliases):
        return
    numbers = {
        (holder.rank, holder.leaf): i
        for i, leaf in enumerate(tree.leaves)
        for holder in leaf.holders
    }
    for i, leaf in enumerate(tree.leaves):
        holders = [
            holder for holder in leaf.holders if _has_elements(tree.trees[holder.rank], holder.leaf)
        ]
        first = {_alias_of(tree.trees[holder.rank].schema, holder, numbers) for holder in holders}
        if (
            len(first) == 1
            and 0 <= (alias := first.pop()) < i
            and _same_ranks(tree.leaves[alias], leaf)
        ):
            leaf.alias = alias


def _alias_of(schema: Schema, holder: Holder, numbers: Mapping[tuple[int, int], int]) -> int:
    alias = schema.aliases[holder.leaf]
    return numbers[holder.rank, alias] if alias >= 0 else -1


def _same_ranks(a: MergedLeaf, b: MergedLeaf) -> bool:
    return [holder.rank for holder in a.holders] == [holder.rank for holder in b.holders]


def _has_elements(tree: RankTree, leaf: int) -> bool:
    holding = tree.holding(leaf)
    return holding is None or bool(holding.boxes)


def _hashable(key: Any) -> Any:
    return (str(key),) if isinstance(key, list) else key


_UNITED = ("metadata", "names")
"""Attributes that ranks hold in parts: module versions, and the parameter names of an optimizer."""


def _joint_attrs(nodes: Sequence[tuple[int, Node]]) -> tuple[tuple[str, Any], ...] | None:
    """The attributes that nodes share. Lists that each rank has for its own modules are merged; the
    attribute `ranks` keeps the names of each rank."""
    first = nodes[0][1].attrs
    if all(node.attrs == first for _, node in nodes):
        return first
    columns = [dict(node.attrs) for _, node in nodes]
    joint = dict(columns[0])
    if nodes[0][1].type == NAMES:
        joint[OF_RANKS] = [[rank, dict(node.attrs)["names"]] for rank, node in nodes]
    for name in _UNITED:
        parts = [column.pop(name, None) for column in columns]
        if any(_is_map(part) for part in parts):
            if not all(map(_is_map, parts)):
                return None
            joint[name] = [*parts[0][:1], *_unique(item for part in parts for item in part[1:])]
    if any(column != columns[0] for column in columns):
        return None
    return tuple(sorted(joint.items()))


def _is_map(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _unique(items: Iterator[Any]) -> Iterator[Any]:
    seen: set[str] = set()
    for item in items:
        if str(item) not in seen:
            seen.add(str(item))
            yield item
