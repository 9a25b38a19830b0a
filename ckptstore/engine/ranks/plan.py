"""Who hashes and writes which chunks of a state that many ranks hold. Decided by the coordinator, without a byte of content. Pure.

A leaf whose replicas are known, or that ranks divide, is written at once: each chunk by one rank, the load even by bytes. A leaf that ranks
hold for reasons unknown is *reported* first (`decide`): each rank says what it has, and what is equal is one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptstore.core import dtypes
from ckptstore.core.geometry import Grid, grid
from ckptstore.core.model import INLINE_BYTES, Box
from ckptstore.engine.ranks.merge import Finished, Holder, MergedLeaf, MergedTree
from ckptstore.engine.ranks.tiling import Cell, Fragment, Span, Tiling, misfit, tile
from ckptstore.errors import Conflict

# A model repeats its shapes: what was cut once need not be cut again.
_grid, _tile_boxes, _misfit = lru_cache(1 << 14)(grid), lru_cache(1 << 12)(tile), lru_cache(1 << 12)(misfit)

WINDOW_BYTES = 64 << 20
"""So many bytes of fragments are on their way at a time."""


class Target(NamedTuple):
    """A leaf of the whole state: numbers of its tree and of itself."""

    tree: int
    leaf: int


class Place(NamedTuple):
    """Box number `part` of a leaf on one rank: the leaf's key and its number there."""

    rank: int
    key: str
    leaf: int
    part: int


class Job(NamedTuple):
    """Cells `first:stop` of a box, to be hashed and written where they are; they are the leaf's chunks from `chunk` on."""

    place: Place
    first: int
    stop: int
    target: Target
    chunk: int


class FragmentPlan(NamedTuple):
    """Cell `cell` of a box, which is `box` of the leaf, on its way to the rank that completes a chunk."""

    place: Place
    cell: int
    box: Box


class CellJob(NamedTuple):
    """A chunk that rank `owner` puts together from fragments, in window number `window` of the exchange."""

    owner: Place
    target: Target
    chunk: int
    fragments: tuple[FragmentPlan, ...]
    window: int


@dataclass(frozen=True, slots=True)
class Tiled:
    """A leaf whose chunks are planned: `boxes` tile it, `holders` have each of them, the first mesh's before others'."""

    boxes: tuple[Box, ...]
    tiling: Tiling
    holders: tuple[tuple[Place, ...], ...]


