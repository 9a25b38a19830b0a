"""How do many ranks restore one commit together, and what does each see of it?

Each rank reads and verifies what it needs; of slow storage, one rank reads what several need and
sends it to them (`distributed.shared_reads`). A failure on one rank fails the restore on all. A
rank sees all shared leaves, and its own private ones. A rank that has none of its own gets new
streams of random numbers, and must be told what to do about everything else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.core.ids import CommitId, digest
from ckptstore.core.model import Node, leaves_of
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.merge import OF_RANKS, schema_of
from ckptstore.distributed.shared_reads import Broadcast
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.restore.restore import RestoreOperation, RestoreOptions, targets
from ckptstore.state.leaf_sources import NAMES, RANKS, paths_of_leaves, rows, segment
from ckptstore.state.optimizer_forms import OWN_NAMES
from ckptstore.state.restore import places_in
from ckptstore.state.shards import is_bound_to_world_size, is_each_ranks
from ckptstore.state.stateful import NewStreams


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

    @property
    def repeats(self) -> bool:
        """Whether another rank continues the random streams that this rank would take: the rank
        that owns them, or the first of the ranks that take from that owner."""
        takers = [rank for rank in range(self.size) if self.private.get(rank, rank) == self.owner]
        return self.rank != (self.owner if self.owner in takers else takers[0])


def own_trees(
    trees: Mapping[str, Tree],
    viewer: RankView,
    app_state: Mapping[str, Any],
    world: Callable[[], int],
    options: RestoreOptions,
) -> tuple[dict[str, Tree], list[str]]:
    """Two results: `trees` from which the viewer restores `app_state`, each private leaf at its
    path on the viewer's rank; and the wanted paths under which only other ranks have leaves.

    Where the viewer has nothing, data loaders for any number of ranks take the first rank's state,
    and random generators begin new streams. Generators also begin new streams where they would
    repeat another rank's. `world` gives the number of ranks that committed; to know it may take a
    read.

    Raises `InvalidInput` for data loaders of another number of ranks and, if strict, for leaves
    that only other ranks have.
    """
    target_of = targets(app_state, options)
    places = dict(places_in(app_state, is_each_ranks))
    bound = [place for place, value in places.items() if is_bound_to_world_size(value)]
    if not viewer.private:
        _check_loaders(trees, viewer, bound, world, target_of)
    begins = _below([place for place in places if place not in bound], target_of)
    is_new = places and (viewer.owner > 0 or viewer.repeats) and world() == 1
    found: dict[str, Tree] = {}
    lacking: dict[str, Sequence[int]] = {}
    for key, tree in trees.items():
        view = _View(tree, viewer, begins)
        if _has_ranks(tree.schema.skeleton):
            skeleton = view.seen()
            lacking.update(view.lacking)
            if skeleton is not None:
                found[key] = view.tree(skeleton)
        else:
            new = [i for i, path in enumerate(tree.schema.paths) if begins(path)] if is_new else []
            found[key] = view.with_streams(tree, new)
    lacking = {path: ranks for path, ranks in lacking.items() if target_of(path)}
    if options.strict:
        _check_owned(lacking, viewer)
    return found, list(lacking)


def tree_of_rank(tree: Tree, rank: int) -> Tree | None:
    """`tree` as `rank` had it, without other ranks' private leaves; None if nothing is left."""
    if not _has_ranks(tree.schema.skeleton):
        return tree
    view = _View(tree, RankView(rank), lambda path: False)
    skeleton = view.seen()
    return None if skeleton is None else view.tree(skeleton)


def _below(places: Sequence[str], target_of: Callable[[str], str | None]) -> Callable[[str], bool]:
    """Whether a path is restored to one of `places`, or below one."""
    starts = tuple(f"{place}/" for place in places)
    return lambda path: f"{target_of(path)}/".startswith(starts)


def _check_loaders(
    trees: Mapping[str, Tree],
    viewer: RankView,
    places: Sequence[str],
    world: Callable[[], int],
    target_of: Callable[[str], str | None],
) -> None:
    for place in places:
        paths = (path for tree in trees.values() for path in tree.schema.paths)
        if any(map(_below([place], target_of), paths)) and (then := world()) != viewer.size:
            raise InvalidInput(
                f"{place} is a data loader of {then} ranks, and there are {viewer.size} now: "
                "places in the data would be lost or visited twice; "
                f"{_ways(place, range(then), viewer)}; a loader that can go on from the state of "
                "any rank says so with any_world_size = True"
            )


def _check_owned(lacking: Mapping[str, Sequence[int]], viewer: RankView) -> None:
    if not lacking:
        return
    nor = f", nor has rank {viewer.owner}" if viewer.owner != viewer.rank else ""
    (path, ranks), *others = lacking.items()
    more = f" (and {len(others)} more)" if others else ""
    raise InvalidInput(
        f"{path}{more} is private to ranks {list(ranks)}, and rank {viewer.rank} has none of its "
        f"own{nor}; {_ways(path, ranks, viewer)}, strict=False every leaf that a rank lacks"
    )


