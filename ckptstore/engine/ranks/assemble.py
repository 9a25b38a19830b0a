"""The contents of a state's leaves, and its layout, from what the ranks have written. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckptstore.core import dtypes
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import LeafContent
from ckptstore.engine.publish import TreeContent
from ckptstore.engine.ranks.decide import Decided
from ckptstore.engine.ranks.merge import MergedLeaf, MergedTree, finish
from ckptstore.engine.ranks.plan import Place, RanksPlan, Shared, Target, Tiled, nbytes_of
from ckptstore.errors import Conflict
from ckptstore.objects import canonical

_EMPTY = LeafContent(inline=b"")


class Receipt(NamedTuple):
    """The ids of the chunks that a rank wrote: of its jobs, of the cells that it completed, and of what was decided by content."""

    jobs: bytes
    cells: bytes
    decided: bytes


class Sighting(NamedTuple):
    """The id of cell `cell` of a shared box as a rank has it that did not write it."""

    shared: Shared
    cell: int
    id: bytes


def assemble(plan: RanksPlan, decided: Decided, receipts: Sequence[Receipt], sightings: Sequence[Sighting]) -> list[TreeContent]:
    """Every tree of the whole state. Raises `Conflict` for replicas that differ, and for content that changed while it was committed."""
    ids = _tiled_ids(plan, receipts)
    for rank, (receipt, wanted) in enumerate(zip(receipts, decided.wanted, strict=True)):
        if receipt.decided != b"".join(wanted):
            raise Conflict(f"rank {rank} changed its state while it was committed; commit between steps")
    _compare(plan, decided, ids, sightings)
    return [_tree(plan, number, tree, decided, ids) for number, tree in enumerate(plan.trees)]


def logical_bytes(trees: Sequence[TreeContent]) -> int:
    """Raw bytes of the whole state, an alias' not counted."""
    total = 0
    for _, schema, contents in trees:
        for kind, dtype, shape, alias, content in zip(schema.kinds, schema.dtypes, schema.shapes, schema.aliases, contents, strict=True):
            if alias < 0:
                total += dtypes.nbytes_of(dtype, shape) if kind == "tensor" else content.raw_bytes
    return total


def layout_of(plan: RanksPlan, size: int) -> bytes:
    """The layout chunk (docs/format.md §7): mesh, placements, boxes and who held them, of every leaf that more than one rank had."""
    return canonical.encode({"world": size, "trees": {tree.key: dict(_tree_layout(plan, t, tree)) for t, tree in enumerate(plan.trees)}})


def _tiled_ids(plan: RanksPlan, receipts: Sequence[Receipt]) -> dict[Target, bytearray]:
    ids = {target: bytearray(CHUNK_ID_BYTES * tiled.tiling.chunks) for target, tiled in plan.tiled.items()}
    at = [0] * len(receipts)
    for job in plan.jobs:
        rank, count = job.place.rank, job.stop - job.first
        ids[job.target][job.chunk * CHUNK_ID_BYTES : (job.chunk + count) * CHUNK_ID_BYTES] = receipts[rank].jobs[
            at[rank] : at[rank] + count * CHUNK_ID_BYTES
        ]
        at[rank] += count * CHUNK_ID_BYTES
    at = [0] * len(receipts)
    for target, recipe, _ in plan.cells:
        rank, chunk = recipe.owner.rank, recipe.chunk
        found = receipts[rank].cells[at[rank] : at[rank] + CHUNK_ID_BYTES]
        ids[target][chunk * CHUNK_ID_BYTES : (chunk + 1) * CHUNK_ID_BYTES] = found
        at[rank] += CHUNK_ID_BYTES
    return ids


def _compare(plan: RanksPlan, decided: Decided, ids: dict[Target, bytearray], sightings: Sequence[Sighting]) -> None:
    """Hold what replicas have against what was written for them."""
    for (target, box, place, _), cell, chunk in sightings:
        number = _chunk_of(plan.tiled[target], box, cell)
        if number is not None and ids[target][number * CHUNK_ID_BYTES : (number + 1) * CHUNK_ID_BYTES] != chunk:
            _diverged(plan, target, place.rank)
    for target, found in decided.compared.items():
        tiled = plan.tiled[target]
        for place, joined in found.items():
            wanted = b"".join(bytes(_box_ids(tiled, ids[target], box)) for box in _boxes_of(plan, target, place))
            if wanted != joined:
                _diverged(plan, target, place.rank)


