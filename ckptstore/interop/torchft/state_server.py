"""How does a transport serve one state: its description, its chunks, and when its memory is freed
(docs/torchft.md)?

The memory of a withdrawn state is freed when its last reader leaves, never before.
"""

import logging
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from ckptstore.errors import Unavailable
from ckptstore.interop.torchft.invitation import HELLO_PATH
from ckptstore.interop.torchft.server import Handler, Refused, Server
from ckptstore.interop.torchft.wire import (
    CHUNKS_PER_REQUEST,
    TRANSFER_HEADER,
    VERIFY_HEADER,
    WAIT_HEADER,
    decode_names,
    parse_path,
)
from ckptstore.plugin.addresses import cut_off
from ckptstore.plugin.model import CHUNK_ID_BYTES

if TYPE_CHECKING:
    from ckptstore.interop.torchft.offer import ServedState

logger = logging.getLogger("ckptstore.transport")

CUTTING_S = 5.0
"""How long a disconnected reader may take to notice."""


class StateServer(Server):
    """Serves at most one state."""

    def __init__(
        self, listening: socket.socket, instance: str, token: str, *, timeout_s: float
    ) -> None:
        self._offer: ServedState | None = None
        self._leaving: ServedState | None = None
        self._readers: dict[socket.socket, str] = {}  # and the transfers that they are for
        super().__init__(listening, instance, token, timeout_s=timeout_s, handler=_StateHandler)

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

    def _leave(self, request: socket.socket) -> None:
        with self._changed:
            self._readers.pop(request, None)
        super()._leave(request)


class _StateHandler(Handler):
    """Serves the state of a transport."""

    server: StateServer

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
