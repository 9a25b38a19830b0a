"""How does a receiver talk to one peer?

It asks, and reads neither longer nor more than announced. It uses a bare socket, so that every read
has a time limit for all of its bytes: a peer that trickles bytes counts as slow as one that sends
none.
"""

import errno
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.distributed.addresses import Address, reach
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, InvalidInput, Unavailable
from ckptstore.interop.chunk_transfer.process_vm import is_near, read_memory
from ckptstore.interop.chunk_transfer.protocol import (
    DESCRIPTION_BYTES_MAX,
    EARLY_HEADER,
    HEAD_BYTES_MAX,
    HELLO_PATH,
    NAMES_HEADER,
    NEAR_HEADER,
    STEP_HEADER,
    TRANSFER_HEADER,
    VERIFY_HEADER,
    WAIT_HEADER,
    Description,
    Head,
    Invitation,
    chunks_path,
    decode_description,
    decode_head,
    decode_ids,
    decode_places,
    decode_sizes,
    encode_request,
    ids_path,
    sizes_bytes,
    state_path,
)

HELLO_S = 2.0
"""The first wait for an answer at an address, which may belong to another process. It doubles with
each attempt without an answer.
"""
BUSY_S = 0.25
"""The pause before asking again a peer that has no room for another connection."""

_REFUSED = {401: InvalidInput, 409: Conflict}
_WHY_BYTES_MAX = 4096
_HEAD_PEEK_BYTES = 1024
_HEAD_END = b"\r\n\r\n"

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
    """A peer failed: `error` is the reason, and `final` says that asking again is useless.

    A `slow` peer gave no answer in time, and may give it later. `since` is the monotonic time at
    which the failed connection began: connections that break together count as one failure. An idle
    connection, which the peer may have closed meanwhile, counts from no time.
    """

    def __init__(
        self,
        error: CkptStoreError,
        *,
        final: bool = False,
        slow: bool = False,
        since: float = float("inf"),
    ) -> None:
        super().__init__(str(error))
        self.error, self.final, self.slow, self.since = error, final, slow, since


