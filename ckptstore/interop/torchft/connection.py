"""How does a receiver talk to one peer?

It asks, and reads neither longer nor more than announced. `http.client` parses the answers, from a
stream that has one time limit for all bytes of a head or of a chunk: a peer that trickles bytes
counts as slow as one that sends none.
"""

import errno
import io
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPResponse

from ckptstore.errors import CkptStoreError, Conflict, Corrupt, InvalidInput, Unavailable
from ckptstore.interop.torchft.invitation import HELLO_PATH, Invitation
from ckptstore.interop.torchft.wire import (
    DESCRIPTION_BYTES_MAX,
    TRANSFER_HEADER,
    VERIFY_HEADER,
    WAIT_HEADER,
    Description,
    decode_description,
    encode_request,
    path_of,
)
from ckptstore.plugin.addresses import Address, cut_off, reach

HELLOS = 4
"""An address may belong to another process: its answer is awaited for this part of the patience."""

BUSY_S = 0.25
"""The pause before asking again a peer that has no room for another connection."""

_OK, _BUSY = 200, 503
_REFUSED = {401: InvalidInput, 404: Unavailable, 409: Conflict}
_WHY_BYTES_MAX = 4096

_ALL = socket.MSG_WAITALL if sys.platform == "linux" else 0
"""MSG_WAITALL, where the kernel applies the receive timeout to the whole read; elsewhere it applies
to each packet.
"""


