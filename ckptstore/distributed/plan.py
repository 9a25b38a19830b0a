"""Which rank hashes and writes which chunks? Decided by the coordinator, without reading content.
Pure.

A leaf that ranks divide, or whose replicas are known, is planned at once: one rank writes each
chunk, and load is balanced by bytes. A leaf whose replication is unknown is *reported* first
(`decide`): each rank reports its content, and equal content becomes one leaf.

Leaves with equal holdings, as in the layers of a model, share their plan. Only the load decides
leaf by leaf.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptstore.core import geometry
from ckptstore.core.geometry import Grid, byte_ranges, grid, within
from ckptstore.core.model import INLINE_BYTES, Box
from ckptstore.distributed.merge import Holder, MergedLeaf, MergedTree
from ckptstore.distributed.tiling import Cell, Span, Tiling, misfit, tile
from ckptstore.errors import Conflict
from ckptstore.repository.memory_budget import WINDOW_BYTES

# A model repeats its shapes, so tilings are cached.
_grid, _tile_boxes, _misfit = (
    lru_cache(1 << 14)(grid),
    lru_cache(1 << 12)(tile),
    lru_cache(1 << 12)(misfit),
)


class Target(NamedTuple):
    """A leaf of the whole state: the numbers of its tree and of the leaf."""

    tree: int
    leaf: int


class Place(NamedTuple):
    """Box number `part` of a leaf on one rank. `holder` is the rank's index among the leaf's
    holders, so leaves with equal holdings share it.
    """

    rank: int
    part: int
    holder: int


class Job(NamedTuple):
    """Hash and write cells `first:stop` of a box in place; they are the leaf's chunks from `chunk`
    on.
    """

    place: Place
    first: int
    stop: int
    target: Target
    chunk: int


class Piece(NamedTuple):
    """Bytes `start:stop` of a box in place: a piece of a chunk, which fills the chunk's byte ranges
    `ranges` in order.
    """

    place: Place
    start: int
    stop: int
    ranges: Sequence[Sequence[int]]


class ChunkAssembly(NamedTuple):
    """How rank `owner` assembles chunk `chunk` of a leaf from pieces; `moved` bytes come from other
    ranks. Shared by leaves with equal holdings.
    """

    owner: Place
    chunk: int
    pieces: tuple[Piece, ...]
    moved: int


class CellJob(NamedTuple):
    """A chunk to be assembled, in window number `window` of the exchange."""

    target: Target
    assembly: ChunkAssembly
    window: int


class Shared(NamedTuple):
    """Box number `box` of a leaf, of `cells` cells, held by the rank at `place` and by others. All
    of it is to be compared, or a sample.
    """

    target: Target
    box: int
    place: Place
    cells: int
    all: bool


@dataclass(frozen=True, slots=True)
class Tiled:
    """A leaf whose chunks are planned: `boxes` tile it, and `holders` lists the ranks of each box;
    those of one mesh write it. `replicas` are boxes on other meshes, by number. Leaves with equal
    holdings share one object.
    """

    boxes: tuple[Box, ...]
    tiling: Tiling
    holders: tuple[tuple[Place, ...], ...]
    replicas: tuple[tuple[int, Place], ...] = ()


@dataclass(slots=True)
class RanksPlan:
    """The coordinator's plan. Every rank that holds a `reported` leaf reports it.

    A leaf in neither `tiled` nor `reported` has no content: it is an alias, or a tensor without
    elements.
    """

    trees: list[MergedTree]
    tiled: dict[Target, Tiled] = field(default_factory=dict)
    reported: dict[Target, tuple[Place, ...]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    cells: list[CellJob] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    load: list[int] = field(default_factory=list)

    def leaf(self, target: Target) -> MergedLeaf:
        return self.trees[target.tree].leaves[target.leaf]


def plan_ranks(
    trees: Sequence[MergedTree],
    size: int,
    chunk_bytes: int,
    *,
    canonical: bool,
    window_bytes: int = WINDOW_BYTES,
) -> RanksPlan:
    """The plan for `size` ranks. At most `window_bytes` of fragments, but at least one chunk, are
    in transfer at a time.

    Raises `Conflict`, naming path and ranks, if boxes do not tile a leaf exactly once, or meshes
    divide it differently.
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
                    _place_alike(plan, first, target)
    _assign(plan, chunk_bytes, window_bytes)
    return plan


def nbytes_of(leaf: MergedLeaf) -> int:
    """Raw bytes of a tensor."""
    return geometry.nbytes_of(leaf.dtype, leaf.shape)


def _how_held(tree: MergedTree, leaf: MergedLeaf) -> object:
    """A key that is equal for leaves with equal placement: a model repeats its layers, and
    descriptions repeat their holdings.
    """
    trees = tree.trees
    holders = tuple(
        [(rank, id(trees[rank].held.get(n)), trees[rank].marks.get(n)) for rank, n in leaf.holders]
    )
    return leaf.kind, leaf.dtype, leaf.shape, holders


