"""How do processes without torch exchange bytes? Over TCP, one connection per rank and lane.

No thread runs besides the caller: a wait for one transfer advances all of them. A connection that
breaks or times out is closed, so that the other side notices. One thread at a time.
"""

import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

Lane: TypeAlias = tuple[int, int]
"""A rank, and one of the lanes of `distributed.collective`."""


class SocketLink:
    """A `Link` over sockets."""

    def __init__(self, connections: Mapping[Lane, socket.socket]) -> None:
        self._selector = selectors.DefaultSelector()
        self._ends = {lane: _End(lane[0], connection) for lane, connection in connections.items()}

    def send(self, rank: int, lane: int, memory: memoryview) -> "SocketTransfer":
        end = self._ends[rank, lane]
        return self._begin(end, end.outgoing, memory)

    def receive(self, rank: int, lane: int, memory: memoryview) -> "SocketTransfer":
        end = self._ends[rank, lane]
        return self._begin(end, end.incoming, memory)

    def leave(self, name: str, data: bytes) -> None:
        """Does nothing: there is no shared place, and a rank that cannot be reached is gone."""

    def left(self, name: str, timeout_s: float) -> bytes | None:
        return None

    def close(self) -> None:
        for end in self._ends.values():
            self._break(end, "the connections were closed")
        self._selector.close()

    def finish(self, transfer: "SocketTransfer", timeout_s: float) -> None:
        """Advance all transfers until `transfer` is complete."""
        deadline, end = time.monotonic() + timeout_s, transfer.end
        while transfer.left and not end.broken:
            ready = self._selector.select(max(deadline - time.monotonic(), 0))
            if not ready and time.monotonic() >= deadline:
                self._break(end, f"silent for {timeout_s:g} s")
            for key, events in ready:
                self._move(key.data, events)
        if transfer.left:
            raise RuntimeError(end.broken)

    def _begin(
        self, end: "_End", queue: "deque[SocketTransfer]", memory: memoryview
    ) -> "SocketTransfer":
        if end.broken:
            raise RuntimeError(end.broken)
        transfer = SocketTransfer(self, end, memory.cast("B"))
        queue.append(transfer)
        self._watch(end)
        return transfer

    def _move(self, end: "_End", events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                end.take_in()
            if events & selectors.EVENT_WRITE:
                end.put_out()
        except OSError as error:
            self._break(end, f"rank {end.rank}: {error}")
        else:
            self._watch(end)

    def _watch(self, end: "_End") -> None:
        """Register the connection for the events that it waits for."""
        events = (selectors.EVENT_READ if end.incoming else 0) | (
            selectors.EVENT_WRITE if end.outgoing else 0
        )
        if events == end.watched:
            return
        if not end.watched:
            self._selector.register(end.connection, events, end)
        elif not events:
            self._selector.unregister(end.connection)
        else:
            self._selector.modify(end.connection, events, end)
        end.watched = events

    def _break(self, end: "_End", why: str) -> None:
        if not end.broken:
            end.broken = why
            if end.watched:
                self._selector.unregister(end.connection)
            end.connection.close()


class SocketTransfer:
    """A `Transfer` over a socket; `left` are the remaining bytes."""

    __slots__ = ("_link", "end", "left")

    def __init__(self, link: SocketLink, end: "_End", left: memoryview) -> None:
        self._link, self.end, self.left = link, end, left

    def wait(self, timeout_s: float) -> None:
        if self.left:
            self._link.finish(self, timeout_s)


class _End:
    """This end of a connection, and its transfers. `broken` is the reason once it has failed."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.rank, self.connection = rank, connection
        self.incoming: deque[SocketTransfer] = deque()
        self.outgoing: deque[SocketTransfer] = deque()
        self.watched = 0
        self.broken = ""

    def take_in(self) -> None:
        while self.incoming:
            transfer = self.incoming[0]
            try:
                count = self.connection.recv_into(transfer.left)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("it closed the connection")
            _through(transfer, count, self.incoming)

    def put_out(self) -> None:
        while self.outgoing:
            transfer = self.outgoing[0]
            try:
                count = self.connection.send(transfer.left)
            except BlockingIOError:
                return
            _through(transfer, count, self.outgoing)


def _through(transfer: SocketTransfer, count: int, queue: "deque[SocketTransfer]") -> None:
    transfer.left = transfer.left[count:]
    if not transfer.left:
        queue.popleft()