@dataclass(slots=True)
class RanksPlan:
    """The coordinator's plan. `reports` and `shared` are by rank: leaves to report, and boxes that others have as well.

    What is in neither `tiled` nor `reported` has no content: an alias, a tensor without elements.
    """

    trees: list[MergedTree]
    tiled: dict[Target, Tiled] = field(default_factory=dict)
    reported: dict[Target, tuple[Place, ...]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    cells: list[CellJob] = field(default_factory=list)
    shared: list[tuple[Place, int]] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    exchanged_bytes: int = 0
    finished: dict[tuple[int, frozenset[int]], Finished] = field(default_factory=dict)
    """Trees as they are when certain leaves have turned out to be private, by number."""


def plan_ranks(trees: Sequence[MergedTree], size: int, chunk_bytes: int, *, canonical: bool) -> RanksPlan:
    """The plan for `size` ranks.

    Raises `Conflict`, naming path and ranks, for boxes that do not tile a leaf exactly once, and for meshes that divide it differently.
    """
    plan = RanksPlan(list(trees), load=[0] * size)
    alike: dict[object, Target] = {}
    for t, tree in enumerate(trees):
        for i, leaf in enumerate(tree.leaves):
            if leaf.alias < 0:
                target = Target(t, i)
                first = alike.setdefault(_how_held(tree, leaf), target)
                if first == target:
                    _place(plan, target, tree, leaf, chunk_bytes, canonical)
                else:
                    _place_alike(plan, first, target, tree.key, leaf)
    _assign(plan, chunk_bytes)
    return plan


def nbytes_of(leaf: MergedLeaf) -> int:
    """Raw bytes of a tensor."""
    return dtypes.nbytes_of(leaf.dtype, leaf.shape)


def _how_held(tree: MergedTree, leaf: MergedLeaf) -> object:
    """Equal for leaves that are placed alike: a model repeats its layers, and descriptions their holdings."""
    holders = [(tree.trees[rank], rank, number) for rank, number in leaf.holders]
    return leaf.kind, leaf.dtype, leaf.shape, tuple([(rank, id(each.held.get(n)), each.marks.get(n)) for each, rank, n in holders])


def _place_alike(plan: RanksPlan, first: Target, target: Target, key: str, leaf: MergedLeaf) -> None:
    """Place a leaf as `first` was."""
    numbers = dict(leaf.holders)

    def own(places: Sequence[Place]) -> tuple[Place, ...]:
        return tuple([Place(rank, key, numbers[rank], part) for rank, _, _, part in places])

    if (tiled := plan.tiled.get(first)) is not None:
        plan.tiled[target] = Tiled(tiled.boxes, tiled.tiling, tuple([own(places) for places in tiled.holders]))
    if (reported := plan.reported.get(first)) is not None:
        plan.reported[target] = own(reported)


def _place(plan: RanksPlan, target: Target, tree: MergedTree, leaf: MergedLeaf, chunk_bytes: int, canonical: bool) -> None:
    divided = any(holder.leaf in tree.trees[holder.rank].held for holder in leaf.holders)
    marks = {tree.trees[holder.rank].marks.get(holder.leaf) for holder in leaf.holders}
    holders = leaf.holders
    if marks == {"lead"}:
        holders = holders[:1]
    if leaf.kind != "tensor":
        plan.reported[target] = _places(tree, holders)
    elif nbytes_of(leaf) == 0:
        return
    elif "private" in marks and divided:
        raise Conflict(f"{leaf.path} is divided among ranks and private as well; leave it out of private=")
    elif divided:
        boxes = _boxes(tree, leaf)
        _check_tiles(leaf, boxes, numbered="numbered" in marks)
        if nbytes_of(leaf) <= INLINE_BYTES:
            plan.reported[target] = _places(tree, holders)
        else:
            _tile(plan, target, tree, leaf, boxes, chunk_bytes, canonical)
    elif nbytes_of(leaf) <= INLINE_BYTES or "private" in marks or (len(holders) > 1 and marks != {"replica"}):
        plan.reported[target] = _places(tree, holders)
    else:
        whole = Box((0,) * len(leaf.shape), leaf.shape)
        tiling = _tile_boxes(leaf.shape, dtypes.width_of(leaf.dtype), chunk_bytes, (whole,))
        plan.tiled[target] = Tiled((whole,), tiling, (_places(tree, holders),))


def _places(tree: MergedTree, holders: Sequence[Holder]) -> tuple[Place, ...]:
    return tuple(Place(holder.rank, tree.key, holder.leaf, 0) for holder in holders)


def _boxes(tree: MergedTree, leaf: MergedLeaf) -> dict[object, dict[Box, list[Place]]]:
    """Who holds which box, mesh by mesh; a rank that holds the leaf whole is a mesh of its own kind."""
    by_mesh: dict[object, dict[Box, list[Place]]] = {}
    whole = Box((0,) * len(leaf.shape), leaf.shape)
    for rank, number in leaf.holders:
        held = tree.trees[rank].held.get(number)
        boxes = (whole,) if held is None else held.boxes
        mesh = "whole" if held is None else held.mesh
        for part, box in enumerate(boxes):
            by_mesh.setdefault(mesh, {}).setdefault(box, []).append(Place(rank, tree.key, number, part))
    return by_mesh


def _check_tiles(leaf: MergedLeaf, by_mesh: Mapping[object, Mapping[Box, Sequence[Place]]], *, numbered: bool) -> None:
    groups = " and ".join(f"ranks {_ranks(boxes.values())}" for boxes in by_mesh.values())
    if numbered and len(by_mesh) > 1:
        # Even if the bytes are equal: at step 0 the moments of all parameters are.
        raise Conflict(
            f"{leaf.path} is named by a number that several meshes give to parameters of theirs: {groups}. Put the modules whose "
            f"parameters the optimizer has into the application state: then its state is named as they are"
        )
    if len({tuple(sorted(boxes)) for boxes in by_mesh.values()}) > 1:
        raise Conflict(
            f"{leaf.path} is divided by several meshes in different ways: {groups}. "
            f"If these are different tensors (pipeline stages, say), give them different paths: key optimizer state by parameter name, "
            f"or name the stage in the application state's key"
        )
    boxes = next(iter(by_mesh.values()), {})
    if problem := _misfit(leaf.shape, tuple(sorted(boxes))):
        raise Conflict(
            f"{leaf.path} with shape {list(leaf.shape)} is not held exactly once by ranks {_ranks(boxes.values())}: {problem}; "
            f"every rank that holds a part must call commit, with a process_group of all of them"
        )


def _ranks(places: Iterable[Sequence[Place]]) -> list[int]:
    return sorted({place.rank for group in places for place in group})


def _tile(
    plan: RanksPlan,
    target: Target,
    tree: MergedTree,
    leaf: MergedLeaf,
    by_mesh: Mapping[object, Mapping[Box, Sequence[Place]]],
    chunk_bytes: int,
    canonical: bool,
) -> None:
    first, *others = by_mesh.values()
    boxes = tuple(sorted(first))
    # What several meshes hold must be compared, chunk by chunk: then no chunk may lie in two boxes.
    tiling = _tile_boxes(leaf.shape, dtypes.width_of(leaf.dtype), chunk_bytes, boxes, canonical=canonical and not others)
    plan.tiled[target] = Tiled(boxes, tiling, tuple(tuple(first[box]) for box in boxes))
    if others:
        plan.reported[target] = tuple({place[:3]: place for held in others for places in held.values() for place in places}.values())


def _assign(plan: RanksPlan, chunk_bytes: int) -> None:
    """Spread the chunks of all tiled leaves: what only one rank has first, then what several have, large leaves first."""
    spans = [(target, tiled, span) for target, tiled in plan.tiled.items() for span in tiled.tiling.spans]
    for target, tiled, span in spans:
        if len(tiled.holders[span.box]) == 1:
            cells = _cells(plan, target, tiled.boxes[span.box], chunk_bytes)
            nbytes = cells.span(span.stop - 1)[1] - cells.span(span.first)[0]
            _give(plan, Job(tiled.holders[span.box][0], span.first, span.stop, target, span.chunk), nbytes)
    _assign_cells(plan, chunk_bytes)
    for target, tiled, span in sorted(spans, key=lambda item: -nbytes_of(_leaf(plan, item[0]))):
        if len(tiled.holders[span.box]) > 1:
            _spread(plan, target, span, tiled.holders[span.box], _cells(plan, target, tiled.boxes[span.box], chunk_bytes))
    order = {target: i for i, target in enumerate(plan.tiled)}
    plan.jobs.sort(key=lambda job: (order[job.target], job.chunk))


def _spread(plan: RanksPlan, target: Target, span: Span, holders: Sequence[Place], cells: Grid) -> None:
    """Divide a span among those who have it, each part to the one with the least to do."""
    step = -(-(span.stop - span.first) // len(holders))
    for start in range(span.first, span.stop, step):
        end = min(start + step, span.stop)
        place = min(holders, key=lambda each: plan.load[each.rank])
        job = Job(place, start, end, target, span.chunk + start - span.first)
        _give(plan, job, cells.span(end - 1)[1] - cells.span(start)[0])
    plan.shared.extend((place, len(cells)) for place in holders)


def _give(plan: RanksPlan, job: Job, nbytes: int) -> None:
    plan.jobs.append(job)
    plan.load[job.place.rank] += nbytes


class _CutCell(NamedTuple):
    """A cell that edges cut: its fragments with their boxes and bytes, and the bytes of the largest."""

    chunk: int
    fragments: tuple[tuple[Fragment, Box, int], ...]
    largest: int
    nbytes: int


def _assign_cells(plan: RanksPlan, chunk_bytes: int) -> None:
    on_the_way = window = 0
    cut: dict[int, list[_CutCell]] = {}
    for target, tiled in plan.tiled.items():
        if id(tiled.tiling) not in cut:
            cut[id(tiled.tiling)] = [_cut_cell(plan, target, tiled, cell, chunk_bytes) for cell in tiled.tiling.cells]
        for chunk, parts, largest, nbytes in cut[id(tiled.tiling)]:
            able = [place for fragment, _, size in parts if size == largest for place in tiled.holders[fragment.box]]
            owner = min(able, key=lambda place: plan.load[place.rank])
            fragments = tuple(
                [FragmentPlan(_nearest(tiled.holders[fragment.box], owner.rank), fragment.cell, box) for fragment, box, _ in parts]
            )
            moved = sum([n for (_, _, n), fragment in zip(parts, fragments, strict=True) if fragment.place.rank != owner.rank])
            if on_the_way + moved > WINDOW_BYTES:
                window, on_the_way = window + 1, 0
            on_the_way += moved
            plan.exchanged_bytes += moved
            plan.load[owner.rank] += nbytes
            plan.cells.append(CellJob(owner, target, chunk, fragments, window))


def _cut_cell(plan: RanksPlan, target: Target, tiled: Tiled, cell: Cell, chunk_bytes: int) -> _CutCell:
    parts = []
    for fragment in cell.fragments:
        cells = _cells(plan, target, tiled.boxes[fragment.box], chunk_bytes)
        start, stop = cells.span(fragment.cell)
        parts.append((fragment, cells.cell(fragment.cell), stop - start))
    sizes = [nbytes for _, _, nbytes in parts]
    return _CutCell(cell.chunk, tuple(parts), max(sizes), sum(sizes))


def _nearest(places: Sequence[Place], rank: int) -> Place:
    if len(places) == 1:
        return places[0]
    return next((place for place in places if place.rank == rank), places[0])


def _cells(plan: RanksPlan, target: Target, box: Box, chunk_bytes: int) -> Grid:
    leaf = _leaf(plan, target)
    return _grid(leaf.shape, dtypes.width_of(leaf.dtype), chunk_bytes, box)


def _leaf(plan: RanksPlan, target: Target) -> MergedLeaf:
    return plan.trees[target.tree].leaves[target.leaf]
