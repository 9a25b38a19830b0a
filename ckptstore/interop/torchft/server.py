"""How does a transport serve chunks over HTTP: access, connection limits, answers
(docs/torchft.md)?

A request without the token learns the instance and nothing else. Every wait, every length and the
number of connections are limited. A connection that has not shown the token is closed after a
while, even if its bytes trickle, and earlier if another needs its slot. When peers hold all slots,
one more connection is told to retry. The memory of a withdrawn state is freed when its last reader
leaves, never before.
"""

import hmac
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from ckptstore.errors import Unavailable
from ckptstore.interop.torchft.connection import cut_off
from ckptstore.interop.torchft.wire import (
    CHUNKS_PER_REQUEST,
    HELLO_PATH,
    TRANSFER_HEADER,
    VERIFY_HEADER,
    WAIT_HEADER,
    decode_names,
    parse_path,
)
from ckptstore.plugin.model import CHUNK_ID_BYTES
from ckptstore.plugin.ranks import listen
from ckptstore.plugin.reading import FileRange
from ckptstore.plugin.work import Condition, behind, start

if TYPE_CHECKING:
    from ckptstore.interop.torchft.offer import ServedState

logger = logging.getLogger("ckptstore.transport")

CONNECTIONS_MAX = 64
HEAD_TIMEOUT_S = 10.0
"""A connection that has not shown the token by then is closed."""
CUTTING_S = 5.0
"""How long a disconnected reader may take to notice."""
_PLACE_S = 1.0
"""How long the thread of a closed connection may take to free its slot."""


class TransportServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves at most one state to peers with `token`, one thread per connection, until `close`."""

    daemon_threads = True
    block_on_close = False
    connections_max = CONNECTIONS_MAX

    def __init__(
        self,
        instance: str,
        token: str,
        *,
        timeout_s: float,
        host: str = "",
        port: int = 0,
        handler: "type[Handler] | None" = None,
    ) -> None:
        listening = listen(host, port)
        kind = handler or _StateHandler
        super().__init__(listening.getsockname()[:2], kind, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.port: int = listening.getsockname()[1]
        self.instance, self.timeout_s = instance, timeout_s
        self._authorization = f"Bearer {token}".encode()
        self._offer: ServedState | None = None
        self._leaving: ServedState | None = None
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # without the token, the oldest first
        self._readers: dict[socket.socket, str] = {}  # and the transfers that they are for
        self._changed = Condition()
        self._thread = threading.Thread(
            target=self.serve_forever, name="ckptstore-transport", args=(0.05,), daemon=True
        )
        try:
            start(self._thread, "no thread can be started that serves this transport")
        except Unavailable:
            self.server_close()
            raise

    def close(self, *, wait: bool = True) -> None:
        """Accept no more connections and close the open ones; with `wait`, return when that is
        done. Idempotent.
        """
        if wait:
            self.shutdown()
        else:
            behind(self.shutdown, "ckptstore-transport-end")
        with self._changed:
            for request in self._open:
                cut_off(request)
        if wait:
            self._thread.join()
        self.server_close()

    def post(self, offer: "ServedState") -> None:
        """Serve `offer`; no other may be served now."""
        with self._changed:
            assert self._offer is None and not self._readers
            self._offer = offer
            self._changed.notify_all()

    def withdraw(self, timeout_s: float) -> None:
        """Stop serving, wait for readers, disconnect those left after `timeout_s`, and free the
        memory. Raises TimeoutError if a disconnected reader does not end; then it is not freed.
        """
        with self._changed:
            self._leaving, self._offer = self._offer or self._leaving, None
            if self._leaving is None:
                return
            if not self._changed.wait_for(lambda: not self._readers, timeout_s):
                logger.warning(
                    "cut off %d connections of peers that were still receiving after %.1f s",
                    len(self._readers),
                    timeout_s,
                )
            for reader in self._readers:
                cut_off(reader)
            if not self._changed.wait_for(lambda: not self._readers, CUTTING_S):
                raise TimeoutError(
                    f"timed out: {len(self._readers)} peers still take a state {CUTTING_S:.0f} s "
                    "after they were cut off"
                )
            if self._leaving:
                self._leaving.close()
            self._leaving = None

    def admit(self, request: socket.socket, authorization: str | None) -> bool:
        """Whether a connection shows the token, compared in constant time; then it keeps its
        slot.
        """
        shown = (authorization or "").encode("latin-1", "replace")
        if not hmac.compare_digest(shown, self._authorization):
            return False
        with self._changed:
            self._strangers.pop(request, None)
        return True

    def join(
        self, request: socket.socket, transfer: str, step: int, wait_s: float
    ) -> "ServedState | None":
        """The state served within `wait_s`, None if there is none. If it is that of `step`, the
        connection is its reader until it ends. A transfer that has begun may read a state that is
        being withdrawn.
        """
        with self._changed:
            offer = self._leaving
            if not offer or offer.step != step or transfer not in self._readers.values():
                self._changed.wait_for(lambda: self._offer is not None, wait_s)
                offer = self._offer
            if offer and offer.step == step:
                self._readers[request] = transfer
            return offer

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._has_room():
            with self._changed:
                self._open.add(request)
                self._strangers[request] = time.monotonic()
            try:
                super().process_request(request, client_address)
                return
            except RuntimeError as error:  # no thread: the limit of the user or the container
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
        with self._changed:
            for request, since in self._strangers.items():
                if since < before:
                    cut_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a peer's connection broke", exc_info=True)

    def _has_room(self) -> bool:
        """Whether a slot is free, if need be that of the oldest connection without the token."""
        with self._changed:
            if len(self._open) < self.connections_max:
                return True
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]  # it is cut off once
            cut_off(oldest)
            return self._changed.wait_for(lambda: len(self._open) < self.connections_max, _PLACE_S)

    def _leave(self, request: socket.socket) -> None:
        with self._changed:
            self._open.discard(request)
            self._strangers.pop(request, None)
            self._readers.pop(request, None)
            self._changed.notify_all()


class Refused(Exception):
    """A request is answered with a status and a reason."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One connection: requests one after the other, until the peer is done. A request shows the
    token, or asks for the instance."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ckptstore", ""
    disable_nagle_algorithm = True
    timeout = HEAD_TIMEOUT_S
    server: TransportServer

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            self._refuse(refused)

    def _refuse(self, refused: Refused) -> None:
        self._answer(refused.status, str(refused).encode())

    def _show_token(self) -> None:
        """Refuse a request without the token."""
        if not self.server.admit(self.connection, self.headers.get("Authorization")):
            self.close_connection = True
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "this is not the token of this transport: take its metadata again",
            )
        self.connection.settimeout(self.server.timeout_s)

    def _number(self, header: str) -> int | None:
        value = self.headers.get(header, "")
        return int(value) if value.isdecimal() and len(value) < 10 else None

    def _send_span(self, span: memoryview | FileRange) -> None:
        if isinstance(span, memoryview):
            self.connection.sendall(span)
        elif (sent := self.connection.sendfile(span, span.offset, span.nbytes)) < span.nbytes:
            raise Unavailable(f"a pack ends {span.nbytes - sent} bytes early; run `ckptstore fsck`")

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self._begin(status, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: %s", self.address_string(), format % args)


class _StateHandler(Handler):
    """Serves the state of a transport."""

    def do_GET(self) -> None:
        with self._refusals():
            if self.path == HELLO_PATH:
                self._answer(HTTPStatus.OK, self.server.instance.encode())
                return
            kind, step = self._admitted()
            if kind != "state":
                raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "chunks are asked for with POST")
            self._answer(HTTPStatus.OK, self._offer(step, self._wait_s()).description)

    def do_POST(self) -> None:
        with self._refusals():
            names = self._names()
            kind, step = self._admitted()
            if kind == "state" or names is None:
                raise Refused(
                    HTTPStatus.BAD_REQUEST,
                    f"wanted the names of 1 to {CHUNKS_PER_REQUEST} chunks, {CHUNK_ID_BYTES} bytes "
                    "each",
                )
            offer = self._offer(step, 0)
            sizes = [found.nbytes for name in names if (found := offer.find(name))]
            if len(sizes) < len(names):
                raise Refused(
                    HTTPStatus.NOT_FOUND,
                    f"{len(names) - len(sizes)} chunks are not of the state that is served now; "
                    "receive again",
                )
            self._send_chunks(offer, names, sum(sizes))

    def _names(self) -> list[bytes] | None:
        length = self._number("Content-Length")
        if length is None or length > CHUNKS_PER_REQUEST * CHUNK_ID_BYTES:
            self.close_connection = True  # the rest is not read
            return None
        return decode_names(self.rfile.read(length))

    def _admitted(self) -> tuple[str, int]:
        """What a peer with the token asks for, and the step."""
        self._show_token()
        if (asked := parse_path(self.path)) is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such path")
        return asked

    def _offer(self, step: int, wait_s: float) -> "ServedState":
        """The offer for `step`. A connection that has joined stays a reader until it ends."""
        transfer = self.headers.get(TRANSFER_HEADER, "")[:64]
        offer = self.server.join(self.connection, transfer, step, wait_s)
        if offer is None:
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE, f"nothing is served now; wanted step {step}"
            )
        if offer.step != step:
            raise Refused(
                HTTPStatus.CONFLICT,
                f"it serves step {offer.step}; wanted {step}",
            )
        return offer

    def _wait_s(self) -> float:
        """How long the peer allows us to wait."""
        return min((self._number(WAIT_HEADER) or 0) / 1000, self.server.timeout_s)

    def _send_chunks(self, offer: "ServedState", names: Sequence[bytes], nbytes: int) -> None:
        self._begin(HTTPStatus.OK, nbytes)
        try:
            for span in offer.spans(names, verified=VERIFY_HEADER in self.headers):
                self._send_span(span)
        except Unavailable as error:
            # The length was already sent, so only an early end can signal the error.
            logger.warning("a chunk cannot be served: %s", error)
            self.close_connection = True