def _ways(path: str, ranks: Sequence[int], viewer: RankView) -> str:
    """Advice for the error: how to restore the leaves that `ranks` had under `path`."""
    new = [rank for rank in range(viewer.size) if rank not in ranks] or [0]
    numbers = range(new[0], viewer.size) if new[1:] == [*range(new[0] + 1, viewer.size)] else new
    key, source = path.partition("/")[0], min(ranks)
    taken = f"dict.fromkeys({numbers}, {source})" if new[1:] else f"{{{new[0]}: {source}}}"
    return (
        f"ranks=Ranks(private_from={taken}) takes what rank {source} had, "
        f'without=["{key}"] leaves {key} as it is'
    )


def _has_ranks(node: Node | int) -> bool:
    return isinstance(node, Node) and (node.type == RANKS or any(map(_has_ranks, node.children)))


class _View:
    """Builds one rank's view of one tree."""

    def __init__(self, tree: Tree, viewer: RankView, begins: Callable[[str], bool]) -> None:
        self._tree, self._viewer, self._begins = tree, viewer, begins
        self._taken: list[int] = []
        self._new: list[int] = []
        self.lacking: dict[str, tuple[int, ...]] = {}

    def seen(self) -> Node | int | None:
        """The viewer's skeleton, or None if nothing is left."""
        return self._visit(self._tree.schema.skeleton, segment(self._tree.key))

    def _visit(self, node: Node | int, path: str) -> Node | int | None:
        """The node as the viewer sees it, at `path` there; None if nothing of it is left."""
        if isinstance(node, int):
            self._taken.append(node)
            return len(self._taken) - 1
        if node.type == RANKS:
            return self._choose(node, path)
        first = len(self._taken)
        children = [(key, self._visit(child, at)) for child, at, key in rows(node, path)]
        there = [(key, child) for key, child in children if child is not None]
        if len(there) < len(children) and node.keys is None:
            del self._taken[first:]  # a sequence must have no gaps
            self._new = [leaf for leaf in self._new if leaf < first]
            return None
        keys = None if node.keys is None else tuple(key for key, _ in there)
        return Node(node.type, tuple(child for _, child in there), keys, self._attrs(node))

    def _attrs(self, node: Node) -> tuple[tuple[str, Any], ...]:
        """The attributes of a node. A parameter group gets the options of the viewer's own
        parameters, because another rank's group of the same number may have had other options."""
        attrs = dict(node.attrs)
        if node.type == NAMES and OF_RANKS in attrs:
            attrs[OWN_NAMES] = dict(attrs.pop(OF_RANKS)).get(self._viewer.owner, ["list"])
        return tuple(sorted(attrs.items()))

    def _choose(self, node: Node, place: str) -> Node | int | None:
        ranks = node.keys or ()
        viewer, begins, first = self._viewer, self._begins(place), len(self._taken)
        has_own = viewer.owner in ranks
        if not has_own and (viewer.rank in viewer.private or not begins):
            self.lacking[place] = ranks
            return None
        chosen = self._visit(node.children[ranks.index(viewer.owner) if has_own else 0], place)
        if begins and (viewer.repeats or not has_own) and not self._in_step(node):
            self._new += range(first, len(self._taken))
        return chosen

    def _in_step(self, node: Node) -> bool:
        """Whether several ranks had something, and all of them the same."""
        contents = {
            tuple(self._tree.content_key(leaf) for leaf in leaves_of(child))
            for child in node.children
        }
        return len(contents) == 1 < len(node.children)

    def tree(self, skeleton: Node | int) -> Tree:
        """The tree of `skeleton`, which `seen` returned."""
        old, numbers = self._tree.schema, {leaf: i for i, leaf in enumerate(self._taken)}
        paths = dict(paths_of_leaves(skeleton, segment(self._tree.key)))
        leaves = [
            (paths[n], old.kinds[i], old.dtypes[i], old.shapes[i], numbers.get(old.aliases[i], -1))
            for n, i in enumerate(self._taken)
        ]
        contents = [self._tree.contents[i] for i in self._taken]
        own = replace(self._tree, schema=schema_of(skeleton, leaves), contents=contents)
        return self.with_streams(own, self._new)

    def with_streams(self, own: Tree, leaves: Sequence[int]) -> Tree:
        """`own` with new streams of the generators at `leaves`, from what all ranks had."""
        if not leaves:
            return own
        states = b"".join(content.inline or content.ids for content in self._tree.contents)
        seed = (int.from_bytes(digest(states)[:8]) + self._viewer.rank) % 2**63
        return replace(own, streams=NewStreams(seed, frozenset(leaves)))
