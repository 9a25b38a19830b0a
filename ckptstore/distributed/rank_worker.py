"""What does one rank do in a commit of many, and how does the coordinator tell it?

A task names each byte range. It holds as long as the plan does, so a commit like the last one moves
bytes and computes nothing. The rank exchanges pieces of cut chunks, hashes and writes chunks, and
reports content.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ckptstore.commit.plan import CommitPlan, Extent, plan_chunks
from ckptstore.commit.transaction import Transaction
from ckptstore.commit.write import hash_chunks
from ckptstore.core import geometry
from ckptstore.core.geometry import grid
from ckptstore.core.ids import CHECKSUM_BYTES, SessionId, checksum, digest
from ckptstore.core.model import INLINE_BYTES
from ckptstore.distributed.assemble import Report
from ckptstore.distributed.collective import Collective, DeferredErrors, Part
from ckptstore.distributed.framing import damaged, pack, unpack
from ckptstore.distributed.plan import Piece, Place, RanksPlan, Target
from ckptstore.errors import Conflict
from ckptstore.repository.dedup import DedupHints
from ckptstore.repository.memory_budget import RankRoom
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import BytesSource, FlatState, Source


class LeafRef(NamedTuple):
    """A box on this rank: the numbers of its key, of the leaf and of the box."""

    tree: int
    leaf: int
    part: int


class Assembly(NamedTuple):
    """How rank `owner` assembles a chunk. Shared by leaves with equal holdings."""

    owner: int
    extent: Extent
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Window:
    """What is in transfer at a time: box and byte range of the pieces for each rank, to be sent as
    one message; the number of bytes from each rank; the chunks to assemble, with the numbers of key
    and leaf."""

    outgoing: dict[int, list[tuple[LeafRef, int, int]]] = field(default_factory=dict)
    incoming: Counter[int] = field(default_factory=Counter)
    assemblies: list[tuple[int, int, Assembly]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankTask:
    """The work of a rank before content is resolved. `jobs` are boxes and their cells to write;
    `shared` are boxes that other ranks hold as well, their number of cells, and whether all of them
    are to be compared."""

    jobs: tuple[tuple[LeafRef, int, int], ...]
    windows: tuple[Window, ...]
    reports: tuple[LeafRef, ...]
    shared: tuple[tuple[LeafRef, int, bool], ...]


_COLUMNS = ("jobs", "assemblies", "cells", "reports", "shared")
"""A task as a message: lists of numbers. `cells` are a window, key and leaf, and the number of the
assembly in which the rank takes part."""


def encode_tasks(
    plan: RanksPlan, keys: Sequence[Sequence[str]], *, trust_replicated: bool
) -> list[bytes]:
    """The task of every rank; `keys` are each rank's keys in order."""
    trees = [
        [names.index(tree.key) if tree.key in names else -1 for tree in plan.trees]
        for names in keys
    ]
    tasks: list[dict[str, list[Any]]] = [{name: [] for name in _COLUMNS} for _ in keys]

    def ref(target: Target, place: Place) -> list[int]:
        leaf = plan.leaf(target).holders[place.holder].leaf
        return [trees[place.rank][target.tree], leaf, place.part]

    for job in plan.jobs:
        tasks[job.place.rank]["jobs"].append([*ref(job.target, job.place), job.first, job.stop])
    roles: dict[int, list[tuple[int, int, int]]] = {}  # by identity of the assemblies
    for target, assembly, window in plan.cells:
        leaf = plan.leaf(target)
        if id(assembly) not in roles:
            width = geometry.width_of(leaf.dtype)
            said = assembly.owner.rank, width, leaf.dtype, assembly.pieces
            places = (assembly.owner, *(piece.place for piece in assembly.pieces))
            holders = {place.rank: place.holder for place in places}
            roles[id(assembly)] = [
                (rank, holder, len(tasks[rank]["assemblies"])) for rank, holder in holders.items()
            ]
            for rank in holders:
                tasks[rank]["assemblies"].append(said)
        for rank, holder, number in roles[id(assembly)]:
            at = trees[rank][target.tree], leaf.holders[holder].leaf
            tasks[rank]["cells"].append((window, *at, number))
    for target, places in plan.reported.items():
        for place in places:
            tasks[place.rank]["reports"].append(ref(target, place))
    for target, _, place, cells, every in plan.shared:
        entry = [*ref(target, place), cells, every or not trust_replicated]
        tasks[place.rank]["shared"].append(entry)
    return list(map(pack, tasks))


