"""What does one rank do in a commit of many, and how does the coordinator tell it?

A task names each byte range. It holds as long as the plan does, so a commit like the last one moves
bytes and computes nothing. The rank exchanges pieces of cut chunks, hashes and writes chunks, and
reports content.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ckptstore.commit.hints import DedupHints
from ckptstore.commit.plan import CommitPlan, Extent, extent_of_bytes, plan_chunks
from ckptstore.commit.predecessors import Predecessors
from ckptstore.commit.transaction import Transaction
from ckptstore.commit.write import hash_chunks
from ckptstore.core import geometry
from ckptstore.core.identity import IdentityDict
from ckptstore.core.ids import CHECKSUM_BYTES, SessionId, checksum, digest
from ckptstore.core.model import INLINE_BYTES, Box
from ckptstore.core.process import uncollected
from ckptstore.distributed.assemble import Report, Written
from ckptstore.distributed.collective import Collective, DeferredErrors, RankBytes
from ckptstore.distributed.framing import (
    damaged,
    numbered,
    numbers_of,
    pack,
    rows_of,
    table,
    unpack,
)
from ckptstore.distributed.merge import SameHolders
from ckptstore.distributed.plan import ChunkAssembly, CutChunk, Piece, RankBox, RanksPlan, Target
from ckptstore.errors import Conflict
from ckptstore.repository.dedup import ChunkTable
from ckptstore.repository.memory_budget import RankRoom
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import BytesSource, FlatState, Source

_Key = TypeVar("_Key", bound=Hashable)


class LeafRef(NamedTuple):
    """A box on this rank: the numbers of its key, of the leaf and of the box."""

    tree: int
    leaf: int
    part: int


class Cells(NamedTuple):
    """Cells `first:stop` of a box on this rank, which are the plan's chunks from `number` on."""

    ref: LeafRef
    first: int
    stop: int
    number: int


@dataclass(slots=True)
class Message:
    """The pieces of chunks that one rank sends another in a window: bytes `start:stop` of boxes.
    `names` has the chunk and the range of each; a digest of them precedes the bytes.
    """

    pieces: list[tuple[LeafRef, int, int]] = field(default_factory=list)
    names: bytearray = field(default_factory=bytearray)
    nbytes: int = CHECKSUM_BYTES

    def add(self, number: int, ref: LeafRef, start: int, stop: int) -> None:
        self.pieces.append((ref, start, stop))
        self.names += _PIECE.pack(number, start, stop)
        self.nbytes += stop - start

    @property
    def key(self) -> bytes:
        return checksum(memoryview(self.names))


@dataclass(slots=True)
class Window:
    """One step of the exchange: the messages to ranks and from ranks, and the chunks to assemble by
    number, each with this rank's piece of it."""

    outgoing: defaultdict[int, Message] = field(default_factory=lambda: defaultdict(Message))
    incoming: defaultdict[int, Message] = field(default_factory=lambda: defaultdict(Message))
    assemblies: dict[int, tuple[LeafRef, ChunkAssembly]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankTask:
    """The work of a rank before content is resolved: cells to write; boxes to report, by the number
    of the reported leaf; cells that other ranks hold as well, of which a sample is compared, or
    all."""

    jobs: tuple[Cells, ...]
    windows: tuple[Window, ...]
    reports: Mapping[int, LeafRef]
    shared: tuple[Cells, ...]
    replicas: tuple[Cells, ...]


_PIECE = struct.Struct("<QQQ")

_ROWS = {"own": 5, "shared": 5, "replicas": 5, "jobs": 6, "reports": 2}
"""The columns of each table: a slot of leaves or key and leaf, and what is done there."""


def encode_tasks(
    plan: RanksPlan, keys: Sequence[Sequence[str]], *, trust_replicated: bool
) -> list[bytes]:
    """The task of every rank; `keys` are each rank's keys in order.

    It names leaves with equal holdings once, in a part that all ranks share which number these
    leaves alike (`_Leaves`), and then what the rank does with each of them. The owner of a cut
    chunk is told all its pieces, another rank its own: otherwise tasks would grow with the square
    of the ranks.
    """
    leaves = _Leaves(plan, keys)
    tasks = [_Task() for _ in keys]
    for number, alike in enumerate(plan.alike.values()):
        shared = [] if trust_replicated else alike.shared
        kept = alike.shared if trust_replicated else []
        for name, shares in (
            ("own", alike.own),
            ("shared", kept),
            ("replicas", [*shared, *alike.replicas]),
        ):
            for place, *cells in shares:
                slot = leaves.slot(number, place)
                tasks[place.rank].rows[name] += (slot, place.part, *cells)
        for cut in alike.cut:
            for place, told in _told(cut):
                tasks[place.rank].cut.append([leaves.slot(number, place), cut.chunk, *told])
    for target, place, *cells in plan.jobs:
        tasks[place.rank].rows["jobs"] += (*leaves.ref(target, place), place.part, *cells)
    for number, places in leaves.reported:
        for place in places:
            tasks[place.rank].rows["reports"] += (leaves.slot(number, place), place.part)
    return [
        pack({"leaves": leaves.of(rank), "cut": task.cut} | task.tables())
        for rank, task in enumerate(tasks)
    ]


@dataclass(slots=True)
class _Task:
    """A task on its way: rows of numbers, and a message for each cut chunk."""

    rows: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _ROWS})
    cut: list[list[Any]] = field(default_factory=list)

    def tables(self) -> dict[str, bytes]:
        return {name: table(numbers) for name, numbers in self.rows.items()}


