"""What does one rank have to do for a plan, to the byte, and how does the coordinator send it?

A task holds as long as the plan does, so a commit like the last one moves bytes and computes
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckptstore.commit.plan import Extent, is_floating
from ckptstore.core import geometry
from ckptstore.core.geometry import grid
from ckptstore.distributed.framing import damaged, pack, unpack
from ckptstore.distributed.plan import ChunkAssembly, Place, RanksPlan, Target
from ckptstore.state.leaf_sources import FlatState, Source


class LeafRef(NamedTuple):
    """A box on this rank: the numbers of its key, of the leaf and of the box."""

    tree: int
    leaf: int
    part: int


class JobTask(NamedTuple):
    """Hash and write cells `first:stop` of a box."""

    ref: LeafRef
    first: int
    stop: int


class Piece(NamedTuple):
    """Bytes `start:stop` of box `part` on `rank`: a piece of a chunk, whose byte ranges `ranges`
    they fill in order."""

    rank: int
    part: int
    start: int
    stop: int
    ranges: tuple[tuple[int, int], ...]


class Assembly(NamedTuple):
    """How to assemble a chunk. Shared by leaves with equal holdings."""

    extent: Extent
    pieces: tuple[Piece, ...]


class Outgoing(NamedTuple):
    """Bytes `start:stop` of a box to send."""

    ref: LeafRef
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Window:
    """What is in transfer at a time: pieces for each rank, to be sent as one message; the number of
    bytes from each rank; the chunks to assemble, with the numbers of key and leaf."""

    outgoing: dict[int, list[Outgoing]]
    incoming: dict[int, int]
    assemblies: list[tuple[int, int, Assembly]]


@dataclass(frozen=True, slots=True)
class RankTask:
    """The work of a rank before content is resolved. `shared` are boxes that other ranks hold as
    well, and their number of cells."""

    jobs: tuple[JobTask, ...]
    windows: tuple[Window, ...]
    reports: tuple[LeafRef, ...]
    shared: tuple[tuple[LeafRef, int], ...]
    trust_replicated: bool


class _Columns:
    """A task as a message: lists of numbers. `sends` and `cells` name a window, key and leaf, and
    the number of what to do with it."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.sendings: list[list[int]] = []
        self.sends: list[tuple[int, ...]] = []
        self.assemblies: list[list[Any]] = []
        self.cells: list[tuple[int, ...]] = []
        self.reports: list[list[int]] = []
        self.shared: list[list[int]] = []


class _Role(NamedTuple):
    """What a rank does in an assembly: entry `how` of its sendings or assemblies, for the leaves in
    `leaves`."""

    rank: int
    holder: int
    how: int
    leaves: list[tuple[int, ...]]


def encode_tasks(
    plan: RanksPlan, keys: Sequence[Sequence[str]], *, trust_replicated: bool
) -> list[bytes]:
    """The task of every rank; `keys` are each rank's keys in order."""
    trees = [
        [names.index(tree.key) if tree.key in names else -1 for tree in plan.trees]
        for names in keys
    ]
    tasks = [_Columns() for _ in keys]

    def ref(target: Target, place: Place) -> list[int]:
        return [
            trees[place.rank][target.tree],
            plan.leaf(target).holders[place.holder].leaf,
            place.part,
        ]

    for job in plan.jobs:
        tasks[job.place.rank].jobs.append([*ref(job.target, job.place), job.first, job.stop])
    roles: dict[int, list[_Role]] = {}  # by identity of the assemblies
    for target, assembly, window in plan.cells:
        leaf = plan.leaf(target)
        if id(assembly) not in roles:
            roles[id(assembly)] = list(_roles(assembly, leaf.dtype, tasks))
        for rank, holder, how, leaves in roles[id(assembly)]:
            leaves.append((window, trees[rank][target.tree], leaf.holders[holder].leaf, how))
    for target, places in plan.reported.items():
        for place in places:
            tasks[place.rank].reports.append(ref(target, place))
    for shared in plan.shared:
        tasks[shared.place.rank].shared.append([*ref(shared.target, shared.place), shared.cells])
    return [pack({**vars(task), "trust": trust_replicated}) for task in tasks]


def _roles(assembly: ChunkAssembly, dtype: str, tasks: Sequence[_Columns]) -> Iterator[_Role]:
    owner, pieces = assembly.owner, []
    for place, fragment in assembly.fragments:
        pieces.append([place.rank, place.part, fragment.start, fragment.stop, *fragment.ranges])
        if place.rank != owner.rank:
            task = tasks[place.rank]
            task.sendings.append([owner.rank, place.part, fragment.start, fragment.stop])
            yield _Role(place.rank, place.holder, len(task.sendings) - 1, task.sends)
    task = tasks[owner.rank]
    task.assemblies.append([geometry.width_of(dtype), is_floating(dtype), pieces])
    yield _Role(owner.rank, owner.holder, len(task.assemblies) - 1, task.cells)


