"""How do many ranks restore one commit together, and what does each see of it?

Each rank reads and verifies what it needs; of slow storage, one rank reads what several need and
sends it to them (`distributed.shared_reads`). A failure on one rank fails the restore on all. A
rank sees all shared leaves, and its own private ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptstore.core.ids import CommitId
from ckptstore.core.model import Node, Schema, leaves_of
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.merge import RANKS, schema_of
from ckptstore.distributed.shared_reads import Broadcast
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.restore.restore import RestoreOperation
from ckptstore.state.shards import is_bound_to_world_size

T = TypeVar("T")


def restore_together(
    peers: Collective,
    commit: CommitId,
    begin: Callable[[], RestoreOperation],
    broadcast_of: Callable[[RestoreOperation], Broadcast] | None,
) -> RestoreOperation:
    """Restore `commit` on every rank of `peers`.

    No target changes before every rank has checked that the commit fits its state, and no result is
    returned before every rank has its part. `broadcast_of` gives the way to share chunks that
    several ranks need; without it on some rank, each reads for itself.

    Raises one error on all ranks: `Conflict` if they restore different commits, otherwise the class
    that the causes share.
    """
    begun: list[tuple[RestoreOperation, Broadcast | None]] = []

    def bind() -> Any:
        operation = begin()
        broadcast = broadcast_of(operation) if broadcast_of else None
        begun.append((operation, broadcast))
        return commit, broadcast.need() if broadcast else None

    def share(handed_in: list[Any]) -> list[Any]:
        commits, needs = zip(*handed_in, strict=True)
        _check_same(commits)
        broadcast = begun[0][1]
        return broadcast.answer(needs) if broadcast and all(needs) else [None] * len(needs)

    task = peers.round("restore: bind", bind, share)
    restoring, broadcast = begun[0]

    def read() -> None:
        restoring.read(broadcast.run(peers, task) if broadcast and task else None)

    peers.share("restore: read", read)
    peers.share("restore: finish", restoring.finish)
    return restoring


def agreed(peers: Collective, candidates: Sequence[CommitId]) -> list[CommitId]:
    """The coordinator's candidates, on every rank."""
    found: list[CommitId] = peers.share(
        "resume: choose", lambda: candidates, lambda handed_in: handed_in[0]
    )
    return found


def on_all(peers: Collective, act: Callable[[], T]) -> T:
    """The result of `act` on this rank; an error on any rank is raised on every rank."""
    found: list[T] = []

    peers.share("resume: open", lambda: found.append(act()))
    return found[0]


def _check_same(handed_in: Sequence[str]) -> None:
    if len(set(handed_in)) > 1:
        named = ", ".join(f"rank {rank}: {commit[:12]}" for rank, commit in enumerate(handed_in))
        raise Conflict(
            f"ranks restore different commits ({named}); name a commit by its step, its tag or its "
            "id on all of them"
        )


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


def check_loaders(
    trees: Mapping[str, Tree], app_state: Mapping[str, Any], viewer: RankView
) -> None:
    """Raise `InvalidInput` for a data loader saved by another number of ranks."""
    for key, tree in trees.items():
        then = frozenset[int]().union(*owners(tree.schema.skeleton))
        other = then and then != frozenset(range(viewer.size)) and not viewer.private
        if other and key in app_state and is_bound_to_world_size(app_state[key]):
            raise InvalidInput(
                f"{key} is a data loader of {len(then)} ranks, and there are {viewer.size} now: "
                "places in the data would be lost. "
                f"Leave {key} out of the state and begin the epoch anew; or, for a loader that can "
                "go on from the states of others, set "
                f"any_world_size = True on it and pass private={{rank: rank whose to take}}"
            )


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
        rows = [
            (path, old.kinds[i], old.dtypes[i], old.shapes[i], numbers.get(old.aliases[i], -1))
            for path, i in zip(self._paths, self.taken, strict=True)
        ]
        return schema_of(skeleton, rows)


def _depth(paths: Sequence[str], ranks: Sequence[int]) -> int:
    """The index of the rank's segment in the paths below a divided node."""
    split = [path.split("/") for path in paths]
    shortest = min(map(len, split), default=1)
    names = {str(rank) for rank in ranks}
    if len(names) == 1:
        return shortest - 1
    return next((i for i in range(shortest) if len({path[i] for path in split}) > 1), shortest - 1)