class _Slotted(NamedTuple):
    """The slot of leaves in a rank's task, and the number of their columns."""

    slot: int
    found: int


class _Leaves:
    """Names leaves with equal holdings for the ranks that hold them: those that are planned, by
    their number in the plan, and then those that are reported, `reported`, with their places."""

    def __init__(self, plan: RanksPlan, keys: Sequence[Sequence[str]]) -> None:
        self._plan = plan
        ranks: dict[tuple[int, ...], int] = {}
        self._trees = [
            tuple([own.index(tree.key) if tree.key in own else -1 for tree in plan.trees])
            for own in keys
        ]
        self._kinds = [ranks.setdefault(trees, len(ranks)) for trees in self._trees]
        self._numbered = [
            [(target, plan.numbers[target]) for target in alike.targets]
            for alike in plan.alike.values()
        ]
        self.reported: list[tuple[int, tuple[RankBox, ...]]] = []
        by_places = IdentityDict[tuple[RankBox, ...], int]()
        for number, (target, places) in enumerate(plan.reported.items()):
            if places not in by_places:
                by_places[places] = len(self._numbered)
                self.reported.append((len(self._numbered), places))
                self._numbered.append([])
            self._numbered[by_places[places]].append((target, number))
        self._same = [
            all(isinstance(plan.leaf(target).holders, SameHolders) for target, _ in each)
            for each in self._numbered
        ]
        self._used: list[dict[int, _Slotted]] = [{} for _ in keys]
        self._tables: dict[tuple[int, int, int], int] = {}
        self._found: list[list[bytes]] = []
        self._joined: dict[tuple[int, ...], bytes] = {}

    def ref(self, target: Target, place: RankBox) -> tuple[int, int]:
        """The numbers of key and leaf on the rank at `place`."""
        found = self._plan.leaf(target).holders
        leaf = found.leaf if isinstance(found, SameHolders) else found[place.holder].leaf
        return self._trees[place.rank][target.tree], leaf

    def slot(self, number: int, place: RankBox) -> int:
        """Where the rank at `place` finds the leaves of this number in its task."""
        used = self._used[place.rank]
        if number not in used:
            # Most ranks number leaves alike.
            kind = number, self._kinds[place.rank], -1 if self._same[number] else place.holder
            if kind not in self._tables:
                self._tables[kind] = len(self._found)
                self._found.append(self._table(number, place))
            used[number] = _Slotted(len(used), self._tables[kind])
        return used[number].slot

    def of(self, rank: int) -> bytes:
        """The leaves that a rank's task names, by slot."""
        used = tuple(each.found for each in self._used[rank].values())
        if used not in self._joined:
            self._joined[used] = pack([self._found[number] for number in used])
        return self._joined[used]

    def _table(self, number: int, place: RankBox) -> list[bytes]:
        """Columns: key, leaf, and the first chunk in the plan or the number of the report."""
        rows = [(*self.ref(target, place), first) for target, first in self._numbered[number]]
        return [table(column) for column in np.array(rows, np.int64).reshape(-1, 3).T]