class Route:
    """How to connect to one peer: any of its addresses, then the one that answered.

    `patience_s` doubles after a connection timed out with it, so that a later one gets a slow
    peer's answer.
    """

    def __init__(self, invitation: Invitation, transfer: str, patience_s: float) -> None:
        self.invitation, self.transfer, self.patience_s = invitation, transfer, patience_s
        self._hello_s = HELLO_S
        self._address: Address | None = None
        self.near = invitation.near if is_near(invitation.near, invitation.instance) else None

    @property
    def name(self) -> str:
        host, port = self._address or (self.invitation.addresses or (("nowhere", 0),))[0]
        return f"{host} port {port}"

    def connect(self, deadline: Deadline) -> "Connection":
        """Connect. Raises `PeerFailed` if the peer answers at none of its addresses."""
        since, wait_s, hello_s = (
            time.monotonic(),
            min(deadline.left(), self.patience_s),
            self._hello_s,
        )
        candidates = (self._address,) if self._address else self.invitation.addresses
        answers, errors = set[int](), set[int]()

        def is_peer(connection: socket.socket) -> bool:
            answer = _hello(
                connection,
                self.invitation.instance,
                min(hello_s, since + wait_s - time.monotonic()),
            )
            answers.add(answer)
            return answer == 200

        found = reach(candidates, wait_s, is_peer, errors.add)
        if found is None:
            deadline.left()
            late = _SILENT in answers or (
                time.monotonic() >= since + wait_s and errno.ECONNREFUSED not in errors
            )
            slow = late or _BUSY in answers
            if _SILENT in answers:
                self.be_patient(wait_s)
                self._hello_s = max(self._hello_s, 2 * hello_s)
            if _BUSY in answers:
                time.sleep(min(BUSY_S, deadline.left()))
            if not slow:
                self._address = None
            tried = ", ".join(host for host, _ in candidates)
            raise PeerFailed(
                Unavailable(f"no transport of this id answers at {tried or 'any address'}"),
                slow=slow,
                since=since,
            )
        connection, self._address = found
        self._hello_s = HELLO_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(connection, self, deadline, since)

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
        since: float = float("inf"),
    ) -> None:
        self._socket, self._route, self._deadline, self._since = connection, route, deadline, since
        self._patience_s = route.patience_s

    def lay_idle(self) -> None:
        """Mark it as kept for reuse: a close by the peer is then no failure."""
        self._since, self._patience_s = float("-inf"), self._route.patience_s

    def describe(self, step: int, names: str, *, early: bool = False) -> Description:
        """The description of the state served as `step`, its chunks called by `names` or by ids;
        waits until it is served. With `early`, an outline is enough while the peer still copies.
        """
        wanted = {NAMES_HEADER: names} | ({EARLY_HEADER: "1"} if early else {})
        while True:
            head = self._ask("GET", state_path(step), self._waiting() | wanted)
            if head.status != 503:
                break
            self._skip(head)
        data = self._body(head, DESCRIPTION_BYTES_MAX, step)
        try:
            description = decode_description(bytes(data))
        except Corrupt as error:
            raise PeerFailed(error) from error
        if description.step != step:
            raise PeerFailed(
                Conflict(f"{self._route.name} describes step {description.step}; wanted {step}"),
                final=True,
            )
        if description.early and not early:
            raise self._failed("gives an outline where a description was wanted")
        return description

    def ask_chunks(
        self, step: int, ids: Sequence[bytes], *, verified: bool = False
    ) -> tuple[list[int | None], list[int | None]]:
        """The sizes of chunks, None for those not served, and their addresses in the peer's memory,
        None for those that follow on the connection, in order.

        With `verified`, the peer compares the chunks with their ids before it sends them.
        """
        headers = ({VERIFY_HEADER: "1"} if verified else {}) | (
            {NEAR_HEADER: "1"} if self._route.near else {}
        )
        head = self._ask("POST", chunks_path(step), self._waiting() | headers, b"".join(ids))
        if head.status != 200:
            self._body(head, 0, step)
        table = sizes_bytes(len(ids))
        sizes = decode_sizes(bytes(self._read(table)))
        places: list[int | None] = (
            decode_places(bytes(self._read(table))) if self._route.near else [None] * len(ids)
        )
        sent = sum(
            size
            for size, place in zip(sizes, places, strict=True)
            if size is not None and place is None
        )
        if head.length != (2 * table if self._route.near else table) + sent:
            raise self._failed(f"announces {head.length} bytes for chunks of other sizes")
        return sizes, places

    def ask_ids(self, step: int, names: Sequence[bytes]) -> list[bytes | None]:
        """The ids of chunks given by quick names, None for those not served."""
        head = self._ask("POST", ids_path(step), {}, b"".join(names))
        found = decode_ids(bytes(self._body(head, len(names) * CHUNK_ID_BYTES, step)))
        if len(found) != len(names):
            raise self._failed(f"gives {len(found)} ids for {len(names)} chunks")
        return found

    def read_from(self, place: int | None, out: memoryview) -> None:
        """Fill `out` from the peer's memory, or from the connection."""
        if place is None:
            self.read_into(out)
            return
        self._deadline.left()
        if not (self._route.near and read_memory(self._route.near.pid, place, out)):
            raise self._failed("does not let its memory be read any more")

    def read_into(self, out: memoryview) -> None:
        """Fill `out`, within the peer's patience."""
        end = time.monotonic() + self._patience_s
        done = 0
        while done < len(out):
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise self._late(f"sent {done} of {len(out)} bytes")
            done += self._receive(out[done:], left_s, _ALL)

    def cut(self) -> None:
        """End the connection, also while another thread reads from it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _waiting(self) -> dict[str, str]:
        """How long the peer may wait before it answers within our patience."""
        return {WAIT_HEADER: str(int(min(self._deadline.left(), self._patience_s / 2) * 1000))}

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Head:
        invitation = self._route.invitation
        common = {
            "Authorization": f"Bearer {invitation.token}",
            TRANSFER_HEADER: self._route.transfer,
        }
        try:
            self._socket.settimeout(min(self._deadline.left(), self._patience_s))
            self._socket.sendall(
                encode_request(method, path, invitation.instance, common | headers, body)
            )
        except OSError as error:
            raise self._broken(error) from error
        return self._head()

    def _head(self) -> Head:
        end = time.monotonic() + self._patience_s
        try:
            return _read_head(lambda out, flags: self._receive(out, end - time.monotonic(), flags))
        except Corrupt as error:
            raise PeerFailed(error) from error

    def _body(self, head: Head, limit: int, step: int) -> bytearray:
        """The body of a successful answer; any other body is the reason of the error."""
        if head.status != 200:
            why = self._read(min(head.length, _WHY_BYTES_MAX)).decode("utf-8", "replace")
            kind = _REFUSED.get(head.status, Unavailable)
            served = head.headers.get(STEP_HEADER.lower())
            said = (
                f"serves step {served:.20}; wanted {step}"
                if served
                else f"answers {head.status}: {why:.200}"
            )
            raise PeerFailed(kind(f"{self._route.name} {said}"), final=head.status in _REFUSED)
        if head.length > limit:
            raise self._failed(f"answers with {head.length} bytes; wanted at most {limit}")
        return self._read(head.length)

    def _skip(self, head: Head) -> None:
        self._read(min(head.length, _WHY_BYTES_MAX))
        if head.length > _WHY_BYTES_MAX or head.headers.get("connection") == "close":
            raise self._failed("has no room for another connection")

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return data

    def _receive(self, out: memoryview, within_s: float, flags: int = 0) -> int:
        wait_s = min(self._deadline.left(), max(within_s, 0.001))
        try:
            if flags & _ALL:
                # The kernel waits for the whole range; polling a fast connection would read little
                # more than a packet each time.
                self._socket.settimeout(None)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(wait_s))
            else:
                self._socket.settimeout(wait_s)
            n = self._socket.recv_into(out, 0, flags)
        except BlockingIOError as error:
            raise self._broken(TimeoutError()) from error
        except OSError as error:
            raise self._broken(error) from error
        if not n:
            raise self._failed("ended the connection early")
        return n

    def _broken(self, error: OSError) -> Exception:
        """The error of a failed call. A deadline that has passed is the caller's."""
        self._deadline.left()
        if isinstance(error, TimeoutError):
            return self._late("sent nothing")
        return self._failed(f"broke the connection: {error}")

    def _late(self, what: str) -> PeerFailed:
        self._route.be_patient(self._patience_s)
        return PeerFailed(
            Unavailable(f"{self._route.name} {what} in {self._patience_s:g} s"),
            slow=True,
            since=self._since,
        )

    def _failed(self, what: str) -> PeerFailed:
        return PeerFailed(Unavailable(f"{self._route.name} {what}"), since=self._since)