class Deadline:
    """The time at which a call gives up."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self.timeout_s, self._what = timeout_s, what
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Remaining seconds. Raises TimeoutError if none remain."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"timed out after {self.timeout_s:g} s: {self._what}")
        return left


class PeerFailed(Exception):
    """A peer failed: `error` is the reason, and `final` says that asking again is useless. A `slow`
    peer gave no answer in time, and may give it later.
    """

    def __init__(self, error: CkptStoreError, *, final: bool = False, slow: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.final, self.slow = error, final, slow


class Route:
    """How to connect to one peer: any of its addresses, then the one that answered.

    `patience_s` doubles after a connection timed out with it, so that a later one gets a slow
    peer's answer.
    """

    def __init__(self, invitation: Invitation, transfer: str, patience_s: float) -> None:
        self.invitation, self.transfer, self.patience_s = invitation, transfer, patience_s
        self._address: Address | None = None

    @property
    def name(self) -> str:
        host, port = self._address or (self.invitation.addresses or (("nowhere", 0),))[0]
        return f"{host} port {port}"

    def connect(self, deadline: Deadline) -> "Connection":
        """Connect. Raises `PeerFailed` if the peer answers at none of its addresses."""
        since, wait_s = time.monotonic(), min(deadline.left(), self.patience_s)
        candidates = (self._address,) if self._address else self.invitation.addresses
        answers, errors = set[int](), set[int]()

        def is_peer(connection: socket.socket) -> bool:
            patience_s = min(wait_s / HELLOS, since + wait_s - time.monotonic())
            answers.add(Connection(connection, self, deadline, patience_s).hello())
            return _OK in answers

        found = reach(candidates, wait_s, is_peer, errors.add)
        if found:
            connection, self._address = found
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Connection(connection, self, deadline)
        deadline.left()
        silent, busy = _SILENT in answers, _BUSY in answers
        late = time.monotonic() >= since + wait_s and errno.ECONNREFUSED not in errors
        if silent:
            self.be_patient(wait_s)
        if busy:
            time.sleep(min(BUSY_S, deadline.left()))
        if not (silent or busy or late):
            self._address = None
        tried = ", ".join(host for host, _ in candidates)
        raise PeerFailed(
            Unavailable(f"no transport of this id answers at {tried or 'any address'}"),
            slow=silent or busy or late,
        )

    def be_patient(self, waited_s: float) -> None:
        """Wait longer than `waited_s` for the next answer."""
        self.patience_s = max(self.patience_s, 2 * waited_s)


class Connection:
    """A connection to a peer. Any error except TimeoutError is a `PeerFailed`, after which the
    connection is unusable.
    """

    def __init__(
        self,
        connection: socket.socket,
        route: Route,
        deadline: Deadline,
        patience_s: float | None = None,
    ) -> None:
        self._socket, self._route, self._deadline = connection, route, deadline
        self._patience_s = route.patience_s if patience_s is None else patience_s
        self._begin(0)

    def hello(self) -> int:
        """Ask for the instance before the token is told: 200 for the right peer; 503 may be it,
        without room; 0 is no answer in time; 404 is another process.
        """
        try:
            instance = self._route.invitation.instance.encode()
            answer = self._exchange("GET", HELLO_PATH, {})
            if answer.status == _OK and self._read(answer, len(instance)) == instance:
                return _OK
            return _BUSY if answer.status == _BUSY else _OTHER
        except PeerFailed as failed:
            return _SILENT if failed.slow else _OTHER

    def describe(self, step: int) -> Description:
        """The description of the state served as `step`; waits until it is served."""
        while True:
            # The peer may wait as long as it can answer within our patience.
            wait_s = min(self._deadline.left(), self._patience_s / 2)
            answer = self._ask("GET", "state", step, {WAIT_HEADER: str(int(wait_s * 1000))})
            if answer.status != _BUSY:
                break
            answer.read(_WHY_BYTES_MAX)
            if answer.will_close or not answer.isclosed():
                raise self._failed("has no room for another connection")
        self._check(answer)
        data = self._read(answer, DESCRIPTION_BYTES_MAX)
        try:
            description = decode_description(data)
        except Corrupt as error:
            raise PeerFailed(error) from error
        if description.step != step:
            raise PeerFailed(
                Conflict(f"{self._route.name} describes step {description.step}; wanted {step}"),
                final=True,
            )
        return description

    def ask_chunks(
        self, step: int, names: Sequence[bytes], nbytes: int, *, verified: bool = False
    ) -> None:
        """Ask for chunks of `nbytes` together, which are to be read with `read_into`, in order.

        With `verified`, the peer compares the chunks with their names before it sends them.
        """
        headers = {VERIFY_HEADER: "1"} if verified else {}
        self._answer = self._ask("POST", "chunks", step, headers, b"".join(names))
        self._check(self._answer)
        if self._answer.length != nbytes:
            raise self._failed(f"sends {self._answer.length} bytes of chunks; wanted {nbytes}")

    def read_into(self, out: memoryview) -> None:
        """Fill `out` with the next bytes of the answer, within the peer's patience."""
        self._begin(len(out))
        if out.nbytes and self._answer.readinto(out) < out.nbytes:
            raise self._failed("sent less than it announced")

    def cut(self) -> None:
        """End the connection, also while another thread reads from it."""
        cut_off(self._socket)

    def close(self) -> None:
        self._socket.close()

    def makefile(self, mode: str) -> io.BufferedReader:
        """The stream of answers, as `http.client` wants it."""
        return io.BufferedReader(_Stream(self))

    def receive(self, out: memoryview) -> int:
        """Read some bytes, or the whole of a large range, before the time of this answer is up."""
        left_s = self._until - time.monotonic()
        wait_s = min(self._deadline.left(), left_s)
        if left_s <= 0:
            raise self._late()
        try:
            # The kernel waits, for the whole of a large range; polling a fast connection would read
            # little more than a packet each time.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(wait_s))
            n = self._socket.recv_into(out, 0, _ALL if len(out) > io.DEFAULT_BUFFER_SIZE else 0)
        except BlockingIOError as error:
            raise self._broken(TimeoutError()) from error
        except OSError as error:
            raise self._broken(error) from error
        if not n:
            raise self._failed("ended the connection early")
        self._came += n
        return n

    def _begin(self, nbytes: int) -> None:
        """Give the peer its patience for the next head, or for the next `nbytes` of a body."""
        self._until = time.monotonic() + self._patience_s
        self._came, self._awaited = 0, nbytes

    def _ask(
        self, method: str, kind: str, step: int, headers: Mapping[str, str], body: bytes = b""
    ) -> HTTPResponse:
        """Ask with the token."""
        own = {
            "Authorization": f"Bearer {self._route.invitation.token}",
            TRANSFER_HEADER: self._route.transfer,
        }
        return self._exchange(method, path_of(kind, step), own | dict(headers), body)

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> HTTPResponse:
        """Send a request and receive the head of its answer."""
        self._begin(0)
        host = self._route.invitation.instance
        try:
            self._socket.settimeout(max(min(self._deadline.left(), self._patience_s), 0.001))
            self._socket.sendall(encode_request(method, path, host, headers, body))
        except OSError as error:
            raise self._broken(error) from error
        answer = HTTPResponse(self, method=method)  # type: ignore[arg-type]  # it uses makefile only
        try:
            answer.begin()
        except (HTTPException, ValueError) as error:
            raise PeerFailed(
                Corrupt(f"a peer answered {error!r:.80}, which is not what a transport says")
            ) from error
        if answer.length is None:
            raise PeerFailed(Corrupt(f"a peer answered {answer.status} without a length"))
        return answer

    def _check(self, answer: HTTPResponse) -> None:
        """Raise the error that an unsuccessful answer tells."""
        if answer.status != _OK:
            why = answer.read(_WHY_BYTES_MAX).decode("utf-8", "replace")
            kind = _REFUSED.get(answer.status, Unavailable)
            raise PeerFailed(
                kind(f"{self._route.name} answers {answer.status}: {why:.200}"),
                final=answer.status in _REFUSED,
            )

    def _read(self, answer: HTTPResponse, limit: int) -> bytes:
        if (announced := answer.length or 0) > limit:
            raise self._failed(f"answers with {announced} bytes; wanted at most {limit}")
        self._begin(announced)
        return answer.read()

    def _broken(self, error: OSError) -> Exception:
        """The error of a failed call. A deadline that has passed is the caller's."""
        self._deadline.left()
        if isinstance(error, TimeoutError):
            return self._late()
        return self._failed(f"broke the connection: {error}")

    def _late(self) -> PeerFailed:
        self._route.be_patient(self._patience_s)
        came = f"{self._came} of {self._awaited} bytes" if self._came else "nothing"
        return PeerFailed(
            Unavailable(f"{self._route.name} sent {came} in {self._patience_s:g} s"),
            slow=True,
        )

    def _failed(self, what: str) -> PeerFailed:
        return PeerFailed(Unavailable(f"{self._route.name} {what}"))


_SILENT, _OTHER = 0, 404


class _Stream(io.RawIOBase):
    """The bytes of one answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]  # what a buffered reader passes
        return self._connection.receive(out)


def _timeval(seconds: float) -> bytes:
    """A timeout for the kernel, for which 0 would mean no limit."""
    seconds = max(seconds, 0.001)
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