def _told(cut: CutChunk) -> Iterator[tuple[RankBox, list[Any]]]:
    """What each rank with a piece of a cut chunk is told: by owners of the same pieces these owners
    and the pieces; and for each leaf the number of the owner, or -1, and the window."""
    kinds = IdentityDict[tuple[Piece, ...], list[int]]()
    for number, assembly in enumerate(cut.assemblies):
        kinds.setdefault(assembly.pieces, []).append(number)
    how, windows = np.array(cut.how), np.array(cut.windows)
    ranks: dict[int, RankBox] = {}
    told: dict[int, list[list[bytes]]] = {}
    numbers: dict[int, list[int]] = {}
    for pieces, owned in kinds.items():
        owners = [cut.assemblies[number].owner for number in owned]
        named, everything = table([n for each in owners for n in each[:2]]), _pieces_to(pieces)
        own = {place.rank for place in owners}
        for rank, mine in cut.assemblies[owned[0]].by_rank().items():
            ranks[rank] = mine[0].place
            told.setdefault(rank, []).append(
                [named, everything if rank in own else _pieces_to(mine)]
            )
            numbers.setdefault(rank, []).extend(owned)
    columns: dict[tuple[int, ...], bytes] = {}
    for rank, place in ranks.items():
        some = tuple(numbers[rank])
        if some not in columns:
            position = np.full(len(cut.assemblies), -1)
            position[list(some)] = np.arange(len(some))
            columns[some] = table(np.stack([position[how], windows], axis=1).ravel())
        yield place, [told[rank], columns[some]]


def _pieces_to(pieces: Sequence[Piece]) -> bytes:
    """Rows of rank, box, bytes of the box, and a range that they fill; one for each range."""
    return table(
        [
            n
            for place, start, stop, ranges in pieces
            for filled in ranges
            for n in (*place[:2], start, stop, *filled)
        ]
    )


def _pieces_from(data: bytes) -> tuple[Piece, ...]:
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for *piece, first, last in rows_of(data, 6):
        found.setdefault(tuple(piece), []).append([first, last])
    return tuple(
        Piece(RankBox(rank, part, 0), start, stop, ranges)
        for (rank, part, start, stop), ranges in found.items()
    )


def decode_task(data: bytes, rank: int) -> RankTask:
    """The inverse of `encode_tasks` for rank `rank`; raises `Corrupt`."""
    try:
        task = unpack(data)
        slots = [_leaves_from(columns) for columns in unpack(task["leaves"])]
        rows = {name: rows_of(task[name], width) for name, width in _ROWS.items()}
        own, shared, replicas = (
            [
                Cells(LeafRef(tree, leaf, part), first, stop, number + chunk)
                for slot, part, first, stop, chunk in rows[name]
                for tree, leaf, number in slots[slot]
            ]
            for name in ("own", "shared", "replicas")
        )
        own += [Cells(LeafRef(*row[:3]), *row[3:]) for row in rows["jobs"]]
        for cells in (own, shared, replicas):
            cells.sort(key=attrgetter("number"))
        reports = {
            number: LeafRef(tree, leaf, part)
            for slot, part in rows["reports"]
            for tree, leaf, number in slots[slot]
        }
        windows = _windows(task["cut"], slots, rank)
        in_order = dict(sorted(reports.items()))
        return RankTask(tuple(own), windows, in_order, tuple(shared), tuple(replicas))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"the coordinator's plan: {error!r}") from error


_Slot: TypeAlias = list[tuple[int, int, int]]
"""Key, leaf and number of leaves with equal holdings."""


def _leaves_from(columns: Sequence[bytes]) -> _Slot:
    rows = np.array([numbers_of(column) for column in columns]).reshape(3, -1).T
    return [(tree, leaf, number) for tree, leaf, number in rows.tolist()]


class _Take(NamedTuple):
    """The part of this rank in a cut chunk of a leaf."""

    number: int
    window: int
    tree: int
    leaf: int
    assembly: ChunkAssembly


def _windows(cut: Sequence[Any], slots: Sequence[_Slot], me: int) -> tuple[Window, ...]:
    takes = [take for each in cut for take in _takes(slots[each[0]], *each[1:])]
    windows: defaultdict[int, Window] = defaultdict(Window)
    # Both ends of a message have its pieces in this order.
    for number, at, tree, leaf, assembly in sorted(takes, key=attrgetter("number")):
        window, (owner, part, _) = windows[at], assembly.owner
        if owner == me:
            window.assemblies[number] = LeafRef(tree, leaf, part), assembly
        for (rank, part, _), start, stop, _ in assembly.pieces:
            if rank != owner and me in (rank, owner):
                message = window.outgoing[owner] if rank == me else window.incoming[rank]
                message.add(number, LeafRef(tree, leaf, part), start, stop)
    return tuple(windows[number] for number in sorted(windows))


