"""Which rank hashes and writes which chunks? Decided by the coordinator, without reading content.
Pure.

A leaf that ranks divide, or whose replicas are known, is planned at once: one rank writes each
chunk, and load is balanced by bytes. A leaf whose replication is unknown is *reported* first
(`decide`): each rank reports its content, and equal content becomes one leaf.

Leaves with equal holdings, as in the layers of a model, share their plan (`Alike`): nothing is kept
for each rank and each leaf. Only the load decides leaf by leaf.
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
from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import INLINE_BYTES, Box
from ckptstore.core.tiling import Cell, Span, Tiling, misfit, tile
from ckptstore.distributed.merge import Holder, MergedLeaf, MergedTree, SameHolders, Ways
from ckptstore.errors import Conflict
from ckptstore.repository.memory_budget import WINDOW_BYTES
from ckptstore.state.leaf_sources import Holding

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


class Share(NamedTuple):
    """Cells `first:stop` of a box in place: of a leaf, those are its chunks from `chunk` on."""

    place: RankBox
    first: int
    stop: int
    chunk: int


@dataclass(slots=True)
class CutChunk:
    """Chunk `chunk` of each of some leaves with equal holdings, which box edges cut. For the leaf
    number `i` of these, it is assembled as `assemblies[how[i]]` says, in window `windows[i]` of the
    exchange."""

    chunk: int
    assemblies: list[ChunkAssembly] = field(default_factory=list)
    how: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


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
class Alike:
    """Leaves with equal holdings, `targets`, and what is planned for each of them: who writes what
    one rank has alone, the chunks that box edges cut, boxes that are on several ranks, of which a
    sample is compared (`shared`), or all (`replicas`)."""

    tiled: Tiled
    targets: list[Target] = field(default_factory=list)
    own: list[Share] = field(default_factory=list)
    cut: list[CutChunk] = field(default_factory=list)
    shared: list[Share] = field(default_factory=list)
    replicas: list[Share] = field(default_factory=list)


@dataclass(slots=True)
class RanksPlan:
    """The coordinator's plan. Every rank that holds a `reported` leaf reports it.

    The chunks of all leaves in `alike` are numbered: those of a leaf from `numbers` on. What the
    load decides leaf by leaf is in `jobs`.

    A leaf in neither `alike` nor `reported` has no content: it is an alias, or a tensor without
    elements.
    """

    trees: list[MergedTree]
    alike: dict[Tiled, Alike] = field(default_factory=dict)
    tiled: dict[Target, Tiled] = field(default_factory=dict)
    numbers: dict[Target, int] = field(default_factory=dict)
    chunks: int = 0
    reported: dict[Target, tuple[RankBox, ...]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    load: list[int] = field(default_factory=list)

    def leaf(self, target: Target) -> MergedLeaf:
        return self.trees[target.tree].leaves[target.leaf]

    def tile(self, target: Target, tiled: Tiled) -> Alike:
        """Plan the chunks of a leaf; returns the leaves with equal holdings."""
        self.tiled[target], self.numbers[target] = tiled, self.chunks
        self.chunks += tiled.tiling.chunks
        alike = self.alike.setdefault(tiled, Alike(tiled))
        alike.targets.append(target)
        return alike


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
    plan = RanksPlan(list(trees))
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
    plan.load = _assign(plan, size, chunk_bytes, window_bytes)
    return plan


def nbytes_of(leaf: MergedLeaf) -> int:
    """Raw bytes of a tensor."""
    return geometry.nbytes_of(leaf.dtype, leaf.shape)


def _ways(tree: MergedTree) -> Iterator[object]:
    """A key for each leaf of a tree, equal for leaves that the same ranks hold alike: a model
    repeats its layers.
    """
    ranks = tuple(tree.trees)
    known = IdentityDict[Ways, int]()
    of_ranks = {rank: known.setdefault(own.ways, len(known)) for rank, own in tree.trees.items()}
    distinct = [ways.codes for ways, _ in known.items()]
    same = ranks, np.array([*of_ranks.values()] if len(distinct) > 1 else []).tobytes()
    for leaf in tree.leaves:
        if isinstance(leaf.holders, SameHolders) and leaf.holders.ranks == ranks:
            yield same, tuple([codes[leaf.holders.leaf] for codes in distinct])
        else:
            held = leaf.holders
            yield (
                tuple(rank for rank, _ in held),
                np.array([tree.trees[rank].ways.codes[number] for rank, number in held]).tobytes(),
            )


def _placed(
    tree: MergedTree, leaf: MergedLeaf, chunk_bytes: int, canonical: bool
) -> Tiled | tuple[RankBox, ...] | None:
    """The plan for the chunks of a leaf, or the places that report it, or None for a tensor without
    elements.
    """
    divided = any(tree.trees[rank].holding(number) for rank, number in leaf.holders)
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
    whole = Holding(None, (), (Box.whole(leaf.shape),))
    numbers: dict[object, int] = {}
    known = IdentityDict[object, int]()  # a mesh of many ranks is slow to hash
    for i, (rank, number) in enumerate(leaf.holders):
        held = tree.trees[rank].holding(number)
        mesh = "whole" if held is None else held.mesh
        if mesh not in known:
            known[mesh] = numbers.setdefault(mesh, len(numbers))
        boxes = by_mesh.setdefault(known[mesh], {})
        for part, box in enumerate((held or whole).boxes):
            boxes.setdefault(box, []).append(RankBox(rank, part, i))
    return {mesh: boxes for mesh, boxes in by_mesh.items() if boxes}


def _check_tiles(
    leaf: MergedLeaf, by_mesh: Mapping[object, Mapping[Box, Sequence[RankBox]]], *, numbered: bool
) -> None:
    def groups() -> str:
        return " and ".join(f"ranks {_ranks(boxes.values())}" for boxes in by_mesh.values())

    if numbered and len(by_mesh) > 1:
        # Also if the bytes are equal: at step 0 all optimizer moments are.
        raise Conflict(
            f"{leaf.path} is named by a number that several meshes give to parameters of theirs: "
            f"{groups()}. Put the modules whose "
            "parameters the optimizer has into the application state: then its state is named as "
            "they are"
        )
    if len({tuple(sorted(boxes)) for boxes in by_mesh.values()}) > 1:
        raise Conflict(
            f"{leaf.path} is divided by several meshes in different ways: {groups()}. "
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


class _Spread(NamedTuple):
    """A span of the chunks of leaves with equal holdings that several ranks have: `ranks` are those
    of its holders."""

    span: Span
    held: HeldBox
    grid: Grid
    ranks: NDArray[np.int64]


def _between(cells: Grid, first: int, stop: int) -> int:
    """Bytes of cells `first:stop`."""
    return cells.span(stop - 1)[1] - cells.span(first)[0]


def _assign(plan: RanksPlan, size: int, chunk_bytes: int, window_bytes: int) -> list[int]:
    """Assign the chunks of all tiled leaves to ranks: chunks of one holder first, then shared ones,
    large leaves first. Returns the load of each rank.
    """
    load = np.zeros(size, np.int64)
    spread: list[tuple[int, int, Target, _Spread]] = []
    for tiled, alike in plan.alike.items():
        for span in tiled.tiling.spans:
            found = _share(plan, alike, span, chunk_bytes, load)
            spread += [
                (-tiled.raw_bytes, plan.numbers[target], target, found)
                for target in (alike.targets if found else ())
                if found
            ]
    _assign_cut(plan, chunk_bytes, window_bytes, load)
    for _, number, target, found in sorted(spread, key=lambda each: each[:2]):
        _spread(plan, target, number, found, load)
    loads: list[int] = load.tolist()
    return loads


def _share(
    plan: RanksPlan, alike: Alike, span: Span, chunk_bytes: int, load: NDArray[np.int64]
) -> _Spread | None:
    """Plan a span of leaves with equal holdings; returns it if its writers are still to be
    found."""
    held = alike.tiled.boxes[span.box]
    cells = _cells(plan, alike.targets[0], held.box, chunk_bytes)
    alike.replicas += [Share(place, span.first, span.stop, span.chunk) for place in held.replicas]
    shares = [Share(place, span.first, span.stop, span.chunk) for place in held.holders]
    if len(shares) > 1:
        alike.shared += shares
        return _Spread(span, held, cells, np.array([place.rank for place in held.holders]))
    alike.own += shares
    load[held.holders[0].rank] += _between(cells, span.first, span.stop) * len(alike.targets)
    return None


def _spread(
    plan: RanksPlan, target: Target, number: int, found: _Spread, load: NDArray[np.int64]
) -> None:
    """Divide a span among its holders, each part to the least loaded rank."""
    _, first, stop, chunk = found.span
    holders = found.held.holders
    step = -(-(stop - first) // len(holders))
    loads = load[found.ranks]
    # No other holders can become the least loaded.
    some = np.argsort(loads, kind="stable")[: -(-(stop - first) // step)]
    heap = [(int(loads[i]), int(i)) for i in some]
    heapify(heap)
    for start in range(first, stop, step):
        end = min(start + step, stop)
        taken, i = heap[0]
        taken += _between(found.grid, start, end)
        plan.jobs.append(Job(target, holders[i], start, end, number + chunk + start - first))
        load[holders[i].rank] = taken
        heapreplace(heap, (taken, i))


class _CutCell:
    """A cell that box edges cut, for leaves with equal holdings: its bytes, the ranks with the most
    of them, and the assembly for each of these.
    """

    def __init__(
        self, tiled: Tiled, cell: Cell, width: int, whole: Grid, grids: Sequence[Grid]
    ) -> None:
        self.planned = CutChunk(cell.chunk)
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
        self.ranks = np.array([place.rank for place in self.able])
        self._alone: tuple[Piece, ...] = ()
        if all(len(places) == 1 for places, _ in self._pieces):
            self._alone = tuple(piece for _, piece in self._pieces)
        self._known: dict[int, tuple[int, int]] = {}

    def assemble(self, able: int) -> tuple[int, int]:
        """The number of the assembly by `able[able]`, and the bytes that others send for it."""
        if able not in self._known:
            owner = self.able[able]
            pieces = self._alone or tuple(
                piece._replace(place=_nearest(places, owner.rank)) for places, piece in self._pieces
            )
            own = sum(piece.nbytes for piece in pieces if piece.place.rank == owner.rank)
            self._known[able] = len(self.planned.assemblies), self.nbytes - own
            self.planned.assemblies.append(ChunkAssembly(owner, pieces))
        return self._known[able]


def _piece(place: RankBox, whole: Grid, cell: Cell, held: Grid, number: int, width: int) -> Piece:
    start, stop = held.span(number)
    if len(cell.fragments) == 1:
        return Piece(place, start, stop, ((0, stop - start),))
    # Most fragments are contiguous; columns of a small leaf are not.
    chunk = whole.cell(cell.chunk)
    ranges = byte_ranges(chunk.lengths, within(held.cell(number), chunk), width)
    return Piece(place, start, stop, tuple(ranges))


def _assign_cut(
    plan: RanksPlan, chunk_bytes: int, window_bytes: int, load: NDArray[np.int64]
) -> None:
    """Assign each chunk that box edges cut to the least loaded of the ranks with the most of it."""
    on_the_way = window = 0
    cut: dict[Tiled, list[_CutCell]] = {}
    for target, tiled in plan.tiled.items():
        if tiled.tiling.cells and tiled not in cut:
            grids = [_cells(plan, target, held.box, chunk_bytes) for held in tiled.boxes]
            whole = _cells(plan, target, None, chunk_bytes)
            width = geometry.width_of(plan.leaf(target).dtype)
            cut[tiled] = [_CutCell(tiled, cell, width, whole, grids) for cell in tiled.tiling.cells]
            plan.alike[tiled].cut = [cell.planned for cell in cut[tiled]]
        for cell in cut.get(tiled, ()):
            able = int(load[cell.ranks].argmin())
            how, moved = cell.assemble(able)
            if on_the_way + moved > window_bytes:
                window, on_the_way = window + 1, 0
            on_the_way += moved
            load[cell.ranks[able]] += cell.nbytes
            cell.planned.how.append(how)
            cell.planned.windows.append(window)


def _nearest(places: Sequence[RankBox], rank: int) -> RankBox:
    return next((place for place in places if place.rank == rank), places[0])


def _cells(plan: RanksPlan, target: Target, box: Box | None, chunk_bytes: int) -> Grid:
    leaf = plan.leaf(target)
    return _grid(leaf.shape, geometry.width_of(leaf.dtype), chunk_bytes, box)
