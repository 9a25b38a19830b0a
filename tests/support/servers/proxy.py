"""A TCP proxy that misbehaves: delays, resets, cuts, silence, refusals, answers of its own and
rewritten requests.

One thread per direction of a connection. What a test sets on `faults` holds for connections that
are open as well.
"""

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

_BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: "
    b"close\r\nContent-Length: 58\r\n\r\n"
    b"<Error><Code>SlowDown</Code><Message>wait</Message></Error>"
)
_METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE")


@dataclass
class Faults:
    """What goes wrong. `reset`, `cut` and `busy` are chances: per buffer forwarded, per buffer, per
    HTTP request."""

    latency_s: float = 0.0
    reset: float = 0.0
    cut: float = 0.0
    busy: float = 0.0
    refuse: bool = False
    rewrite: Callable[[bytes], bytes] | None = None
    spoil: Callable[[bytes], bytes] | None = None
    """Rewrites answers."""
    silent: threading.Event = field(default_factory=threading.Event)
    """While it is set, nothing is forwarded and nothing answered."""


FAULTS: dict[str, Callable[[Faults], None]] = {
    "latency": lambda faults: setattr(faults, "latency_s", 0.2),
    "resets": lambda faults: setattr(faults, "reset", 0.05),
    "cuts": lambda faults: setattr(faults, "cut", 0.05),
    "503": lambda faults: setattr(faults, "busy", 0.3),
    "refusal": lambda faults: setattr(faults, "refuse", True),
    "silence": lambda faults: faults.silent.set(),
}
"""What a network and a server do now and then, and more often here."""
DEAD = ("refusal", "silence")
"""Nothing gets through."""


def faults(*at_first: str, but: str = "") -> list[Any]:
    """Parameters: `make test` has a time limit and tries these; `make soak` the others, `make
    test-real` every fault."""
    chosen = tuple(FAULTS) if "CKPTSTORE_TEST_S3" in os.environ else at_first
    return [
        fault if fault in chosen else pytest.param(fault, marks=pytest.mark.soak)
        for fault in FAULTS
        if fault != but
    ]


class Proxy:
    """Forwards to `target`, or does not.

    `requests` counts the HTTP requests that came, `sent_bytes` what came with them and all,
    `round_trips` how often somebody who had got an answer asked again: where a latency keeps the
    answers back, how often somebody waited for one. `beside` are those that were joined to it.
    """

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self.faults = Faults()
        self.requests = 0
        self.sent_bytes = 0
        self.round_trips = 0
        self.beside: list[Proxy] = []
        self._target = target
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: set[socket.socket] = set()
        self._answered: set[socket.socket] = set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def retarget(self, target: tuple[str, int]) -> None:
        """Forward new connections to another place: the server was started anew."""
        self._target = target

    def join(self, other: "Proxy") -> None:
        """What happens here from now on happens to the other one as well: both are ways out of one
        host."""
        other.faults = self.faults
        self.beside.append(other)

    def break_by(self, fault: str) -> None:
        """Let one of `FAULTS` happen from here on."""
        FAULTS[fault](self.faults)
        if fault in DEAD:
            self.drop()

    def heal(self) -> None:
        """From here on nothing goes wrong; connections that were silent are dropped."""
        silent = self.faults.silent
        self.faults = Faults()
        for proxy in (self, *self.beside):
            proxy.faults = self.faults
            if silent.is_set():
                proxy.drop()
        silent.clear()

    def drop(self) -> None:
        """Reset every connection."""
        with self._lock:
            connections = tuple(self._open)
        for connection in connections:
            _reset(connection)

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(
            socket.SHUT_RDWR
        )  # a mere close would let whoever waits in accept() take one more connection
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.faults.refuse:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        up = threading.Thread(target=self._pump, args=(client, server, True), daemon=True)
        up.start()
        self._pump(server, client, False)
        up.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, sink: socket.socket, upward: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self._forward(data, source, sink, upward):
                    return
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(source)
            _reset(sink)

    def _forward(
        self, data: bytes, source: socket.socket, sink: socket.socket, upward: bool
    ) -> bool:
        """False if this connection has ended here."""
        faults = self.faults
        self._count(data, source if upward else sink, upward)
        if upward and data.startswith(_METHODS):
            self.requests += 1
            if self._random.random() < faults.busy:
                source.sendall(_BUSY)
                source.shutdown(socket.SHUT_RDWR)
                sink.shutdown(socket.SHUT_RDWR)
                return False
        while faults.silent.is_set():
            if self._closed.wait(0.01):
                # What was held back never arrives: the cable was pulled.
                _reset(source)
                _reset(sink)
                return False
        if not upward and faults.latency_s:
            self._closed.wait(faults.latency_s)
        if self._random.random() < faults.reset:
            _reset(source)
            _reset(sink)
            return False
        if self._random.random() < faults.cut:
            sink.sendall(data[: self._random.randrange(len(data))])
            sink.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)
            return False
        change = faults.rewrite if upward else faults.spoil
        sink.sendall(change(data) if change else data)
        return True

    def _count(self, data: bytes, client: socket.socket, upward: bool) -> None:
        if not upward:
            self._answered.add(client)
            return
        self.sent_bytes += len(data)
        if client in self._answered:
            self._answered.discard(client)
            self.round_trips += 1


@contextmanager
def proxy_to(target: tuple[str, int], seed: int = 0) -> Iterator[Proxy]:
    """A proxy for the time of the block."""
    proxy = Proxy(target, seed)
    try:
        yield proxy
    finally:
        proxy.close()


def _reset(connection: socket.socket) -> None:
    """Close so that the peer gets an error instead of an end."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