def _takes(
    slot: _Slot, chunk: int, told: Sequence[Sequence[bytes]], by_leaf: bytes
) -> Iterator[_Take]:
    assemblies = [
        ChunkAssembly(RankBox(rank, part, 0), pieces)
        for owners, data in told
        for pieces in [_pieces_from(data)]
        for rank, part in rows_of(owners, 2)
    ]
    for i, (how, window) in enumerate(rows_of(by_leaf, 2)):
        tree, leaf, number = slot[i]
        if how >= 0:
            yield _Take(number + chunk, window, tree, leaf, assemblies[how])


class Boxes:
    """A rank's part of the state, box by box."""

    def __init__(self, flats: Sequence[FlatState], chunk_bytes: int) -> None:
        self._flats, self.chunk_bytes = flats, chunk_bytes

    def source(self, ref: LeafRef) -> Source:
        return self._parts(ref)[ref.part][1]

    def extent(self, ref: LeafRef) -> Extent:
        """The extent of a whole box."""
        schema = self._flats[ref.tree].schema
        leaf = schema.owner(ref.leaf)
        box, source = self._parts(ref)[ref.part]
        if schema.kinds[leaf] != "tensor":
            return extent_of_bytes(schema.kinds[leaf], source.nbytes)
        dtype = schema.dtypes[leaf]
        width = geometry.width_of(dtype)
        return Extent(schema.shapes[leaf], width, source.nbytes, dtype, box)

    def cells(self, ref: LeafRef, first: int, stop: int) -> Extent:
        """The extent of cells `first:stop` of a box."""
        extent = self.extent(ref)
        cells = extent.grid(self.chunk_bytes)
        return extent._replace(
            cells=(first, stop), raw_bytes=cells.span(stop - 1)[1] - cells.span(first)[0]
        )

    def pieces(self, ref: LeafRef) -> list[LeafRef]:
        """All boxes of a leaf."""
        return [ref._replace(part=part) for part in range(len(self._parts(ref)))]

    def path(self, ref: LeafRef) -> str:
        """The path of a leaf."""
        return self._flats[ref.tree].schema.paths[ref.leaf]

    def global_bytes(self, ref: LeafRef) -> int:
        """Raw bytes of the whole leaf, on all ranks."""
        schema = self._flats[ref.tree].schema
        leaf = schema.owner(ref.leaf)
        if schema.kinds[leaf] == "tensor":
            return geometry.nbytes_of(schema.dtypes[leaf], schema.shapes[leaf])
        return self.source(ref).nbytes

    def _parts(self, ref: LeafRef) -> Sequence[tuple[Box | None, Source]]:
        """The boxes of the leaf with the bytes: an alias on this rank may be no alias in the whole
        state, so it resolves to the leaf it shares memory with.
        """
        flat = self._flats[ref.tree]
        leaf = flat.schema.owner(ref.leaf)
        return flat.held[leaf].parts if leaf in flat.held else ((None, flat.leaves[leaf]),)


Before: TypeAlias = Callable[[Mapping[int, str]], Predecessors | None]
"""The chunks of the commit before, by the paths of a plan's leaves."""

SAMPLE = 32
"""One in this many boxes that other ranks write is hashed here as well."""

Plans: TypeAlias = dict[tuple[str, int, int], tuple[CommitPlan, DedupHints]]
"""Plans of the chunks of one task, and these chunks in the last commit: by what they are of, and
the lengths of runs and batches."""


