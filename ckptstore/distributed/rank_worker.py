"""What does one rank do in a commit of many? It exchanges fragments, hashes and writes chunks, and
reports content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from ckptstore.commit.plan import CommitPlan, Extent, plan_chunks
from ckptstore.commit.transaction import Transaction
from ckptstore.commit.write import hash_chunks
from ckptstore.core.ids import SessionId
from ckptstore.core.model import INLINE_BYTES
from ckptstore.distributed.collective import Collective, DeferredErrors, Part
from ckptstore.distributed.merge import Report
from ckptstore.distributed.rank_task import Assembly, Boxes, LeafRef, Outgoing, RankTask, Window
from ckptstore.repository.memory_budget import RankRoom
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import BytesSource, Source, read_all

SAMPLE = 32
"""One in this many boxes that other ranks write is hashed here as well."""

Plans: TypeAlias = dict[tuple[str, int, int], CommitPlan]
"""Plans of the chunks of one task: what they are of, and the lengths of runs and batches."""


class RankWorker:
    """One rank's attempt at a commit. `plans` are kept from one commit to the next."""

    def __init__(
        self,
        transaction: Transaction,
        boxes: Boxes,
        task: RankTask,
        plans: Plans,
        threads: ThreadPool,
        chunk_bytes: int,
        room: RankRoom,
    ) -> None:
        self._transaction, self._boxes, self._task, self._plans = transaction, boxes, task, plans
        self._threads, self._chunk_bytes, self._room = threads, chunk_bytes, room
        self._later = DeferredErrors()
        self._cells = self._jobs = self._decided = b""

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
        return self._reports(), chosen, b"".join(self._hash(spots, cells))

    def write_decided(self, decided: Sequence[Sequence[int]]) -> None:
        """Write chunks `first:stop` of reported leaves: (number of the report, first, stop)."""
        spots = [self._task.reports[number] for number, _, _ in decided]
        extents = [
            self._boxes.cells(ref, first, stop)
            for ref, (_, first, stop) in zip(spots, decided, strict=True)
        ]
        self._decided = self._write(self._planned(extents), list(map(self._boxes.source, spots)))

    def receipt(self) -> Any:
        """This rank's receipt and its chunk ids, once its packs are durable."""
        receipt = self._transaction.receipt().encode()
        return receipt, self._jobs, self._cells, self._decided

    def _write_planned(self, peers: Collective) -> None:
        ids: list[bytes] = []
        with self._later.failing():
            self._transaction.look()
        for number, batch in enumerate(self._batches(peers)):
            with self._later.failing():
                extents = [extent for extent, _ in batch]
                plan = self._kept(f"cells {number}", partial(self._planned, extents))
                sources: list[Source] = [BytesSource(data, extent.width) for extent, data in batch]
                ids.append(self._write(plan, sources))
        self._later.settle()
        self._cells = b"".join(ids)
        plan = self._kept("jobs", self._plan_of_jobs)
        self._jobs = self._write(plan, [self._boxes.source(job.ref) for job in self._task.jobs])

    def _plan_of_jobs(self) -> CommitPlan:
        return self._planned(
            [self._boxes.cells(job.ref, job.first, job.stop) for job in self._task.jobs]
        )

    def _reports(self) -> list[Report]:
        """This rank's content of the reported leaves."""
        found: list[Report | None] = []
        hashed: list[LeafRef] = []
        for ref in self._task.reports:
            pieces = self._boxes.pieces(ref)
            if self._boxes.global_bytes(ref) <= INLINE_BYTES:
                inline = b"".join(read_all(self._boxes.source(piece)) for piece in pieces)
                found.append(Report(inline, b"", len(inline)))
            else:
                found.append(None)
                hashed.extend(pieces)
        extents = [self._boxes.extent(ref) for ref in hashed]
        ids = iter(zip(self._hash(hashed, extents), extents, strict=True))
        for i, report in enumerate(found):
            if report is None:
                parts = [next(ids) for _ in self._boxes.pieces(self._task.reports[i])]
                joined = b"".join(chunks for chunks, _ in parts)
                found[i] = Report(None, joined, sum(extent.raw_bytes for _, extent in parts))
        return [report for report in found if report is not None]

    def _hash(self, spots: Sequence[LeafRef], extents: Sequence[Extent]) -> list[bytes]:
        sources = list(map(self._boxes.source, spots))
        return hash_chunks(self._planned(extents), sources, self._threads, self._room.write.threads)

    def _planned(self, extents: Sequence[Extent]) -> CommitPlan:
        return plan_chunks(extents, self._chunk_bytes, self._room.write.run_bytes)

    def _kept(self, what: str, make: Callable[[], CommitPlan]) -> CommitPlan:
        key = what, self._room.write.run_bytes, self._room.cells_bytes
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def _write(self, plan: CommitPlan, sources: Sequence[Source]) -> bytes:
        """The ids of the plan's chunks, written as far as the store lacks them."""
        if self._later.failed or not sources:
            return b""
        ids = self._transaction.write(plan, sources, max_workers=self._room.write.threads)
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

    def _joined(self, outgoing: Sequence[Outgoing]) -> memoryview:
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
        for rank, part, start, stop, ranges in assembly.pieces:
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
    """Shared boxes by their number in the task, and their chosen cells: a sample, or all if
    replicas are not trusted.
    """
    seed = int(session[:12], 16)
    for i, (_, cells) in enumerate(task.shared):
        if not task.trust_replicated:
            yield from ((i, cell) for cell in range(cells))
        elif (i + seed) % min(SAMPLE, len(task.shared)) == 0:
            yield i, (seed // SAMPLE + i) % cells
