"""How does a process ask the agent of another host?

A connection is used by one request at a time and kept for the next. One that broke is replaced: a
request may be repeated, since objects do not change and the name of a new one is taken once.
"""

import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import quote

from ckptstore.errors import Conflict, Corrupt, NoSpace, NotFound, Unavailable
from ckptstore.interop.torchft.invitation import HELLO_PATH, Invitation
from ckptstore.plugin.addresses import reach
from ckptstore.plugin.storage import FileRange
from ckptstore.plugin.work import survives_forks
from ckptstore.plugins.hosts.agent import (
    JOB_HEADER,
    LISTS,
    NEW_HEADER,
    OBJECT_BYTES_MAX,
    OBJECTS,
    SIZE_HEADER,
    TAIL_HEADER,
)

CONNECT_S = 5.0
ANSWER_S = 60.0
"""An agent that sends nothing for so long does not answer."""
TRIES = 3
PAUSE_S = 0.2

_ERRORS = {400: Unavailable, 404: NotFound, 409: Unavailable, 412: Conflict, 507: NoSpace}


class Peer:
    """The agent of host `name`, for requests of `job`. Thread-safe."""

    def __init__(self, name: str, agent: Invitation, job: str) -> None:
        self.name, self._agent, self._job = name, agent, job
        survives_forks(self)

    def forked(self) -> None:
        """A child opens connections of its own."""
        self._lock = threading.Lock()
        self._free: list[http.client.HTTPConnection] = []

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Storage.read`."""
        last = "" if stop is None else str(stop - 1)
        if stop is not None and stop <= start:
            return b""
        with self._asking("GET", OBJECTS + quote(key), {"Range": f"bytes={start}-{last}"}) as got:
            return _whole(got, key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """As `Storage.read_into`."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if not nbytes:
            return
        wanted = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        with self._asking("GET", OBJECTS + quote(key), wanted) as got:
            if got.length != nbytes:
                raise Corrupt(f"{key} on host {self.name} ends early; run `ckptstore fsck`")
            for buffer in buffers:
                view = buffer.cast("B")
                while view.nbytes:
                    came = got.readinto(view)
                    if not came:
                        raise ConnectionResetError(f"{key} ended early")
                    view = view[came:]

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        """As `Storage.read_tail`."""
        with self._asking("GET", OBJECTS + quote(key), {TAIL_HEADER: str(nbytes)}) as got:
            return _whole(got, key), int(got.headers[SIZE_HEADER])

    def size(self, key: str) -> int | None:
        """As `Storage.size`."""
        try:
            return self.read_tail(key, 0)[1]
        except NotFound:
            return None

    def put(self, key: str, data: bytes | memoryview) -> None:
        """As `Storage.put`."""
        with self._asking("PUT", OBJECTS + quote(key), {}, bytes(data)):
            pass

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """As `Storage.put_new`. Raises `Conflict` for an entry of the log where the one before it
        is absent."""
        with self._asking("PUT", OBJECTS + quote(key), {NEW_HEADER: "1"}, data) as got:
            return got.status == http.client.CREATED

    def put_file(self, whole: FileRange) -> None:
        """Put a new object that lies here in a file. Raises `Conflict` if it is there with another
        size."""
        with self._asking("PUT", OBJECTS + quote(whole.key), {NEW_HEADER: "1"}, whole) as got:
            created = got.status == http.client.CREATED
        if not created and self.size(whole.key) != whole.nbytes:
            raise Conflict(f"{whole.key} has other bytes on host {self.name}; join again")

    def upload(self, key: str) -> "Upload":
        """Begin a new object whose bytes follow."""
        return Upload(self, key)

    def delete(self, key: str) -> None:
        """As `Storage.delete`."""
        with self._asking("DELETE", OBJECTS + quote(key), {}):
            pass

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """As `Storage.list`."""
        with self._asking("GET", LISTS + quote(prefix), {}) as got:
            rows = _whole(got, prefix).decode().splitlines()
        for row in rows:
            size, _, key = row.partition(" ")
            yield key, int(size)

    def answers(self) -> bool:
        """Whether the agent is there."""
        try:
            self._connected().close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            while self._free:
                self._free.pop().close()

    @contextmanager
    def _asking(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | FileRange | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, which the block reads. Raises what the agent says."""
        with self._answered(*self._ask(method, path, headers, body)) as answer:
            yield answer

    @contextmanager
    def _answered(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> Iterator[http.client.HTTPResponse]:
        try:
            if answer.status >= http.client.BAD_REQUEST:
                why = answer.read(4096).decode("utf-8", "replace")
                kind = _ERRORS.get(answer.status, Unavailable)
                raise kind(f"host {self.name} answers {answer.status}: {why}")
            yield answer
            if answer.length == 0:
                answer.read()  # else its connection is not free for the next request
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(f"host {self.name} broke off: {error!r}") from error
        finally:
            if answer.isclosed() and connection.sock is not None:
                with self._lock:
                    self._free.append(connection)
            else:
                connection.close()  # what is left of the answer is not read

    def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | FileRange | None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        for left in reversed(range(TRIES)):
            connection = None
            try:
                connection = self._taken() if left == TRIES - 1 else self._connected()
                self._send(connection, method, path, headers, body)
                answer = connection.getresponse()
                if answer.status != http.client.SERVICE_UNAVAILABLE:
                    return connection, answer
                failed: Exception = ConnectionRefusedError("it has no room for a connection")
            except (OSError, http.client.HTTPException) as error:
                failed = error
            if connection:
                connection.close()
            if left:
                time.sleep(PAUSE_S)
        raise Unavailable(f"host {self.name} does not answer: {failed!r}") from failed

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | FileRange | None,
    ) -> None:
        own = {"Authorization": f"Bearer {self._agent.token}", JOB_HEADER: self._job}
        own |= headers
        if isinstance(body, FileRange):
            connection.request(method, path, None, own | {"Content-Length": str(body.nbytes)})
            opened: Any = connection.sock
            if (sent := opened.sendfile(body, body.offset, body.nbytes)) < body.nbytes:
                raise ConnectionResetError(f"{body.key} ends after {sent} of {body.nbytes} bytes")
        else:
            connection.request(method, path, body, own)

    def _taken(self) -> http.client.HTTPConnection:
        """A connection that nobody uses, or a new one."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._connected()

    def _connected(self) -> http.client.HTTPConnection:
        found = reach(self._agent.addresses, CONNECT_S, self._is_agent)
        if found is None:
            raise ConnectionRefusedError("its agent answers at none of its addresses")
        opened, (host, port) = found
        opened.settimeout(ANSWER_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = opened
        return connection

    def _is_agent(self, opened: socket.socket) -> bool:
        """Whether the agent of this instance answers, and not a server that has its port now."""
        opened.settimeout(CONNECT_S)
        try:
            opened.sendall(f"GET {HELLO_PATH} HTTP/1.1\r\nHost: agent\r\n\r\n".encode())
            answer = http.client.HTTPResponse(opened)
            answer.begin()
            return answer.read(200) == self._agent.instance.encode() and answer.isclosed()
        except (OSError, http.client.HTTPException):
            return False


class Upload:
    """A new object that goes to an agent as its bytes come, by one thread at a time. Where the
    connection breaks, `finish` sends the whole."""

    def __init__(self, peer: Peer, key: str) -> None:
        self._peer, self._connection = peer, None
        headers = {NEW_HEADER: "1", "Transfer-Encoding": "chunked"}
        with self._breaking():
            self._connection = peer._taken()
            peer._send(self._connection, "PUT", OBJECTS + quote(key), headers, None)

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Send `buffers`. The caller may reuse them on return."""
        sizes = [buffer.nbytes for buffer in buffers]
        if self._connection and sum(sizes):
            with self._breaking():
                self._connection.send(b"%x\r\n" % sum(sizes))
                for buffer in buffers:
                    self._connection.send(buffer.cast("B"))
                self._connection.send(b"\r\n")

    def finish(self, whole: FileRange) -> None:
        """Give the object, which lies here as `whole`, its name there. Raises as
        `Peer.put_file`."""
        with self._breaking():
            if self._connection:
                self._connection.send(b"0\r\n\r\n")
                answer = self._connection.getresponse()
        if connection := self._connection:
            self._connection = None
            with self._peer._answered(connection, answer) as got:
                if got.status == http.client.CREATED:
                    return
        self._peer.put_file(whole)

    def discard(self) -> None:
        """Send no more. Returns when the agent has dropped what came, unless it is silent: a writer
        that needs its room may follow."""
        connection, self._connection = self._connection, None
        opened = connection and connection.sock
        if connection and opened:  # the other end did not close it
            with suppress(OSError, http.client.HTTPException), closing(connection):
                opened.settimeout(CONNECT_S)
                opened.shutdown(socket.SHUT_WR)
                connection.getresponse()

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException):
            self.discard()


def _whole(answer: http.client.HTTPResponse, what: str) -> bytes:
    """The whole body, which is bounded."""
    if answer.length is None or answer.length > OBJECT_BYTES_MAX:
        raise Unavailable(f"the answer about {what} has no length, or too large a one")
    return answer.read()