def decode_task(data: bytes, rank: int) -> RankTask:
    """The inverse of `encode_tasks` for rank `rank`; raises `Corrupt`."""
    try:
        task = unpack(data)
        return RankTask(
            tuple((LeafRef(*ref), first, stop) for *ref, first, stop in task["jobs"]),
            _windows(task, rank),
            tuple(LeafRef(*ref) for ref in task["reports"]),
            tuple((LeafRef(*ref), cells, every) for *ref, cells, every in task["shared"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"the coordinator's plan: {error!r}") from error


def _windows(task: Mapping[str, Any], me: int) -> tuple[Window, ...]:
    assemblies = [_assembly(*each) for each in task["assemblies"]]
    windows: dict[int, Window] = {}
    for number, tree, leaf, how in task["cells"]:
        window = windows.setdefault(number, Window())
        owner, _, pieces = assembly = assemblies[how]
        if owner == me:
            window.assemblies.append((tree, leaf, assembly))
        for (rank, part, _), start, stop, _ in pieces:
            if rank == me != owner:
                parts = window.outgoing.setdefault(owner, [])
                parts.append((LeafRef(tree, leaf, part), start, stop))
            elif rank != me == owner:
                window.incoming[rank] += stop - start
    return tuple(windows[number] for number in sorted(windows))


def _assembly(owner: int, width: int, dtype: str, found: Sequence[Any]) -> Assembly:
    pieces = tuple(Piece(Place(*place), *where) for place, *where in found)
    nbytes = sum(piece.stop - piece.start for piece in pieces)
    return Assembly(owner, Extent((nbytes // width,), width, nbytes, dtype), pieces)


class Boxes:
    """A rank's part of the state, box by box."""

    def __init__(self, flats: Sequence[FlatState], chunk_bytes: int) -> None:
        self._flats, self.chunk_bytes = flats, chunk_bytes

    def source(self, ref: LeafRef) -> Source:
        flat, leaf = self._resolved(ref)
        return flat.held[leaf].parts[ref.part][1] if leaf in flat.held else flat.leaves[leaf]

    def extent(self, ref: LeafRef) -> Extent:
        """The extent of a whole box."""
        flat, leaf = self._resolved(ref)
        source = self.source(ref)
        if flat.schema.kinds[leaf] != "tensor":
            return Extent((source.nbytes,), 1, source.nbytes, "")
        dtype = flat.schema.dtypes[leaf]
        box = flat.held[leaf].parts[ref.part][0] if leaf in flat.held else None
        width = geometry.width_of(dtype)
        return Extent(flat.schema.shapes[leaf], width, source.nbytes, dtype, box)

    def cells(self, ref: LeafRef, first: int, stop: int) -> Extent:
        """Cells `first:stop` of a box."""
        extent = self.extent(ref)
        cells = grid(extent.shape, extent.width, self.chunk_bytes, extent.box)
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


SAMPLE = 32
"""One in this many boxes that other ranks write is hashed here as well."""

Plans: TypeAlias = dict[tuple[str, int, int], tuple[CommitPlan, DedupHints]]
"""Plans of the chunks of one task, and these chunks in the last commit: by what they are of, and
the lengths of runs and batches."""


class RankWorker:
    """One rank's attempt at a commit. `plans` are kept from one commit to the next."""

    def __init__(
        self,
        transaction: Transaction,
        boxes: Boxes,
        task: RankTask,
        plans: Plans,
        threads: ThreadPool,
        room: RankRoom,
    ) -> None:
        self._transaction, self._boxes, self._task, self._plans = transaction, boxes, task, plans
        self._threads, self._room = threads, room
        self._later = DeferredErrors()
        self._ids = self._decided_ids = b""
        self._reported: list[Report] = []

    def report(self, peers: Collective) -> Any:
        """Exchange fragments, write the planned chunks that the store lacks, and report the content
        of leaves whose replication is unknown, and a sample of what other ranks write.

        Peers get what they wait for even if something fails here.
        """
        self._write_planned(peers)
        chosen = list(_chosen(self._task, self._transaction.session))
        spots = [self._task.shared[number][0] for number, _ in chosen]
        cells = [
            self._boxes.cells(ref, cell, cell + 1)
            for ref, (_, cell) in zip(spots, chosen, strict=True)
        ]
        self._reported = self._reports()
        return list(map(list, self._reported)), chosen, b"".join(self._hash(spots, cells))

    def write_decided(self, decided: Sequence[Sequence[int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop). Raises
        `Conflict` if they are no longer those that were reported.
        """
        spots = [self._task.reports[number] for number, _, _ in decided]
        extents = [
            self._boxes.cells(ref, first, stop)
            for ref, (_, first, stop) in zip(spots, decided, strict=True)
        ]
        sources, hints = list(map(self._boxes.source, spots)), DedupHints()
        self._decided_ids = self._write(self._planned(extents), hints, sources)
        if bytes(hints.last.checksums if hints.last else b"") != b"".join(
            self._reported[number].checksums[first * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]
            for number, first, stop in decided
        ):
            raise Conflict("the state was changed while it was committed; commit between steps")

    def receipt(self) -> Any:
        """This rank's receipt, the ids of its jobs and its cells, and those of what it was told to
        write, once its packs are durable."""
        return self._transaction.receipt().encode(), self._ids, self._decided_ids

    def _write_planned(self, peers: Collective) -> None:
        ids: list[bytes] = []
        with self._later.failing():
            self._transaction.look()
        for number, batch in enumerate(self._batches(peers)):
            with self._later.failing():
                extents = [extent for extent, _ in batch]
                plan = self._kept(f"cells {number}", partial(self._planned, extents))
                sources: list[Source] = [BytesSource(data, extent.width) for extent, data in batch]
                ids.append(self._write(*plan, sources))
        self._later.settle()
        plan = self._kept(
            "jobs", lambda: self._planned([self._boxes.cells(*job) for job in self._task.jobs])
        )
        jobs = self._write(*plan, [self._boxes.source(ref) for ref, _, _ in self._task.jobs])
        self._ids = b"".join((jobs, *ids))

    def _reports(self) -> list[Report]:
        """This rank's content of the reported leaves."""
        boxes = self._boxes
        small = [boxes.global_bytes(ref) <= INLINE_BYTES for ref in self._task.reports]
        pieces = [boxes.pieces(ref) for ref in self._task.reports]
        hashed = [
            ref
            for is_small, refs in zip(small, pieces, strict=True)
            if not is_small
            for ref in refs
        ]
        sums = iter(self._hash(hashed, list(map(boxes.extent, hashed)), checksum))
        found = []
        for is_small, refs in zip(small, pieces, strict=True):
            sources = list(map(boxes.source, refs))
            inline = b"".join([source.read_all() for source in sources]) if is_small else None
            checksums = b"" if is_small else b"".join(next(sums) for _ in refs)
            found.append(Report(inline, checksums, sum(source.nbytes for source in sources)))
        return found

    def _hash(
        self,
        spots: Sequence[LeafRef],
        extents: Sequence[Extent],
        hashed: Callable[[memoryview], bytes] = digest,
    ) -> list[bytes]:
        sources, workers = list(map(self._boxes.source, spots)), self._room.write.threads
        return hash_chunks(self._planned(extents), sources, self._threads, workers, hashed)

    def _planned(self, extents: Sequence[Extent]) -> CommitPlan:
        return plan_chunks(extents, self._boxes.chunk_bytes, self._room.write.run_bytes)

    def _kept(self, what: str, make: Callable[[], CommitPlan]) -> tuple[CommitPlan, DedupHints]:
        key = what, self._room.write.run_bytes, self._room.cells_bytes
        if key not in self._plans:
            self._plans[key] = make(), DedupHints()
        return self._plans[key]

    def _write(self, plan: CommitPlan, hints: DedupHints, sources: Sequence[Source]) -> bytes:
        """The ids of the plan's chunks, written as far as the store lacks them."""
        if self._later.failed or not sources:
            return b""
        threads = self._room.write.threads
        ids = self._transaction.write(plan, sources, hints=hints, max_workers=threads)
        return b"".join(ids[i] for i in range(len(sources)))

    def _batches(self, peers: Collective) -> Iterator[list[tuple[Extent, bytearray]]]:
        """The assembled chunks, in batches of bounded size. After a local failure, send and yield
        placeholders so that peers do not block.
        """
        batch: list[tuple[Extent, bytearray]] = []
        size = 0
        for window in self._task.windows:
            for extent, data in self._in_window(peers, window):
                batch.append((extent, data))
                size += len(data)
                if size >= self._room.cells_bytes:
                    yield batch
                    batch, size = [], 0
        yield batch

    def _in_window(self, peers: Collective, window: Window) -> Iterator[tuple[Extent, bytearray]]:
        outgoing = [
            Part(rank, self._joined(found)) for rank, found in sorted(window.outgoing.items())
        ]
        arrived = {rank: bytearray(nbytes) for rank, nbytes in sorted(window.incoming.items())}
        incoming = [Part(rank, memoryview(data)) for rank, data in arrived.items()]
        with self._later.failing():
            peers.exchange(outgoing, incoming)
        cursors = {rank: _Cursor(memoryview(data)) for rank, data in arrived.items()}
        for tree, leaf, assembly in window.assemblies:
            yield assembly.extent, self._assemble(tree, leaf, assembly, cursors)

    def _joined(self, outgoing: Sequence[tuple[LeafRef, int, int]]) -> memoryview:
        """One message with copies of the bytes: sources may be reused while it is sent."""
        message = memoryview(bytearray(sum(stop - start for _, start, stop in outgoing)))
        cursor = _Cursor(message)
        with self._later.failing():
            for ref, start, stop in outgoing:
                self._stage(ref, start, stop, cursor.take(stop - start))
        return message

    def _assemble(
        self, tree: int, leaf: int, assembly: Assembly, arrived: Mapping[int, "_Cursor"]
    ) -> bytearray:
        data = bytearray(assembly.extent.raw_bytes)
        memory = memoryview(data)
        for (rank, part, _), start, stop, ranges in assembly.pieces:
            if rank in arrived:
                buffer = arrived[rank].take(stop - start)
            else:
                buffer = memory[slice(*ranges[0])]
                if len(ranges) > 1:
                    buffer = memoryview(bytearray(stop - start))
                with self._later.failing():
                    self._stage(LeafRef(tree, leaf, part), start, stop, buffer)
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


class _Cursor:
    """Memory that is taken in consecutive ranges."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def take(self, nbytes: int) -> memoryview:
        self._at += nbytes
        return self._memory[self._at - nbytes : self._at]


def _chosen(task: RankTask, session: SessionId) -> Iterator[tuple[int, int]]:
    """Shared boxes by their number in the task, and their chosen cells: a sample, or all."""
    seed = int(session[:12], 16)
    for i, (_, cells, every) in enumerate(task.shared):
        if every:
            yield from ((i, cell) for cell in range(cells))
        elif (i + seed) % min(SAMPLE, len(task.shared)) == 0:
            yield i, (seed // SAMPLE + i) % cells