def _place_alike(plan: RanksPlan, first: Target, target: Target) -> None:
    """Place a leaf as `first` was placed."""
    if (tiled := plan.tiled.get(first)) is not None:
        plan.tiled[target] = tiled
    if (reported := plan.reported.get(first)) is not None:
        plan.reported[target] = reported


def _place(
    plan: RanksPlan,
    target: Target,
    tree: MergedTree,
    leaf: MergedLeaf,
    chunk_bytes: int,
    canonical: bool,
) -> None:
    divided = any(holder.leaf in tree.trees[holder.rank].held for holder in leaf.holders)
    marks = {tree.trees[holder.rank].marks.get(holder.leaf) for holder in leaf.holders}
    holders = leaf.holders
    if marks == {"lead"}:
        holders = holders[:1]
    if leaf.kind != "tensor":
        plan.reported[target] = _places(holders)
    elif nbytes_of(leaf) == 0:
        return
    elif "private" in marks and divided:
        raise Conflict(
            f"{leaf.path} is divided among ranks and private as well; leave it out of private="
        )
    elif divided:
        boxes = _boxes(tree, leaf)
        _check_tiles(leaf, boxes, numbered="numbered" in marks)
        if nbytes_of(leaf) <= INLINE_BYTES:
            plan.reported[target] = _places(holders)
        else:
            _tile(plan, target, tree, leaf, boxes, chunk_bytes, canonical)
    elif (
        nbytes_of(leaf) <= INLINE_BYTES
        or "private" in marks
        or (len(holders) > 1 and marks != {"replica"})
    ):
        plan.reported[target] = _places(holders)
    else:
        whole = Box((0,) * len(leaf.shape), leaf.shape)
        tiling = _tile_boxes(leaf.shape, geometry.width_of(leaf.dtype), chunk_bytes, (whole,))
        plan.tiled[target] = Tiled((whole,), tiling, (_places(holders),))


def _places(holders: Sequence[Holder]) -> tuple[Place, ...]:
    return tuple(Place(holder.rank, 0, i) for i, holder in enumerate(holders))


def _boxes(tree: MergedTree, leaf: MergedLeaf) -> dict[object, dict[Box, list[Place]]]:
    """The ranks that hold each box, mesh by mesh. A rank that holds the leaf whole counts as a mesh
    of its own.
    """
    by_mesh: dict[object, dict[Box, list[Place]]] = {}
    whole = Box((0,) * len(leaf.shape), leaf.shape)
    for i, (rank, number) in enumerate(leaf.holders):
        held = tree.trees[rank].held.get(number)
        boxes = (whole,) if held is None else held.boxes
        mesh = "whole" if held is None else held.mesh
        for part, box in enumerate(boxes):
            by_mesh.setdefault(mesh, {}).setdefault(box, []).append(Place(rank, part, i))
    return by_mesh


