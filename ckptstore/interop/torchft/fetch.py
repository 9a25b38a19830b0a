"""How are chunks fetched from several peers in parallel?

Each chunk is verified before it counts. A chunk that one peer does not deliver is asked of another.
A failing peer is asked again a few times; each chunk from it resets the count. Connections that
break together are one failure. A slow peer is asked until the deadline if all others are gone or
slow as well. A peer that lacks a chunk serves another state, and is not asked again.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckptstore.errors import CkptStoreError, Corrupt, Unavailable
from ckptstore.interop.torchft.connection import Connection, Deadline, PeerFailed, Route
from ckptstore.interop.torchft.wire import (
    CHUNKS_PER_REQUEST,
    Description,
    name_of,
)
from ckptstore.plugin.model import MIB, RUN_BYTES
from ckptstore.plugin.reading import ChunkRead
from ckptstore.plugin.work import Condition, Pool, wholly

FAILURES_MAX = 4
"""A peer is dropped after this many consecutive failures."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A chunk to bring to all its destinations: to `memory`, new memory that receives it directly,
    and from there, or from temporary memory, to those of `reads`. Its elements have `width` bytes.
    """

    chunk: bytes
    nbytes: int
    memory: memoryview | None = None
    width: int = 1
    reads: list[ChunkRead] = field(default_factory=list)
    landed: bool = False

    def room(self) -> memoryview:
        """Memory for the chunk."""
        return self.memory if self.memory is not None else memoryview(bytearray(self.nbytes))

    def land(self, data: memoryview) -> bool:
        """Hash the bytes that came, and pass them on if they are the chunk; returns whether they
        are.
        """
        self.landed = name_of(data) == self.chunk
        for read in self.reads if self.landed else ():
            read.land(data)
        return self.landed


class Peers:
    """The peers of one transfer of the state `step`. They do not withdraw it before `close`.
    `traffic` counts what came: `requests`, `chunks`, `bytes`, and chunks asked for again
    (`retried`).
    """

    def __init__(
        self, routes: Sequence[Route], step: int, deadline: Deadline, max_workers: int
    ) -> None:
        self.traffic = Counter[str]()
        self._routes, self._step, self._deadline = list(routes), step, deadline
        self._describer = self._routes[0]
        self._max_workers = max_workers
        self._open: set[Connection] = set()
        self._held: list[Connection] = []
        self._closed = False
        # Chunks that came damaged or broke off: the peer's disk may be at fault, which it finds if
        # asked to verify.
        self._doubted: set[bytes] = set()
        self._lock = threading.Lock()

    def describe(self) -> Description:
        """The first peer's answer with a description. Raises the peers' errors if all failed,
        TimeoutError if none answered in time.
        """
        errors: list[CkptStoreError] = []
        with _daemons(len(self._routes)) as pool:
            asked = {pool.submit(self._describe, route): route for route in self._routes}
            try:
                for answer in as_completed(asked, self._deadline.left()):
                    try:
                        description, self._describer = answer.result(), asked[answer]
                        return description
                    except CkptStoreError as error:
                        errors.append(error)
            except TimeoutError:
                self._deadline.left()  # says what timed out
                raise
        raise _all_lost(errors)

    def describer(self) -> "Peers":
        """The peer that gave the description, alone, for what others need not have. Where there are
        others, it must answer within its patience.
        """
        route, left_s = self._describer, self._deadline.left()
        if self._routes != [route]:
            left_s = min(left_s, route.patience_s)
        deadline = Deadline(left_s, "the patches of a state have not been received")
        return Peers([route], self._step, deadline, self._max_workers)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Bring every chunk to its destination. Raises the error that prevented it; after that
        nothing is written, however often this call was interrupted.
        """
        if not wanted:
            return
        max_workers, peers = min(self._max_workers, len(wanted)), range(len(self._routes))
        work = _Work(wanted, len(peers), max_workers * len(peers), self._deadline)

        def stop() -> None:
            work.fail(Unavailable("the transfer was interrupted"))
            self.close()

        wholly(partial(self._fetch, work, max_workers, peers), stop)
        # A peer that failed for good is not waited for again.
        self._routes = [self._routes[peer] for peer in peers if peer not in work.lost]

    def _fetch(self, work: "_Work", max_workers: int, peers: Sequence[int]) -> None:
        with _daemons(max_workers * len(peers)) as pool:
            working = [
                pool.submit(self._work, work, peer) for _ in range(max_workers) for peer in peers
            ]
            try:
                work.finish()
            except BaseException as error:
                work.fail(error)
                self.close()
                wait(working)
                raise

    def count(self, **numbers: int) -> None:
        """Add to `traffic`."""
        with self._lock:
            self.traffic.update(numbers)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                connection.cut()
        while self._held:
            self._drop(self._held.pop())

    def _describe(self, route: Route) -> Description:
        failures = 0
        while True:
            connection = None
            try:
                connection = self._connect(route)
                self.count(requests=1)
                description = connection.describe(self._step)
                self._held.append(connection)  # as long as it is open, the peer has a reader
                return description
            except PeerFailed as failed:
                failures += not failed.slow
                if failed.final or failures == FAILURES_MAX or self._closed:
                    raise failed.error from failed
            finally:
                if self._closed or connection not in self._held:
                    self._drop(connection)

    def _connect(self, route: Route) -> Connection:
        connection = route.connect(self._deadline)
        with self._lock:
            self._open.add(connection)
            if self._closed:
                connection.cut()
        return connection

    def _drop(self, connection: Connection | None) -> None:
        if connection:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _work(self, work: "_Work", peer: int) -> None:
        connection = None
        scratch = memoryview(b"")  # for chunks that cannot be received in place
        try:
            while batch := work.take(peer):
                largest = max((each.nbytes for each in batch if each.memory is None), default=0)
                if len(scratch) < largest:
                    scratch = memoryview(bytearray(largest))
                left, wrong, since = list(batch), list[Wanted](), time.monotonic()
                try:
                    connection = connection or self._connect(self._routes[peer])
                    self._receive(work, peer, connection, left, wrong, scratch)
                    failed = _damaged(wrong) if wrong else None
                except PeerFailed as error:
                    self._drop(connection)
                    connection, failed = None, error
                if failed:
                    if not failed.final:
                        self._doubted.update(each.chunk for each in wrong + left[:1])
                        self.count(retried=len(wrong + left))
                    work.back(peer, wrong + left, failed, since)
        except BaseException as error:
            work.fail(error)
        finally:
            self._drop(connection)

    def _receive(
        self,
        work: "_Work",
        peer: int,
        connection: Connection,
        left: list[Wanted],
        wrong: list[Wanted],
        scratch: memoryview,
    ) -> None:
        """Receive the chunks `left` of a batch; afterwards it has those that did not come, and
        `wrong` those that came damaged.
        """
        self.count(requests=1)
        verified = any(each.chunk in self._doubted for each in left)
        names, nbytes = [each.chunk for each in left], sum(each.nbytes for each in left)
        connection.ask_chunks(self._step, names, nbytes, verified=verified)
        while left:
            each = left[0]
            data = each.memory if each.memory is not None else scratch[: each.nbytes]
            connection.read_into(data)
            self.count(chunks=1, bytes=each.nbytes)
            del left[0]
            if each.land(data):
                work.landed(peer)
            else:
                wrong.append(each)


