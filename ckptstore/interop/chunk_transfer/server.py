"""How does a transport serve chunks over HTTP: access, connection limits, answers
(docs/torchft.md)?

A request without the token learns the instance and nothing else. Every wait, every length and the
number of connections are limited. A connection that has not shown the token is closed after a
while, even if its bytes trickle, and earlier if another needs its slot. When peers hold all slots,
one more connection is told to retry.
"""

import hmac
import logging
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.threads import behind, start
from ckptstore.errors import Unavailable
from ckptstore.interop.chunk_transfer.chunk_names import BLAKE3
from ckptstore.interop.chunk_transfer.protocol import (
    EARLY_HEADER,
    HELLO_PATH,
    IDS_PER_REQUEST,
    NAMES_HEADER,
    NEAR_HEADER,
    STEP_HEADER,
    TRANSFER_HEADER,
    VERIFY_HEADER,
    WAIT_HEADER,
    encode_ids,
    encode_places,
    encode_sizes,
    parse_path,
    split_ids,
)
from ckptstore.interop.chunk_transfer.publication import OtherStep, Publication, Reader
from ckptstore.interop.chunk_transfer.served_state import ServedState
from ckptstore.repository.chunk_reader import FileRange

logger = logging.getLogger("ckptstore.transport")

CONNECTIONS_MAX = 64
HEAD_TIMEOUT_S = 10.0
"""A connection that has not shown the token by then is closed."""
_PLACE_S = 1.0
"""How long the thread of a closed connection may take to free its slot."""


class TransportServer:
    """Serves `publication` to peers with `token`, in its own threads, until `close`."""

    def __init__(
        self,
        publication: Publication,
        instance: str,
        token: str,
        *,
        timeout_s: float,
        host: str = "",
        port: int = 0,
    ) -> None:
        self._server = _Server(
            _listen(host, port), _Service(publication, instance, token, timeout_s)
        )
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ckptstore-transport", args=(0.05,), daemon=True
        )
        try:
            start(self._thread, "no thread can be started that serves this transport")
        except Unavailable:
            self._server.server_close()
            raise

    def close(self, *, wait: bool = True) -> None:
        """Accept no more connections and close the open ones; with `wait`, return when that is
        done. Idempotent.
        """
        if wait:
            self._server.shutdown()
        else:
            behind(self._server.shutdown, "ckptstore-transport-end")
        self._server.cut_all()
        if wait:
            self._thread.join()
        self._server.server_close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket for IPv4 and IPv6, whichever the host has, or for one address."""
    if host:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=CONNECTIONS_MAX,
        )
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=CONNECTIONS_MAX
        )
    return socket.create_server(("", port), backlog=CONNECTIONS_MAX)


class _Service:
    """State shared by all connections."""

    def __init__(
        self, publication: Publication, instance: str, token: str, timeout_s: float
    ) -> None:
        self.publication, self.instance, self.timeout_s = publication, instance, timeout_s
        self._authorization = f"Bearer {token}".encode()

    def admits(self, authorization: str | None) -> bool:
        """Compare a token in constant time."""
        return hmac.compare_digest(
            (authorization or "").encode("latin-1", "replace"), self._authorization
        )


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread per connection, up to a limit."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, service: _Service) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.service = listening, service
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # by start time, the oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False) or (
            self._cut_stranger() and self._places.acquire(timeout=_PLACE_S)
        ):
            with self._lock:
                self._open.add(request)
                self._strangers[request] = time.monotonic()
            try:
                super().process_request(request, client_address)
                return
            except (
                RuntimeError
            ) as error:  # no thread can be started: the limit of the user or the container
                logger.warning("a peer's connection is refused: %s", error)
                self._leave(request)
        with suppress(OSError):
            request.send(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: "
                b"close\r\n\r\n",
                socket.MSG_DONTWAIT,
            )
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """Close connections that have not shown the token in time. Called several times a
        second.
        """
        before = time.monotonic() - HEAD_TIMEOUT_S
        with self._lock:
            late = [request for request, since in self._strangers.items() if since < before]
        for request in late:
            cut(request)

    def admitted(self, request: socket.socket) -> None:
        """This connection has shown the token and keeps its slot."""
        with self._lock:
            self._strangers.pop(request, None)

    def _cut_stranger(self) -> bool:
        """Close the oldest connection that has not shown the token."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                cut(oldest)
            return oldest is not None

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._open.discard(request)
            self._strangers.pop(request, None)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a peer's connection broke", exc_info=True)

    def cut_all(self) -> None:
        with self._lock:
            for request in self._open:
                cut(request)