def _check_tiles(
    leaf: MergedLeaf, by_mesh: Mapping[object, Mapping[Box, Sequence[Place]]], *, numbered: bool
) -> None:
    groups = " and ".join(f"ranks {_ranks(boxes.values())}" for boxes in by_mesh.values())
    if numbered and len(by_mesh) > 1:
        # Also if the bytes are equal: at step 0 all optimizer moments are.
        raise Conflict(
            f"{leaf.path} is named by a number that several meshes give to parameters of theirs: "
            f"{groups}. Put the modules whose "
            "parameters the optimizer has into the application state: then its state is named as "
            "they are"
        )
    if len({tuple(sorted(boxes)) for boxes in by_mesh.values()}) > 1:
        raise Conflict(
            f"{leaf.path} is divided by several meshes in different ways: {groups}. "
            "If these are different tensors (pipeline stages, say), give them different paths: "
            "key optimizer state by parameter name, "
            f"or name the stage in the application state's key"
        )
    boxes = next(iter(by_mesh.values()), {})
    if problem := _misfit(leaf.shape, tuple(sorted(boxes))):
        raise Conflict(
            f"{leaf.path} with shape {list(leaf.shape)} is not held exactly once by ranks "
            f"{_ranks(boxes.values())}: {problem}; "
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
    # Replicas on several meshes are compared chunk by chunk, so no chunk may lie in two boxes.
    tiling = _tile_boxes(
        leaf.shape,
        geometry.width_of(leaf.dtype),
        chunk_bytes,
        boxes,
        canonical=canonical and not others,
    )
    plan.tiled[target] = Tiled(
        boxes,
        tiling,
        tuple(tuple(first[box]) for box in boxes),
        tuple((i, place) for held in others for i, box in enumerate(boxes) for place in held[box]),
    )


def _assign(plan: RanksPlan, chunk_bytes: int, window_bytes: int) -> None:
    """Assign the chunks of all tiled leaves to ranks: chunks of one holder first, then shared ones,
    large leaves first.
    """
    spans = [
        (target, tiled, span) for target, tiled in plan.tiled.items() for span in tiled.tiling.spans
    ]
    for target, tiled, span in spans:
        if len(tiled.holders[span.box]) == 1:
            cells = _cells(plan, target, tiled.boxes[span.box], chunk_bytes)
            nbytes = cells.span(span.stop - 1)[1] - cells.span(span.first)[0]
            _give(
                plan,
                Job(tiled.holders[span.box][0], span.first, span.stop, target, span.chunk),
                nbytes,
            )
    _assign_cells(plan, chunk_bytes, window_bytes)
    for target, tiled, span in sorted(spans, key=lambda item: -nbytes_of(plan.leaf(item[0]))):
        if len(tiled.holders[span.box]) > 1:
            _spread(
                plan,
                target,
                span,
                tiled.holders[span.box],
                _cells(plan, target, tiled.boxes[span.box], chunk_bytes),
            )
    order = {target: i for i, target in enumerate(plan.tiled)}
    plan.jobs.sort(key=lambda job: (order[job.target], job.chunk))
    for target, tiled in plan.tiled.items():
        for box, place in tiled.replicas:
            count = len(_cells(plan, target, tiled.boxes[box], chunk_bytes))
            plan.shared.append(Shared(target, box, place, count, all=True))


def _spread(
    plan: RanksPlan, target: Target, span: Span, holders: Sequence[Place], cells: Grid
) -> None:
    """Divide a span among its holders, each part to the least loaded rank."""
    step = -(-(span.stop - span.first) // len(holders))
    for start in range(span.first, span.stop, step):
        end = min(start + step, span.stop)
        place = min(holders, key=lambda each: plan.load[each.rank])
        job = Job(place, start, end, target, span.chunk + start - span.first)
        _give(plan, job, cells.span(end - 1)[1] - cells.span(start)[0])
    plan.shared.extend(Shared(target, span.box, place, len(cells), all=False) for place in holders)


def _give(plan: RanksPlan, job: Job, nbytes: int) -> None:
    plan.jobs.append(job)
    plan.load[job.place.rank] += nbytes


class _CutCell:
    """A cell that box edges cut, for leaves with equal holdings: its bytes, the ranks with the most
    of them, and the assembly for each of these.
    """

    def __init__(
        self, tiled: Tiled, cell: Cell, width: int, whole: Grid, grids: Sequence[Grid]
    ) -> None:
        self._chunk = cell.chunk
        self._pieces = [
            (
                tiled.holders[box],
                _piece(tiled.holders[box][0], whole, cell, grids[box], part, width),
            )
            for box, part in cell.fragments
        ]
        sizes = [piece.stop - piece.start for _, piece in self._pieces]
        self.nbytes = sum(sizes)
        self.able = [
            place
            for (places, _), nbytes in zip(self._pieces, sizes, strict=True)
            if nbytes == max(sizes)
            for place in places
        ]
        self._assemblies: dict[Place, ChunkAssembly] = {}

    def assembly(self, owner: Place) -> ChunkAssembly:
        if owner not in self._assemblies:
            pieces = tuple(
                piece._replace(place=_nearest(places, owner.rank)) for places, piece in self._pieces
            )
            moved = sum(
                piece.stop - piece.start for piece in pieces if piece.place.rank != owner.rank
            )
            self._assemblies[owner] = ChunkAssembly(owner, self._chunk, pieces, moved)
        return self._assemblies[owner]


def _piece(place: Place, whole: Grid, cell: Cell, held: Grid, number: int, width: int) -> Piece:
    start, stop = held.span(number)
    if len(cell.fragments) == 1:
        return Piece(place, start, stop, ((0, stop - start),))
    # Most fragments are contiguous; columns of a small leaf are not.
    chunk = whole.cell(cell.chunk)
    ranges = byte_ranges(chunk.lengths, within(held.cell(number), chunk), width)
    return Piece(place, start, stop, tuple(ranges))


def _assign_cells(plan: RanksPlan, chunk_bytes: int, window_bytes: int) -> None:
    on_the_way = window = 0
    cut: dict[int, list[_CutCell]] = {}
    for target, tiled in plan.tiled.items():
        if id(tiled) not in cut:
            held = tiled.boxes if tiled.tiling.cells else ()
            grids = [_cells(plan, target, box, chunk_bytes) for box in held]
            whole = _cells(plan, target, None, chunk_bytes)
            width = geometry.width_of(plan.leaf(target).dtype)
            cut[id(tiled)] = [
                _CutCell(tiled, cell, width, whole, grids) for cell in tiled.tiling.cells
            ]
        for cell in cut[id(tiled)]:
            assembly = cell.assembly(min(cell.able, key=lambda place: plan.load[place.rank]))
            if on_the_way + assembly.moved > window_bytes:
                window, on_the_way = window + 1, 0
            on_the_way += assembly.moved
            plan.load[assembly.owner.rank] += cell.nbytes
            plan.cells.append(CellJob(target, assembly, window))


def _nearest(places: Sequence[Place], rank: int) -> Place:
    if len(places) == 1:
        return places[0]
    return next((place for place in places if place.rank == rank), places[0])


def _cells(plan: RanksPlan, target: Target, box: Box | None, chunk_bytes: int) -> Grid:
    leaf = plan.leaf(target)
    return _grid(leaf.shape, geometry.width_of(leaf.dtype), chunk_bytes, box)