class _Work:
    """The chunks of one fetch, shared by the threads that ask the numbered `peers`. Does no I/O."""

    def __init__(
        self, wanted: Sequence[Wanted], peers: int, threads: int, deadline: Deadline
    ) -> None:
        self._todo, self._missing = deque(wanted), len(wanted)
        # Few chunks are divided evenly; many are taken at each thread's own speed.
        self._batch_bytes = min(RUN_BYTES, max(MIB, sum(e.nbytes for e in wanted) // threads))
        self._deadline = deadline
        self._failures, self._failed_at = [0] * peers, [float("-inf")] * peers
        self._slow: set[int] = set()
        self.lost: dict[int, CkptStoreError] = {}
        self._error: BaseException | None = None
        self._changed = Condition()

    def take(self, peer: int) -> list[Wanted]:
        """The next chunks to ask of `peer`; empty when nothing is left. Waits while other peers are
        asked for all of them.
        """
        batch: list[Wanted] = []
        size = 0
        with self._changed:
            while not self._todo or self._others_are_faster(peer):
                if self._is_over(peer):
                    return []
                self._wait()
            if self._is_over(peer):
                return []
            while self._todo and len(batch) < CHUNKS_PER_REQUEST and size < self._batch_bytes:
                batch.append(self._todo.popleft())
                size += batch[-1].nbytes
            return batch

    def landed(self, peer: int) -> None:
        """Mark a chunk from `peer` as complete."""
        with self._changed:
            self._failures[peer] = 0
            self._slow.discard(peer)
            self._missing -= 1
            if not self._missing:
                self._changed.notify_all()

    def back(self, peer: int, wanted: Sequence[Wanted], failed: PeerFailed, since: float) -> None:
        """Give back chunks that `peer` did not deliver since it was asked, and count its failure:
        connections that break together are one. A slow peer is no failure: others are asked first.
        """
        with self._changed:
            self._todo.extendleft(reversed(wanted))
            if failed.slow:
                self._slow.add(peer)
            elif since > self._failed_at[peer]:
                self._failures[peer] += 1
                self._failed_at[peer] = time.monotonic()
            if failed.final or self._failures[peer] >= FAILURES_MAX:
                self.lost[peer] = failed.error
            if len(self.lost) == len(self._failures):
                self._error = self._error or _all_lost(list(self.lost.values()))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop: `finish` raises `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self) -> None:
        """Return when all chunks have landed; raises the error that prevents it."""
        with self._changed:
            while self._missing and not self._error:
                self._wait()
            if self._error:
                raise self._error

    def _is_over(self, peer: int) -> bool:
        return self._error is not None or not self._missing or peer in self.lost

    def _others_are_faster(self, peer: int) -> bool:
        return peer in self._slow and len(self._slow | self.lost.keys()) < len(self._failures)

    def _wait(self) -> None:
        try:
            self._changed.wait(self._deadline.left())
        except TimeoutError as error:
            self._error = self._error or error


@contextmanager
def _daemons(count: int) -> Iterator[Pool]:
    """Daemon threads: after the transfer, some may still be connecting to a peer that does not
    answer.
    """
    pool = Pool(count, name="ckptstore-peer")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _damaged(wrong: Sequence[Wanted]) -> PeerFailed:
    names = ", ".join(each.chunk.hex()[:12] for each in wrong[:4])
    what = f"{len(wrong)} chunks came damaged from a peer, or it is not what it says"
    return PeerFailed(Corrupt(f"{what}: {names}"))


def _all_lost(errors: Sequence[CkptStoreError]) -> CkptStoreError:
    """The error when no peer is left: the one peer's error, or a summary of all."""
    if len({type(error) for error in errors}) == 1:
        return type(errors[0])("; ".join(dict.fromkeys(map(str, errors))))
    return Unavailable("no peer could be received from: " + "; ".join(map(str, errors)))