class _Handler(BaseHTTPRequestHandler):
    """One connection: requests one after the other, until the peer is done."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ckptstore", ""
    disable_nagle_algorithm = True
    timeout = HEAD_TIMEOUT_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._reader = Reader(lambda: cut(self.connection))

    def finish(self) -> None:
        self.server.service.publication.leave(self._reader)
        super().finish()

    def do_GET(self) -> None:
        if self.path == HELLO_PATH:
            self._answer(HTTPStatus.OK, self.server.service.instance.encode())
            return
        named = self._named()
        if named and named[0] == "state":
            wait_s = self._wait_s()
            until = time.monotonic() + wait_s
            offer = self._offer(named[1], wait_s)
            early, names = EARLY_HEADER in self.headers, self.headers.get(NAMES_HEADER, BLAKE3)
            description = (
                offer.describe(names, early=early, wait_s=until - time.monotonic())
                if offer
                else None
            )
            if description is not None:
                self._answer(HTTPStatus.OK, description)
            elif offer:
                self._refuse(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"step {named[1]} is still being copied, or hashed",
                )
        elif named:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "chunks are asked for with POST")

    def do_POST(self) -> None:
        ids = self._ids()
        named = self._named()
        if not named:
            return
        if named[0] == "state" or ids is None:
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                f"wanted the names of 1 to {IDS_PER_REQUEST} chunks, {CHUNK_ID_BYTES} bytes each",
            )
            return
        offer = self._offer(named[1], 0)
        if offer and named[0] == "ids":
            self._answer(HTTPStatus.OK, encode_ids(offer.ids(ids)))
        elif offer:
            self._send_chunks(offer, ids)

    def _ids(self) -> list[bytes] | None:
        length = self.headers.get("Content-Length", "")
        if (
            not length.isdecimal()
            or len(length) > 9
            or int(length) > IDS_PER_REQUEST * CHUNK_ID_BYTES
        ):
            self.close_connection = True  # the rest is not read
            return None
        return split_ids(self.rfile.read(int(length)))

    def _named(self) -> tuple[str, int] | None:
        """The request of an admitted peer; any other request is refused."""
        if not self.server.service.admits(self.headers.get("Authorization")):
            self.close_connection = True
            self._refuse(
                HTTPStatus.UNAUTHORIZED,
                "this is not the token of this transport: take its metadata again",
            )
            return None
        self.server.admitted(self.connection)
        self.connection.settimeout(self.server.service.timeout_s)
        named = parse_path(self.path)
        if named is None:
            self._refuse(HTTPStatus.NOT_FOUND, "no such path")
        return named

    def _offer(self, step: int, wait_s: float) -> ServedState | None:
        """The offer for `step`. A connection that has joined stays a reader until it ends."""
        self._reader.transfer = self.headers.get(TRANSFER_HEADER, "")[:64]
        try:
            offer = self.server.service.publication.join(self._reader, step, wait_s)
        except OtherStep as error:
            self._refuse(
                HTTPStatus.CONFLICT,
                f"step {error.step} is served, not {step}",
                {STEP_HEADER: str(error.step)},
            )
            return None
        if offer is None:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"nothing is served now; wanted step {step}"
            )
        return offer

    def _wait_s(self) -> float:
        """How long the peer allows us to wait."""
        wait_ms = self.headers.get(WAIT_HEADER, "0")
        return (
            min(int(wait_ms) / 1000, self.server.service.timeout_s)
            if wait_ms.isdecimal() and len(wait_ms) < 10
            else 0
        )

    def _send_chunks(self, offer: ServedState, ids: list[bytes]) -> None:
        sizes = offer.sizes(ids, self._wait_s())
        near = NEAR_HEADER in self.headers
        places = offer.places(ids) if near else [None] * len(ids)
        sent = [
            (chunk, size)
            for chunk, size, place in zip(ids, sizes, places, strict=True)
            if size is not None and place is None
        ]
        there = [chunk for chunk, _ in sent]
        table = encode_sizes(sizes) + (encode_places(places) if near else b"")
        self._begin(HTTPStatus.OK, len(table) + sum(size for _, size in sent))
        self.wfile.write(table)
        try:
            for span in offer.spans(there, verified=VERIFY_HEADER in self.headers):
                self._send_span(span)
        except Unavailable as error:
            # The length was already sent, so only an early end can signal the error.
            logger.warning("a chunk cannot be served: %s", error)
            self.close_connection = True

    def _send_span(self, span: memoryview | FileRange) -> None:
        if isinstance(span, memoryview):
            self.connection.sendall(span)
        elif (sent := self.connection.sendfile(span, span.offset, span.nbytes)) < span.nbytes:
            raise Unavailable(f"a pack ends {span.nbytes - sent} bytes early; run `ckptstore fsck`")

    def _answer(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self._begin(status, len(body), headers)
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, why.encode(), headers)

    def _begin(
        self, status: HTTPStatus, length: int, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(length),
            "Content-Type": "application/octet-stream",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: %s", self.address_string(), format % args)


def cut(connection: socket.socket) -> None:
    """End a connection, also while another thread waits on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
