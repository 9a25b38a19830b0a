"""Which rank hashes and writes which chunks? Decided by the coordinator, without reading content.
Pure.

A leaf that ranks divide, or whose replicas are known, is planned at once: one rank writes each
chunk, and load is balanced by bytes. A leaf whose replication is unknown is *reported* first
(`decide`): each rank reports its content, and equal content becomes one leaf.

Leaves with equal holdings, as in the layers of a model, share their plan. Only the load decides
leaf by leaf.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptstore.core import geometry
from ckptstore.core.geometry import Grid, byte_ranges, grid, within
from ckptstore.core.model import INLINE_BYTES, Box
from ckptstore.core.tiling import Cell, Span, Tiling, misfit, tile
from ckptstore.distributed.merge import Holder, MergedLeaf, MergedTree, SameHolders
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


class RankBox(NamedTuple):
    """Box number `part` of a leaf on one rank. `holder` is the rank's index among the leaf's
    holders, so leaves with equal holdings share it.
    """

    rank: int
    part: int
    holder: int


class Job(NamedTuple):
    """Cells `first:stop` of a box in place, to be hashed. They are the plan's chunks from `number`
    on.
    """

    target: Target
    place: RankBox
    first: int
    stop: int
    number: int


class Piece(NamedTuple):
    """Bytes `start:stop` of a box in place: a piece of a chunk, which fills the chunk's byte ranges
    `ranges` in order.
    """

    place: RankBox
    start: int
    stop: int
    ranges: Sequence[Sequence[int]]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class ChunkAssembly:
    """How rank `owner` assembles a chunk from pieces. Leaves with equal holdings share one object,
    which is its own key.
    """

    owner: RankBox
    pieces: tuple[Piece, ...]

    def by_rank(self) -> dict[int, list[Piece]]:
        """The pieces of each rank. The owner has one, since it is a rank with the most bytes."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.place.rank, []).append(piece)
        return found


class CellJob(NamedTuple):
    """Chunk `number` of the plan, which is assembled in window `window` of the exchange."""

    target: Target
    number: int
    assembly: ChunkAssembly
    window: int