class RankWorker:
    """One rank's attempt at a commit. `plans` are kept from one commit to the next; where they know
    none, whole chunks of this rank may become patches of chunks `before`."""

    def __init__(
        self,
        transaction: Transaction,
        boxes: Boxes,
        task: RankTask,
        plans: Plans,
        threads: ThreadPool,
        room: RankRoom,
        before: Before,
    ) -> None:
        self._transaction, self._boxes, self._task, self._plans = transaction, boxes, task, plans
        self._before = before
        self._threads, self._room = threads, room
        self._later = DeferredErrors()
        self._written: dict[int, bytes] = {}
        self._decided = b""
        self._reported: dict[int, Report] = {}

    def report(self, peers: Collective) -> Any:
        """Exchange fragments and write the planned chunks that the store lacks. Report the content
        of leaves whose replication is unknown, and the ids of a sample of the chunks that other
        ranks write.

        Peers get what they wait for even if something fails here.
        """
        self._write_planned(peers)
        chosen = _chosen(self._task, self._transaction.session)
        observed = self._hash(
            {
                number: (ref, self._boxes.cells(ref, cell, cell + 1))
                for number, (ref, cell) in chosen.items()
            }
        )
        self._reported = self._reports()
        return list(self._reported.items()), numbered(observed)

    def write_decided(self, decided: Sequence[Sequence[int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop). Raises
        `Conflict` if they are no longer those that were reported.
        """
        cells = {
            (number, first): (self._task.reports[number], first, stop)
            for number, first, stop in decided
        }
        plan, hints = self._planned(list(starmap(self._boxes.cells, cells.values()))), DedupHints()
        self._write(plan, hints, {at: self._boxes.source(ref) for at, (ref, *_) in cells.items()})
        table = hints.last or ChunkTable({})
        if table.checksums != b"".join(
            self._reported[number].checksums[first * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]
            for number, first, stop in decided
        ):
            raise Conflict("the state was changed while it was committed; commit between steps")
        self._decided = table.rows()

    def receipt(self) -> Any:
        """This rank's receipt, once its packs are durable, and what it has `Written`."""
        written = Written(numbered(self._written), self._decided)
        return self._transaction.receipt().encode(), written

    def _write_planned(self, peers: Collective) -> None:
        with self._later.failing():
            self._transaction.look()
        for name, batch in enumerate(self._batches(peers)):
            with self._later.failing():
                extents = [extent for extent, _ in batch.values()]
                plan = self._kept(f"cells {name}", partial(self._planned, extents))
                sources = {
                    number: BytesSource(data, extent.width)
                    for number, (extent, data) in batch.items()
                }
                self._written |= self._write(*plan, sources)
        self._later.settle()
        jobs, boxes = self._task.jobs, self._boxes
        plan = self._kept("jobs", lambda: self._planned([boxes.cells(*job[:3]) for job in jobs]))
        before = None
        if jobs and not plan[1].last:
            before = self._before({leaf: boxes.path(job.ref) for leaf, job in enumerate(jobs)})
        own = {job.number: boxes.source(job.ref) for job in jobs}
        self._written |= self._write(*plan, own, before)

    def _reports(self) -> dict[int, Report]:
        """This rank's content of the reported leaves."""
        boxes, found = self._boxes, {}
        with uncollected():
            pieces = {number: boxes.pieces(ref) for number, ref in self._task.reports.items()}
            large = {
                number
                for number, ref in self._task.reports.items()
                if boxes.global_bytes(ref) > INLINE_BYTES
            }
            hashed = {ref: (ref, boxes.extent(ref)) for number in large for ref in pieces[number]}
        sums = self._hash(hashed, checksum)
        with uncollected():
            for number, refs in pieces.items():
                nbytes = sum(boxes.source(ref).nbytes for ref in refs)
                if number in large:
                    found[number] = Report(None, b"".join([sums[ref] for ref in refs]), nbytes)
                else:
                    inline = b"".join([boxes.source(ref).read_all() for ref in refs])
                    found[number] = Report(inline, b"", nbytes)
        return found

    def _hash(
        self,
        cells: Mapping[_Key, tuple[LeafRef, Extent]],
        hashed: Callable[[memoryview], bytes] = digest,
    ) -> dict[_Key, bytes]:
        """The ids of the chunks in `cells` of boxes, or their checksums, by the keys of `cells`."""
        sources = [self._boxes.source(ref) for ref, _ in cells.values()]
        plan, workers = self._planned([each for _, each in cells.values()]), self._room.write
        found = hash_chunks(plan, sources, self._threads, workers.threads, hashed)
        return _by_key(cells, found)

    def _planned(self, extents: Sequence[Extent]) -> CommitPlan:
        return plan_chunks(extents, self._boxes.chunk_bytes, self._room.write.run_bytes)

    def _kept(self, what: str, make: Callable[[], CommitPlan]) -> tuple[CommitPlan, DedupHints]:
        key = what, self._room.write.run_bytes, self._room.cells_bytes
        if key not in self._plans:
            self._plans[key] = make(), DedupHints()
        return self._plans[key]

    def _write(
        self,
        plan: CommitPlan,
        hints: DedupHints,
        sources: Mapping[_Key, Source],
        before: Predecessors | None = None,
    ) -> dict[_Key, bytes]:
        """The ids of the plan's chunks by source, written as far as the store lacks them."""
        if self._later.failed or not sources:
            return {}
        found = self._transaction.write(
            plan,
            list(sources.values()),
            hints=hints,
            before=before,
            max_workers=self._room.write.threads,
        )
        return _by_key(sources, found)

    def _batches(self, peers: Collective) -> Iterator[dict[int, tuple[Extent, bytearray]]]:
        """The assembled chunks by number, in batches of bounded size. After a local failure, send
        and yield placeholders so that peers do not block.
        """
        batch: dict[int, tuple[Extent, bytearray]] = {}
        size = 0
        for window in self._task.windows:
            arrived = self._exchange(peers, window)
            for number, (ref, assembly) in window.assemblies.items():
                data = self._assemble(ref, assembly, arrived)
                whole = self._boxes.extent(ref)
                shape = (len(data) // whole.width,)
                batch[number] = Extent(shape, whole.width, len(data), whole.dtype), data
                size += len(data)
                if size >= self._room.cells_bytes:
                    yield batch
                    batch, size = {}, 0
        yield batch

    def _exchange(self, peers: Collective, window: Window) -> "dict[int, _Cursor]":
        """The messages of a window from other ranks, each behind the digest of its names."""
        outgoing = [
            RankBytes(rank, self._joined(message))
            for rank, message in sorted(window.outgoing.items())
        ]
        arrived = {
            rank: memoryview(bytearray(message.nbytes))
            for rank, message in sorted(window.incoming.items())
        }
        with self._later.failing():
            peers.exchange(outgoing, [RankBytes(rank, data) for rank, data in arrived.items()])
            for rank, data in arrived.items():
                if data[:CHECKSUM_BYTES] != window.incoming[rank].key:
                    raise damaged(f"rank {rank} sends pieces of other chunks than were asked for")
        return {rank: _Cursor(data[CHECKSUM_BYTES:]) for rank, data in arrived.items()}

    def _joined(self, message: Message) -> memoryview:
        """The message with copies of the bytes: sources may be reused while it is sent."""
        data = memoryview(bytearray(message.nbytes))
        cursor = _Cursor(data)
        cursor.take(CHECKSUM_BYTES)[:] = message.key
        with self._later.failing():
            for ref, start, stop in message.pieces:
                self._stage(ref, start, stop, cursor.take(stop - start))
        return data

    def _assemble(
        self, ref: LeafRef, assembly: ChunkAssembly, arrived: Mapping[int, "_Cursor"]
    ) -> bytearray:
        data = bytearray(sum(piece.nbytes for piece in assembly.pieces))
        memory = memoryview(data)
        for (rank, part, _), start, stop, ranges in assembly.pieces:
            if rank in arrived:
                buffer = arrived[rank].take(stop - start)
            else:
                buffer = memory[slice(*ranges[0])]
                if len(ranges) > 1:
                    buffer = memoryview(bytearray(stop - start))
                with self._later.failing():
                    self._stage(ref._replace(part=part), start, stop, buffer)
                if len(ranges) == 1:
                    continue
            cursor = _Cursor(buffer)
            for first, last in ranges:
                memory[first:last] = cursor.take(last - first)
        return data

    def _stage(self, ref: LeafRef, start: int, stop: int, out: memoryview) -> None:
        source = self._boxes.source(ref)
        memory = source.view(start, stop)
        if memory is None:
            source.stage(start, stop, out)
        else:
            out[:] = memory


def _by_key(keys: Iterable[_Key], found: Mapping[int, bytes]) -> dict[_Key, bytes]:
    """`found` by key instead of number. A plan numbers its sources in the order of `keys`."""
    numbered_keys = list(keys)
    return {numbered_keys[number]: each for number, each in found.items()}


class _Cursor:
    """Memory that is taken in consecutive ranges."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def take(self, nbytes: int) -> memoryview:
        self._at += nbytes
        return self._memory[self._at - nbytes : self._at]


def _chosen(task: RankTask, session: SessionId) -> dict[int, tuple[LeafRef, int]]:
    """The cells to compare with what other ranks write, by number: all of replicas, and a sample of
    shared ones."""
    found = {
        number + cell - first: (ref, cell)
        for ref, first, stop, number in task.replicas
        for cell in range(first, stop)
    }
    seed = int(session[:12], 16)
    for i, (ref, first, stop, number) in enumerate(task.shared):
        if (i + seed) % min(SAMPLE, len(task.shared)) == 0:
            step = (seed // SAMPLE + i) % (stop - first)
            found[number + step] = ref, first + step
    return found
