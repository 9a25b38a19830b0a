"""What does one rank see of a state that many ranks committed? All shared leaves, and its own
private ones. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.core.model import Node, Schema, leaves_of
from ckptstore.distributed.merge import RANKS
from ckptstore.errors import InvalidInput
from ckptstore.restore.reader import Tree


@dataclass(frozen=True, slots=True)
class RankView:
    """The viewer: rank `rank` of `size`, and whose private leaves it takes instead of its own."""

    rank: int = 0
    size: int = 1
    private: Mapping[int, int] = field(default_factory=dict)

    @property
    def owner(self) -> int:
        return self.private.get(self.rank, self.rank)


def own_trees(trees: Mapping[str, Tree], viewer: RankView, *, strict: bool) -> dict[str, Tree]:
    """`trees` with each private leaf at its path on the viewer's rank.

    Raises `InvalidInput` if a private leaf has no copy of the viewer's; without `strict`, mappings
    omit it.
    """
    return {
        key: _own(tree, viewer, strict) if _has_ranks(tree.schema.skeleton) else tree
        for key, tree in trees.items()
    }


def tree_of_rank(tree: Tree, rank: int) -> Tree | None:
    """`tree` as `rank` had it, without other ranks' private leaves; None if nothing is left."""
    if not _has_ranks(tree.schema.skeleton):
        return tree
    view = _View(tree.schema, RankView(rank))
    skeleton = view.visit(tree.schema.skeleton)
    return None if skeleton is None else view.tree(tree, skeleton)


def owners(node: Node | int) -> Iterator[frozenset[int]]:
    """For every place below `node` with private content, the ranks that own some."""
    if isinstance(node, int):
        return
    if node.type == RANKS:
        yield frozenset(node.keys or ())
    for child in node.children:
        yield from owners(child)


def _has_ranks(node: Node | int) -> bool:
    return isinstance(node, Node) and (node.type == RANKS or any(map(_has_ranks, node.children)))


def _own(tree: Tree, viewer: RankView, strict: bool) -> Tree:
    view = _View(tree.schema, viewer)
    skeleton = view.visit(tree.schema.skeleton)
    if view.ownerless and (strict or skeleton is None):
        path, ranks = view.ownerless[0]
        raise InvalidInput(
            f"{path} (and {len(view.ownerless) - 1} more) is private to ranks {ranks}, and rank "
            f"{viewer.rank} has none of its own; "
            f"pass private={{{viewer.rank}: <rank whose to take>}}, or strict=False to leave it as "
            "it is"
        )
    assert skeleton is not None
    return view.tree(tree, skeleton)


class _View:
    def __init__(self, schema: Schema, viewer: RankView) -> None:
        self._schema, self._viewer = schema, viewer
        self._paths: list[str] = []
        self.taken: list[int] = []
        self.ownerless: list[tuple[str, list[int]]] = []

    def visit(self, node: Node | int, cut: int | None = None) -> Node | int | None:
        """The node for the viewer, or None; paths lose segment number `cut`."""
        if isinstance(node, int):
            segments = self._schema.paths[node].split("/")
            self._paths.append("/".join(s for i, s in enumerate(segments) if i != cut))
            self.taken.append(node)
            return len(self.taken) - 1
        if node.type == RANKS:
            return self._choose(node)
        children = [
            (key, self.visit(child, cut))
            for key, child in zip(node.keys or node.children, node.children, strict=True)
        ]
        there = [(key, child) for key, child in children if child is not None]
        if len(there) < len(children) and node.keys is None:
            return None  # a sequence must have no gaps
        keys = None if node.keys is None else tuple(key for key, _ in there)
        return Node(node.type, tuple(child for _, child in there), keys, node.attrs)

    def _choose(self, node: Node) -> Node | int | None:
        depth = _depth(
            [self._schema.paths[leaf] for child in node.children for leaf in leaves_of(child)],
            node.keys or (),
        )
        for rank, child in zip(node.keys or (), node.children, strict=True):
            if rank == self._viewer.owner:
                return self.visit(child, depth)
        paths = [self._schema.paths[leaf] for leaf in leaves_of(node)][:1]
        self.ownerless.append(
            ("/".join((paths or ["?"])[0].split("/")[:depth]), list(node.keys or ()))
        )
        return None

    def tree(self, tree: Tree, skeleton: Node | int) -> Tree:
        return Tree(
            tree.key,
            tree.ref,
            self._schema_of(skeleton),
            [tree.contents[i] for i in self.taken],
            tree.chunk_bytes,
        )

    def _schema_of(self, skeleton: Node | int) -> Schema:
        old, numbers = self._schema, {leaf: i for i, leaf in enumerate(self.taken)}
        return Schema(
            skeleton,
            tuple(self._paths),
            tuple(old.kinds[i] for i in self.taken),
            tuple(old.dtypes[i] for i in self.taken),
            tuple(old.shapes[i] for i in self.taken),
            tuple(numbers.get(old.aliases[i], -1) for i in self.taken),
        )


def _depth(paths: Sequence[str], ranks: Sequence[int]) -> int:
    """The index of the rank's segment in the paths below a divided node."""
    split = [path.split("/") for path in paths]
    shortest = min(map(len, split), default=1)
    names = {str(rank) for rank in ranks}
    if len(names) == 1:
        return shortest - 1
    return next((i for i in range(shortest) if len({path[i] for path in split}) > 1), shortest - 1)