class HeldBox(NamedTuple):
    """A box of a leaf. The ranks of one mesh hold it at `holders`, and one of them writes it; those
    of other meshes hold it at `replicas`.
    """

    box: Box
    holders: tuple[RankBox, ...]
    replicas: tuple[RankBox, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """A leaf of `raw_bytes` whose chunks are planned: `boxes` tile it. Leaves with equal holdings
    share one object, which is its own key.
    """

    boxes: tuple[HeldBox, ...]
    tiling: Tiling
    raw_bytes: int

    @property
    def parts(self) -> tuple[Box, ...] | None:
        """The boxes that are cut one by one; None for a leaf that is cut as if it were whole."""
        return None if self.tiling.whole else tuple(held.box for held in self.boxes)


@dataclass(slots=True)
class RanksPlan:
    """The coordinator's plan. Every rank that holds a `reported` leaf reports it.

    The chunks of all `tiled` leaves are numbered: those of a leaf from `numbers` on. Boxes of
    `shared` are on several ranks: a sample of them is compared, all those of `replicas` are.

    A leaf in neither `tiled` nor `reported` has no content: it is an alias, or a tensor without
    elements.
    """

    trees: list[MergedTree]
    tiled: dict[Target, Tiled] = field(default_factory=dict)
    numbers: dict[Target, int] = field(default_factory=dict)
    chunks: int = 0
    reported: dict[Target, tuple[RankBox, ...]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    cells: list[CellJob] = field(default_factory=list)
    shared: list[Job] = field(default_factory=list)
    replicas: list[Job] = field(default_factory=list)
    load: list[int] = field(default_factory=list)

    def leaf(self, target: Target) -> MergedLeaf:
        return self.trees[target.tree].leaves[target.leaf]

    def tile(self, target: Target, tiled: Tiled) -> None:
        """Plan the chunks of a leaf."""
        self.tiled[target], self.numbers[target] = tiled, self.chunks
        self.chunks += tiled.tiling.chunks


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
    alike: dict[object, Tiled | tuple[RankBox, ...] | None] = {}
    for t, tree in enumerate(trees):
        for i, (leaf, ways) in enumerate(zip(tree.leaves, _ways(tree), strict=True)):
            if leaf.alias < 0:
                how = leaf.kind, leaf.dtype, leaf.shape, ways
                if how not in alike:
                    alike[how] = _placed(tree, leaf, chunk_bytes, canonical)
                found, target = alike[how], Target(t, i)
                if isinstance(found, Tiled):
                    plan.tile(target, found)
                elif found is not None:
                    plan.reported[target] = found
    _assign(plan, chunk_bytes, window_bytes)
    return plan


def nbytes_of(leaf: MergedLeaf) -> int:
    """Raw bytes of a tensor."""
    return geometry.nbytes_of(leaf.dtype, leaf.shape)


def _ways(tree: MergedTree) -> Iterator[object]:
    """A key for each leaf of a tree, equal for leaves that the same ranks hold alike: a model
    repeats its layers.
    """
    ranks = tuple(tree.trees)
    same: NDArray[np.int64] | None = None
    for leaf in tree.leaves:
        if isinstance(leaf.holders, SameHolders) and leaf.holders.ranks == ranks:
            if same is None:
                same = np.array([own.ways for own in tree.trees.values()]).T.copy()
            yield ranks, same[leaf.holders.leaf].tobytes()
        else:
            held = leaf.holders
            yield (
                tuple(rank for rank, _ in held),
                np.array([tree.trees[rank].ways[number] for rank, number in held]).tobytes(),
            )


def _placed(
    tree: MergedTree, leaf: MergedLeaf, chunk_bytes: int, canonical: bool
) -> Tiled | tuple[RankBox, ...] | None:
    """The plan for the chunks of a leaf, or the places that report it, or None for a tensor without
    elements.
    """
    divided = any(holder.leaf in tree.trees[holder.rank].held for holder in leaf.holders)
    marks = {tree.trees[holder.rank].marks.get(holder.leaf) for holder in leaf.holders}
    holders = leaf.holders
    if marks == {"lead"}:
        holders = holders[:1]
    if leaf.kind != "tensor":
        return _places(holders)
    if nbytes_of(leaf) == 0:
        return None
    is_small = nbytes_of(leaf) <= INLINE_BYTES
    if divided:
        if "private" in marks:
            raise Conflict(
                f"{leaf.path} is divided among ranks and private as well; leave it out of private="
            )
        by_mesh = _boxes(tree, leaf)
        _check_tiles(leaf, by_mesh, numbered="numbered" in marks)
    elif "private" in marks or (len(holders) > 1 and marks != {"replica"}):
        return _places(holders)
    else:
        by_mesh = {None: {Box.whole(leaf.shape): list(_places(holders))}}
    return _places(holders) if is_small else _tiled(leaf, by_mesh, chunk_bytes, canonical)


def _places(holders: Sequence[Holder]) -> tuple[RankBox, ...]:
    return tuple(RankBox(holder.rank, 0, i) for i, holder in enumerate(holders))


def _boxes(tree: MergedTree, leaf: MergedLeaf) -> dict[object, dict[Box, list[RankBox]]]:
    """The ranks that hold each box, mesh by mesh. A rank that holds the leaf whole counts as a mesh
    of its own.
    """
    by_mesh: dict[object, dict[Box, list[RankBox]]] = {}
    whole = Box.whole(leaf.shape)
    for i, (rank, number) in enumerate(leaf.holders):
        held = tree.trees[rank].held.get(number)
        boxes = (whole,) if held is None else held.boxes
        mesh = "whole" if held is None else held.mesh
        for part, box in enumerate(boxes):
            by_mesh.setdefault(mesh, {}).setdefault(box, []).append(RankBox(rank, part, i))
    return by_mesh


def _check_tiles(
    leaf: MergedLeaf, by_mesh: Mapping[object, Mapping[Box, Sequence[RankBox]]], *, numbered: bool
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


def _ranks(places: Iterable[Sequence[RankBox]]) -> list[int]:
    return sorted({place.rank for group in places for place in group})


def _tiled(
    leaf: MergedLeaf,
    by_mesh: Mapping[object, Mapping[Box, Sequence[RankBox]]],
    chunk_bytes: int,
    canonical: bool,
) -> Tiled:
    first, *others = by_mesh.values()
    # Replicas on several meshes are compared chunk by chunk, so no chunk may lie in two boxes.
    tiling = _tile_boxes(
        leaf.shape,
        geometry.width_of(leaf.dtype),
        chunk_bytes,
        tuple(sorted(first)),
        canonical=canonical and not others,
    )
    boxes = [
        HeldBox(box, tuple(first[box]), tuple(place for held in others for place in held[box]))
        for box in sorted(first)
    ]
    return Tiled(tuple(boxes), tiling, nbytes_of(leaf))


class _Span(NamedTuple):
    """A span of the chunks of leaves with equal holdings, of `raw_bytes`: the box that they lie in,
    and that box's grid."""

    span: Span
    held: HeldBox
    grid: Grid
    raw_bytes: int

    def job(self, target: Target, start: int, place: RankBox, first: int, stop: int) -> Job:
        """Cells `first:stop` of a leaf whose chunks have numbers from `start` on, for the rank at
        `place`."""
        return Job(target, place, first, stop, start + self.span.chunk + first - self.span.first)


def _spans(plan: RanksPlan, target: Target, tiled: Tiled, chunk_bytes: int) -> Iterator[_Span]:
    for span in tiled.tiling.spans:
        held = tiled.boxes[span.box]
        cells = _cells(plan, target, held.box, chunk_bytes)
        yield _Span(span, held, cells, _between(cells, span.first, span.stop))


def _between(cells: Grid, first: int, stop: int) -> int:
    """Bytes of cells `first:stop`."""
    return cells.span(stop - 1)[1] - cells.span(first)[0]


def _assign(plan: RanksPlan, chunk_bytes: int, window_bytes: int) -> None:
    """Assign the chunks of all tiled leaves to ranks: chunks of one holder first, then shared ones,
    large leaves first.
    """
    spans: dict[Tiled, list[_Span]] = {}
    several: list[tuple[Target, _Span]] = []
    for target, tiled in plan.tiled.items():
        if tiled not in spans:
            spans[tiled] = list(_spans(plan, target, tiled, chunk_bytes))
        start = plan.numbers[target]
        for each in spans[tiled]:
            _, first, stop, _ = each.span
            if len(each.held.holders) == 1:
                (place,) = each.held.holders
                plan.jobs.append(each.job(target, start, place, first, stop))
                plan.load[place.rank] += each.raw_bytes
            else:
                several.append((target, each))
            for place in each.held.replicas:
                plan.replicas.append(each.job(target, start, place, first, stop))
    _assign_cells(plan, chunk_bytes, window_bytes)
    for target, each in sorted(several, key=lambda found: -nbytes_of(plan.leaf(found[0]))):
        _spread(plan, target, each)
    plan.jobs.sort(key=lambda job: job.number)


def _spread(plan: RanksPlan, target: Target, found: _Span) -> None:
    """Divide a span among its holders, each part to the least loaded rank."""
    _, first, stop, _ = found.span
    holders, numbered = found.held.holders, plan.numbers[target]
    step = -(-(stop - first) // len(holders))
    loads = [(plan.load[place.rank], number) for number, place in enumerate(holders)]
    heapify(loads)
    for start in range(first, stop, step):
        end = min(start + step, stop)
        load, number = loads[0]
        place, load = holders[number], load + _between(found.grid, start, end)
        plan.jobs.append(found.job(target, numbered, place, start, end))
        plan.load[place.rank] = load
        heapreplace(loads, (load, number))
    plan.shared.extend(found.job(target, numbered, place, first, stop) for place in holders)


class _CutCell:
    """A cell that box edges cut, for leaves with equal holdings: its bytes, the ranks with the most
    of them, and the assembly for each of these.
    """

    def __init__(
        self, tiled: Tiled, cell: Cell, width: int, whole: Grid, grids: Sequence[Grid]
    ) -> None:
        self.chunk = cell.chunk
        self._pieces = []
        for box, part in cell.fragments:
            holders = tiled.boxes[box].holders
            piece = _piece(holders[0], whole, cell, grids[box], part, width)
            self._pieces.append((holders, piece))
        most = max(piece.nbytes for _, piece in self._pieces)
        self.nbytes = sum(piece.nbytes for _, piece in self._pieces)
        self.able = [
            place for places, piece in self._pieces if piece.nbytes == most for place in places
        ]
        self._assemblies: dict[RankBox, ChunkAssembly] = {}

    def assembly(self, owner: RankBox) -> ChunkAssembly:
        if owner not in self._assemblies:
            pieces = tuple(
                piece._replace(place=_nearest(places, owner.rank)) for places, piece in self._pieces
            )
            self._assemblies[owner] = ChunkAssembly(owner, pieces)
        return self._assemblies[owner]


def _piece(place: RankBox, whole: Grid, cell: Cell, held: Grid, number: int, width: int) -> Piece:
    start, stop = held.span(number)
    if len(cell.fragments) == 1:
        return Piece(place, start, stop, ((0, stop - start),))
    # Most fragments are contiguous; columns of a small leaf are not.
    chunk = whole.cell(cell.chunk)
    ranges = byte_ranges(chunk.lengths, within(held.cell(number), chunk), width)
    return Piece(place, start, stop, tuple(ranges))


def _assign_cells(plan: RanksPlan, chunk_bytes: int, window_bytes: int) -> None:
    on_the_way = window = 0
    cut: dict[Tiled, list[_CutCell]] = {}
    for target, tiled in plan.tiled.items():
        if tiled.tiling.cells and tiled not in cut:
            grids = [_cells(plan, target, held.box, chunk_bytes) for held in tiled.boxes]
            whole = _cells(plan, target, None, chunk_bytes)
            width = geometry.width_of(plan.leaf(target).dtype)
            cut[tiled] = [_CutCell(tiled, cell, width, whole, grids) for cell in tiled.tiling.cells]
        for cell in cut.get(tiled, ()):
            assembly = cell.assembly(min(cell.able, key=lambda place: plan.load[place.rank]))
            owner = assembly.owner.rank
            moved = sum(piece.nbytes for piece in assembly.pieces if piece.place.rank != owner)
            if on_the_way + moved > window_bytes:
                window, on_the_way = window + 1, 0
            on_the_way += moved
            plan.load[owner] += cell.nbytes
            number = plan.numbers[target] + cell.chunk
            plan.cells.append(CellJob(target, number, assembly, window))


def _nearest(places: Sequence[RankBox], rank: int) -> RankBox:
    return next((place for place in places if place.rank == rank), places[0])


def _cells(plan: RanksPlan, target: Target, box: Box | None, chunk_bytes: int) -> Grid:
    leaf = plan.leaf(target)
    return _grid(leaf.shape, geometry.width_of(leaf.dtype), chunk_bytes, box)
