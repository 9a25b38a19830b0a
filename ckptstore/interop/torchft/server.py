"""How does a process answer peers over HTTP: access, connection limits, answers (docs/torchft.md)?

A request without the token learns the instance and nothing else. Every wait, every length and the
number of connections are limited. A connection that has not shown the token is closed after a
while, even if its bytes trickle, and earlier if another needs its slot. When peers hold all slots,
one more connection is told to retry. An agent of a host imports this, and little else.
"""

import hmac
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from ckptstore.errors import Unavailable
from ckptstore.plugin.addresses import cut_off
from ckptstore.plugin.storage import FileRange
from ckptstore.plugin.work import Condition, behind, start

logger = logging.getLogger("ckptstore.transport")

CONNECTIONS_MAX = 64
HEAD_TIMEOUT_S = 10.0
"""A connection that has not shown the token by then is closed."""
_PLACE_S = 1.0
"""How long the thread of a closed connection may take to free its slot."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves peers with `token`, one thread per connection, until `close`."""

    daemon_threads = True
    block_on_close = False
    connections_max = CONNECTIONS_MAX

    def __init__(
        self,
        listening: socket.socket,
        instance: str,
        token: str,
        *,
        timeout_s: float,
        handler: "type[Handler]",
    ) -> None:
        super().__init__(listening.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.port: int = listening.getsockname()[1]
        self.instance, self.timeout_s = instance, timeout_s
        self._authorization = f"Bearer {token}".encode()
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # without the token, the oldest first
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
    server: Server

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