_SILENT, _BUSY, _OTHER = 0, 503, 404


def _hello(connection: socket.socket, instance: str, wait_s: float) -> int:
    """Ask an address for the instance before it is told the token. 200 is the right peer; 503 may
    be it, without room; 0 is no answer within `wait_s`; 404 is another process.
    """
    end = time.monotonic() + wait_s

    def receive(out: memoryview, flags: int = 0) -> int:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        n = connection.recv_into(out, 0, flags)
        if not n:
            raise ConnectionError
        return n

    try:
        connection.settimeout(max(wait_s, 0.001))
        connection.sendall(encode_request("GET", HELLO_PATH, instance, {}, b""))
        head = _read_head(receive)
        if head.status != 200 or head.length != len(instance):
            return _BUSY if head.status == _BUSY else _OTHER
        body = bytearray(head.length)
        got = 0
        while got < head.length:
            got += receive(memoryview(body)[got:])
        return 200 if body == instance.encode() else _OTHER
    except TimeoutError:
        return _SILENT
    except (OSError, Corrupt):
        return _OTHER


def _timeval(seconds: float) -> bytes:
    """A timeout for the kernel, for which 0 would mean no limit."""
    seconds = max(seconds, 0.001)
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _read_head(receive: Callable[[memoryview, int], int]) -> Head:
    """Read the head of an answer. It is peeked first, so that the bytes after it stay in the
    socket.
    """
    data = bytearray()
    buffer = memoryview(bytearray(_HEAD_PEEK_BYTES))
    while len(data) <= HEAD_BYTES_MAX:
        seen = data + buffer[: receive(buffer, socket.MSG_PEEK)]
        end = seen.find(_HEAD_END, max(len(data) - len(_HEAD_END), 0))
        stop = end + len(_HEAD_END) if end >= 0 else len(seen)
        while len(data) < stop:
            data += buffer[: receive(buffer[: stop - len(data)], 0)]
        if end >= 0:
            return decode_head(bytes(data))
    raise Corrupt(f"a peer's answer has a head of more than {HEAD_BYTES_MAX} bytes")
