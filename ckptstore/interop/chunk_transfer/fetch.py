"""How are chunks fetched from several peers in parallel?

Each chunk is verified before it counts. A chunk that one peer does not deliver is asked of another.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptstore.core.threads import Pool
from ckptstore.errors import CkptStoreError, Corrupt
from ckptstore.interop.chunk_transfer.chunk_names import is_named
from ckptstore.interop.chunk_transfer.connection import Connection, Deadline, PeerFailed, Route
from ckptstore.interop.chunk_transfer.protocol import IDS_PER_REQUEST, Description
from ckptstore.interop.chunk_transfer.scheduler import FAILURES_MAX, Wanted, Work, all_lost

logger = logging.getLogger("ckptstore.transport")


@dataclass(slots=True)
class Traffic:
    """Bytes and chunks received over the network. `retried` counts chunks that were asked for
    again.
    """

    requests: int = 0
    chunks: int = 0
    bytes: int = 0
    retried: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, requests: int = 0, chunks: int = 0, nbytes: int = 0, retried: int = 0) -> None:
        with self.lock:
            self.requests += requests
            self.chunks += chunks
            self.bytes += nbytes
            self.retried += retried

    def forget_chunks(self) -> None:
        """Reset the counts: the chunks so far are no part of a state."""
        with self.lock:
            self.chunks = self.bytes = 0


class Peers:
    """The peers of one transfer of the state `step`. Connections are reused by later fetches, until
    `close`.
    """

    def __init__(
        self, routes: Sequence[Route], step: int, deadline: Deadline, max_workers: int
    ) -> None:
        self.traffic = Traffic()
        self._routes, self._step, self._deadline, self._max_workers = (
            list(routes),
            step,
            deadline,
            max_workers,
        )
        self._open: set[Connection] = set()
        self._idle: dict[Route, list[Connection]] = {route: [] for route in routes}
        self._closed = False
        # Chunks that came damaged or broke off: the peer's disk may be at fault, which it finds if
        # asked to verify.
        self._doubted: set[bytes] = set()
        self._lock = threading.Lock()

    def describe(self, names: str, *, early: bool = False) -> Description:
        """The first peer's answer with a description. Raises the peers' errors if all failed,
        TimeoutError if none answered in time.

        Peers may call chunks by `names`. With `early`, an only peer may send an outline.
        """
        early = early and len(self._routes) == 1  # chunk numbers belong to one peer
        with self._threads(len(self._routes)) as pool:
            return self._first(
                {pool.submit(self._describe, route, names, early) for route in self._routes}
            )

    def ids(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The ids of chunks given by quick names, from the first peer that answers; None for chunks
        that it does not know.
        """
        for route in self._routes:
            try:
                with self._connection(route) as connection:
                    asked = [
                        names[i : i + IDS_PER_REQUEST]
                        for i in range(0, len(names), IDS_PER_REQUEST)
                    ]
                    self.traffic.add(requests=len(asked))
                    return [
                        chunk for some in asked for chunk in connection.ask_ids(self._step, some)
                    ]
            except PeerFailed as failed:
                logger.debug("a peer does not tell ids: %s", failed)
        return [None] * len(names)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Bring every chunk to its destination. Raises the error that prevented it; after that
        nothing is written.
        """
        if not wanted:
            return
        max_workers = min(self._max_workers, len(wanted))
        work = Work(wanted, len(self._routes), max_workers * len(self._routes), self._deadline)
        with self._threads(max_workers * len(self._routes)) as pool:
            working = [
                pool.submit(self._work, work, peer)
                for _ in range(max_workers)
                for peer in range(len(self._routes))
            ]
            try:
                work.finish()
            except BaseException as error:
                work.fail(error)
                self.close()
                wait(working)
                raise
        # A peer that failed for good is not waited for again.
        self._routes = [route for peer, route in enumerate(self._routes) if peer not in work.lost]

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                connection.cut()
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
                connections.clear()

    @contextmanager
    def _threads(self, count: int) -> Iterator[Pool]:
        """Daemon threads: after the transfer, some may still be connecting to a peer that does not
        answer.
        """
        pool = Pool(count, name="ckptstore-peer")
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _describe(self, route: Route, names: str, early: bool) -> Description:
        failures = 0
        while True:
            try:
                with self._connection(route) as connection:
                    self.traffic.add(requests=1)
                    return connection.describe(self._step, names, early=early)
            except PeerFailed as failed:
                failures += not (failed.slow or failed.since < 0)
                if failed.final or failures == FAILURES_MAX or self._closed:
                    raise failed.error from failed

    def _first(self, waiting: "set[Future[Description]]") -> Description:
        errors: list[CkptStoreError] = []
        while waiting:
            done, waiting = wait(
                waiting, timeout=self._deadline.left(), return_when=FIRST_COMPLETED
            )
            for future in done:
                try:
                    return future.result()
                except CkptStoreError as error:
                    errors.append(error)
        raise all_lost(errors)

    def _work(self, work: Work, peer: int) -> None:
        try:
            scratch = _Scratch()
            while batch := work.take(peer):
                left = list(batch)
                try:
                    with self._connection(self._routes[peer]) as connection:
                        self._receive(work, peer, connection, left, scratch)
                except PeerFailed as failed:
                    self._doubted.update(each.chunk for each in left[:1])
                    self.traffic.add(retried=len(left))
                    work.count_failure(
                        peer, failed.error, final=failed.final, slow=failed.slow, since=failed.since
                    )
                    work.back(peer, left)
        except BaseException as error:
            work.fail(error)

    def _receive(
        self, work: Work, peer: int, connection: Connection, left: list[Wanted], scratch: "_Scratch"
    ) -> None:
        """Receive the chunks `left` of a batch; afterwards it has those that did not come."""
        self.traffic.add(requests=1)
        verified = any(each.chunk in self._doubted for each in left)
        sizes, places = connection.ask_chunks(
            self._step, [each.chunk for each in left], verified=verified
        )
        asked = list(zip(left, sizes, strict=True))
        coming = iter(
            [place for size, place in zip(sizes, places, strict=True) if size is not None]
        )
        left[:] = [each for each, size in asked if size is not None]
        if lacked := [each for each, size in asked if size is None and not each.numbered]:
            work.back(peer, lacked, lacked=True)
        for _ in (each for each, size in asked if size is None and each.numbered):
            work.landed(peer)
        for each, size in asked:
            if size not in (None, each.nbytes):
                raise PeerFailed(
                    Corrupt(
                        f"a peer has {size} bytes for chunk {each.chunk.hex()[:12]}; wanted "
                        f"{each.nbytes}"
                    )
                )
        wrong: list[Wanted] = []
        while left:
            each = left[0]
            data = each.memory if each.memory is not None else scratch.of(each.nbytes)
            connection.read_from(next(coming), data)
            self.traffic.add(chunks=1, nbytes=each.nbytes)
            del left[0]
            if each.numbered or is_named(data, each.chunk):
                each.land(data)
                work.landed(peer)
            else:
                wrong.append(each)
        if wrong:
            self._doubted.update(each.chunk for each in wrong)
            self.traffic.add(retried=len(wrong))
            names = ", ".join(each.chunk.hex()[:12] for each in wrong[:4])
            work.count_failure(
                peer,
                Corrupt(
                    f"{len(wrong)} chunks came damaged from a peer, or it is not what it says: "
                    f"{names}"
                ),
            )
            work.back(peer, wrong)

    @contextmanager
    def _connection(self, route: Route) -> Iterator[Connection]:
        """A connection, kept for reuse unless the block fails."""
        connection = self._kept(route) or self._opened(route)
        try:
            yield connection
        except BaseException:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            raise
        with self._lock:
            self._open.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle[route].append(connection)

    def _kept(self, route: Route) -> Connection | None:
        with self._lock:
            connection = self._idle[route].pop() if self._idle[route] else None
            if connection:
                connection.lay_idle()
                self._open.add(connection)
            return connection

    def _opened(self, route: Route) -> Connection:
        connection = route.connect(self._deadline)
        with self._lock:
            if self._closed:
                connection.cut()
            self._open.add(connection)
        return connection


class _Scratch:
    """Memory of one thread for chunks that cannot be received in place, one after the other."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        if len(self._memory) < nbytes:
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]