def decode_task(data: bytes, rank: int) -> RankTask:
    """The inverse of `encode_tasks` for rank `rank`; raises `Corrupt`."""
    try:
        task = unpack(data)
        return RankTask(
            tuple(JobTask(LeafRef(*job[:3]), job[3], job[4]) for job in task["jobs"]),
            tuple(_windows(task, rank)),
            tuple(LeafRef(*report) for report in task["reports"]),
            tuple((LeafRef(*shared[:3]), shared[3]) for shared in task["shared"]),
            bool(task["trust"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"the coordinator's plan: {error!r}") from error


def _windows(task: dict[str, Any], rank: int) -> Iterator[Window]:
    assemblies = [_assembly(*each) for each in task["assemblies"]]
    arriving = [
        [(piece.rank, piece.stop - piece.start) for piece in each.pieces if piece.rank != rank]
        for each in assemblies
    ]
    windows: dict[int, Window] = {}

    def window(number: int) -> Window:
        return windows.setdefault(number, Window({}, {}, []))

    for number, tree, leaf, how in task["sends"]:
        to, part, start, stop = task["sendings"][how]
        parts = window(number).outgoing.setdefault(to, [])
        parts.append(Outgoing(LeafRef(tree, leaf, part), start, stop))
    for number, tree, leaf, how in task["cells"]:
        found = window(number)
        found.assemblies.append((tree, leaf, assemblies[how]))
        for sender, nbytes in arriving[how]:
            found.incoming[sender] = found.incoming.get(sender, 0) + nbytes
    yield from (windows[number] for number in sorted(windows))


def _assembly(width: int, floating: bool, found: Sequence[Sequence[Any]]) -> Assembly:
    pieces = tuple(
        Piece(rank, part, start, stop, tuple((first, last) for first, last in ranges))
        for rank, part, start, stop, *ranges in found
    )
    nbytes = sum(piece.stop - piece.start for piece in pieces)
    return Assembly(Extent((nbytes // width,), width, nbytes, floating), pieces)


class Boxes:
    """A rank's part of the state, box by box."""

    def __init__(self, flats: Sequence[FlatState], chunk_bytes: int) -> None:
        self._flats, self._chunk_bytes = flats, chunk_bytes

    def source(self, ref: LeafRef) -> Source:
        flat, leaf = self._resolved(ref)
        return flat.held[leaf].parts[ref.part][1] if leaf in flat.held else flat.leaves[leaf]

    def extent(self, ref: LeafRef) -> Extent:
        """The extent of a whole box."""
        flat, leaf = self._resolved(ref)
        source = self.source(ref)
        if flat.schema.kinds[leaf] != "tensor":
            return Extent((source.nbytes,), 1, source.nbytes, False)
        dtype = flat.schema.dtypes[leaf]
        box = flat.held[leaf].parts[ref.part][0] if leaf in flat.held else None
        width = geometry.width_of(dtype)
        return Extent(flat.schema.shapes[leaf], width, source.nbytes, is_floating(dtype), box)

    def cells(self, ref: LeafRef, first: int, stop: int) -> Extent:
        """Cells `first:stop` of a box."""
        extent = self.extent(ref)
        cells = grid(extent.shape, extent.width, self._chunk_bytes, extent.box)
        return extent._replace(
            cells=(first, stop), raw_bytes=cells.span(stop - 1)[1] - cells.span(first)[0]
        )

    def pieces(self, ref: LeafRef) -> list[LeafRef]:
        """All boxes of a leaf."""
        flat, leaf = self._resolved(ref)
        return (
            [LeafRef(ref.tree, ref.leaf, part) for part in range(len(flat.held[leaf].parts))]
            if leaf in flat.held
            else [ref]
        )

    def global_bytes(self, ref: LeafRef) -> int:
        """Raw bytes of the whole leaf, on all ranks."""
        flat, leaf = self._resolved(ref)
        if leaf not in flat.held:
            return flat.leaves[leaf].nbytes
        return geometry.width_of(flat.schema.dtypes[leaf]) * prod(flat.schema.shapes[leaf])

    def _resolved(self, ref: LeafRef) -> tuple[FlatState, int]:
        """The leaf with the bytes: an alias on this rank may be no alias in the whole state, so it
        resolves to the leaf it shares memory with.
        """
        flat = self._flats[ref.tree]
        alias = flat.schema.aliases[ref.leaf]
        return flat, ref.leaf if alias < 0 else alias