def _boxes_of(plan: RanksPlan, target: Target, place: Place) -> list[int]:
    """The numbers of the boxes that a rank holds of a leaf, in its order."""
    tree, tiled = plan.trees[target.tree], plan.tiled[target]
    holding = tree.trees[place.rank].held.get(plan.leaf(target).holders[place.holder].leaf)
    return list(range(len(tiled.boxes))) if holding is None else [tiled.boxes.index(box) for box in holding.boxes]


def _box_ids(tiled: Tiled, ids: bytearray, box: int) -> bytearray:
    span = next(span for span in tiled.tiling.spans if span.box == box)
    return ids[span.chunk * CHUNK_ID_BYTES : (span.chunk + span.stop - span.first) * CHUNK_ID_BYTES]


def _chunk_of(tiled: Tiled, box: int, cell: int) -> int | None:
    """The chunk that a box's cell is; None for one that edges cut."""
    return next((s.chunk + cell - s.first for s in tiled.tiling.spans if s.box == box and s.first <= cell < s.stop), None)


def _diverged(plan: RanksPlan, target: Target, rank: int) -> None:
    leaf = plan.leaf(target)
    ranks = [holder.rank for holder in leaf.holders]
    raise Conflict(
        f"{leaf.path} is one tensor on ranks {ranks}, but rank {rank} has other bytes than the rank that writes them. Replicas that have "
        f"diverged must be made equal first; different tensors need different paths (key optimizer state by parameter name), or private=[…]"
    )


def _tree(plan: RanksPlan, number: int, tree: MergedTree, decided: Decided, ids: dict[Target, bytearray]) -> TreeContent:
    private = frozenset(target.leaf for target in decided.private if target.tree == number)
    if (number, private) not in plan.finished:
        plan.finished[number, private] = finish(tree, private)
    schema, leaves = plan.finished[number, private]
    contents = []
    for (i, rank), alias in zip(leaves, schema.aliases, strict=True):
        target = Target(number, i)
        if alias >= 0:
            contents.append(_EMPTY)
        elif target in plan.tiled:
            tiled = plan.tiled[target]
            boxes = None if tiled.tiling.whole else tiled.boxes
            contents.append(LeafContent(ids=bytes(ids[target]), raw_bytes=nbytes_of(tree.leaves[i]), boxes=boxes))
        else:
            contents.append(decided.contents.get((target, rank), _EMPTY))
    return TreeContent(tree.key, schema, contents)


def _tree_layout(plan: RanksPlan, number: int, tree: MergedTree) -> Iterator[tuple[str, dict[str, Any]]]:
    known: dict[int, dict[str, Any]] = {}  # by the identity of what leaves that are held alike have in common
    for i, leaf in enumerate(tree.leaves):
        tiled = plan.tiled.get(Target(number, i))
        if leaf.alias >= 0 or _is_whole_on_one(tree, leaf):
            continue
        if tiled is None:
            yield leaf.path, _leaf_layout(tree, leaf, None)
        else:
            if id(tiled) not in known:
                known[id(tiled)] = _leaf_layout(tree, leaf, tiled)
            yield leaf.path, known[id(tiled)]


def _is_whole_on_one(tree: MergedTree, leaf: MergedLeaf) -> bool:
    return len(leaf.holders) == 1 and leaf.holders[0].leaf not in tree.trees[leaf.holders[0].rank].held


def _leaf_layout(tree: MergedTree, leaf: MergedLeaf, tiled: Tiled | None) -> dict[str, Any]:
    held = (tree.trees[rank].held.get(number) for rank, number in leaf.holders)
    first = next((each for each in held if each is not None), None)
    return {
        "mesh": first.mesh and [list(first.mesh.shape), list(first.mesh.ranks)] if first else None,
        "placements": list(first.placements) if first else [],
        "boxes": [[list(box.offsets), list(box.lengths)] for box in tiled.boxes] if tiled else [],
        "ranks": [sorted({place.rank for place in places}) for places in tiled.holders] if tiled else [[rank for rank, _ in leaf.holders]],
    }
