"""How does a host give the others its part of the store, also when its ranks have ended?

`python -m ckptstore.plugins.hosts DIRECTORY SOCKET` serves the objects in a directory by key, over
the server of torchft's transport: its token, its limits, its connections. It ends with its
directory, or when no process of this host has used the store, and nobody has asked, for `--idle-s`.
A request names its job; an agent whose host has joined another job refuses it, so that a job that
was cut off changes nothing any more.
"""

import argparse
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    InvalidInput,
    NoSpace,
    NotFound,
    Unavailable,
)
from ckptstore.interop.torchft.invitation import HELLO_PATH, Invitation
from ckptstore.interop.torchft.server import Handler, Refused, Server
from ckptstore.plugin.model import CONFIG_KEY, MIB, log_key, new_session_id
from ckptstore.plugin.storage import FileRange, Storage, open_storage
from ckptstore.plugins.hosts.members import before, in_job, is_in_use, read_agent

JOB_HEADER = "Ckptstore-Job"
TAIL_HEADER = "Ckptstore-Tail"
"""In a request for the last bytes of an object: how many. With 0, only its size is asked for."""
NEW_HEADER = "Ckptstore-New"
"""In a request to create an object: it must not exist yet."""
SIZE_HEADER = "Ckptstore-Size"
"""In an answer: the size of the whole object."""

OBJECTS, LISTS = "/ckptstore/1/objects/", "/ckptstore/1/list/"
ENTRY = re.compile(r"log/(\d{12})")
OBJECT_BYTES_MAX = 900_000_000
_CHUNK = re.compile(rb"([0-9a-f]{1,8})\r\n")
IDLE_S = 1800.0
TIMEOUT_S = 300.0

_STATUS: tuple[tuple[type[CkptStoreError], HTTPStatus], ...] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (InvalidInput, HTTPStatus.BAD_REQUEST),
    (Conflict, HTTPStatus.PRECONDITION_FAILED),
    (NoSpace, HTTPStatus.INSUFFICIENT_STORAGE),
    (CkptStoreError, HTTPStatus.INTERNAL_SERVER_ERROR),
)


class AgentServer(Server):
    """Serves the objects of the directory `root`."""

    connections_max = 4096
    """Each rank of the job may have a few."""

    def __init__(self, root: Path, listening: socket.socket, agent: Invitation) -> None:
        self.root, self.storage = root, open_storage(root)
        self.asked_at = time.monotonic()
        self._seen_in = ""
        self._directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        super().__init__(
            listening, agent.instance, agent.token, timeout_s=TIMEOUT_S, handler=_ObjectHandler
        )

    def close(self, *, wait: bool = True) -> None:
        super().close(wait=wait)
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def has_lost_store(self, job: str) -> bool:
        """Whether the directory is another one, or had a store in this job and was emptied. It
        would pass for a host whose log is empty."""
        if self.storage.size(CONFIG_KEY) is not None:
            self._seen_in = job
            return not self.is_in_place()
        return self._seen_in == job or not self.is_in_place()

    def is_in_place(self) -> bool:
        """Whether the directory is the one that it was at the beginning, and not lost since."""
        try:
            return os.path.samestat(os.fstat(self._directory), os.stat(self.root))
        except OSError:
            return False

    def is_idle(self, idle_s: float) -> bool:
        if is_in_use(self.root):
            self.asked_at = time.monotonic()
        return time.monotonic() - self.asked_at > idle_s


class _ObjectHandler(Handler):
    """Objects by key: GET, PUT and DELETE; keys and sizes by prefix."""

    _pieces: Iterator[memoryview] = iter(())
    """Of the body, those that were not read yet."""

    @property
    def _agent(self) -> AgentServer:
        assert isinstance(self.server, AgentServer)
        return self.server

    @property
    def _storage(self) -> Storage:
        return self._agent.storage

    def do_GET(self) -> None:
        with self._answering():
            if self.path == HELLO_PATH:
                self._answer(HTTPStatus.OK, self.server.instance.encode())
            elif (prefix := self._asked(LISTS)) is not None:
                rows = (f"{size} {key}\n" for key, size in self._storage.list(prefix))
                self._answer(HTTPStatus.OK, "".join(rows).encode())
            else:
                self._send_object(self._key())

    def do_PUT(self) -> None:
        self._pieces = self._body()
        with self._answering():
            if NEW_HEADER in self.headers:
                created = self._create(self._key())
                self._answer(HTTPStatus.CREATED if created else HTTPStatus.OK, b"")
            else:
                data = b"".join(map(bytes, self._pieces))
                with in_job(self._agent.root, self._job()):
                    self._storage.put(self._key(), data)
                self._answer(HTTPStatus.CREATED, b"")

    def _refuse(self, refused: Refused) -> None:
        """Answer after the body, so that the peer reads the answer."""
        for _ in self._pieces:
            pass
        super()._refuse(refused)

    def _body(self) -> Iterator[memoryview]:
        """The body, in memory that the next piece takes."""
        memory, left = memoryview(mmap.mmap(-1, MIB)), OBJECT_BYTES_MAX
        for nbytes in self._sizes():
            left -= nbytes
            if left < 0:
                raise self._no_body(f"wanted at most {OBJECT_BYTES_MAX} bytes")
            while nbytes:
                came = self.rfile.readinto(memory[: min(MIB, nbytes)])
                if not came:
                    raise self._no_body("the body ended early")
                nbytes -= came
                yield memory[:came]

    def _sizes(self) -> Iterator[int]:
        """Of the chunks in which the body comes (RFC 9112, section 7.1), or of the whole."""
        coding, length = self.headers.get("Transfer-Encoding"), self._number("Content-Length")
        if length is not None and coding is None:
            yield length
        elif coding == "chunked":
            while line := _CHUNK.fullmatch(self.rfile.readline(16)):
                nbytes = int(line[1], 16)
                yield nbytes
                if self.rfile.readline(4) != b"\r\n":
                    break
                if not nbytes:
                    return
            raise self._no_body("a chunk does not begin, or end, where it should")
        else:
            raise self._no_body("wanted a Content-Length, or chunks")

    def _no_body(self, why: str) -> Refused:
        self.close_connection = True  # the rest is not read
        return Refused(HTTPStatus.BAD_REQUEST, why)

    def do_DELETE(self) -> None:
        with self._answering():
            with in_job(self._agent.root, self._job()):
                self._storage.delete(self._key())
            self._answer(HTTPStatus.OK, b"")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Admit the request, and answer it if it fails."""
        self._agent.asked_at = time.monotonic()
        with self._refusals():
            if self.path != HELLO_PATH:
                self._show_token()
                self._check_job()
            try:
                yield
            except CkptStoreError as error:
                status = next(status for kind, status in _STATUS if isinstance(error, kind))
                raise Refused(status, str(error)[:400]) from error
        self._agent.asked_at = time.monotonic()

    def _check_job(self) -> None:
        if before(self._agent.root)[0] != self._job():
            raise Refused(HTTPStatus.CONFLICT, "this host has joined another job")
        if self._agent.has_lost_store(self._job()):
            raise Refused(HTTPStatus.CONFLICT, "this host has lost its directory")

    def _job(self) -> str:
        return self.headers.get(JOB_HEADER) or "none"

    def _asked(self, start: str) -> str | None:
        return unquote(self.path[len(start) :]) if self.path.startswith(start) else None

    def _key(self) -> str:
        key = self._asked(OBJECTS)
        if not key:
            raise Refused(HTTPStatus.NOT_FOUND, "no such path")
        return key

    def _send_object(self, key: str) -> None:
        whole, size = None, self._storage.size(key)
        if size and self._number(TAIL_HEADER) != 0 and not key.startswith("packs/"):
            # It may be replaced, by a `put` or where it is damaged, and an open file would not be.
            whole = memoryview(self._storage.read(key))
            size = whole.nbytes
        if size is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no {key}")
        start, stop = self._wanted(size)
        span = (
            FileRange(key, self._storage.open_file(key), start, stop - start)
            if whole is None
            else whole[start:stop]
        )
        self._begin_sized(size, stop - start)
        if stop > start:
            try:
                self._send_span(span)
            except CkptStoreError:
                self.close_connection = True  # the length was sent: only an early end tells

    def _wanted(self, size: int) -> tuple[int, int]:
        """The bytes that are asked for, of so many."""
        if (tail := self._number(TAIL_HEADER)) is not None:
            return max(0, size - tail), size
        if not (wanted := self.headers.get("Range")):
            return 0, size
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not last)):
            raise Refused(HTTPStatus.BAD_REQUEST, "wanted bytes=FIRST-LAST")
        start = min(int(first), size)
        return start, max(start, min(int(last) + 1 if last else size, size))

    def _begin_sized(self, size: int, length: int) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header(SIZE_HEADER, str(size))
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _create(self, key: str) -> bool:
        """Store the body under `key`; False if an object has that name, which stays. An entry of
        the log is refused as long as the one before it is absent."""
        writer = self._storage.create(key, session=new_session_id())
        try:
            for piece in self._pieces:
                writer.append((piece,))
            with in_job(self._agent.root, self._job()):
                self._check_earlier(key)
                try:
                    created = writer.finish()
                except Conflict:
                    return False
        finally:
            writer.discard()
        try:
            self._storage.sync_dirs((key,))
        except NoSpace as error:  # callers take it for "not created", but the name is there
            raise Unavailable(f"{key} is there, but not known to be durable: {error}") from error
        return created

    def _check_earlier(self, key: str) -> None:
        earlier = key_before(key)
        if earlier and self._storage.size(earlier) is None:
            raise Conflict(f"there is no {earlier} yet")


def key_before(key: str) -> str | None:
    """The key of the entry before that of `key`; None if `key` is no entry, or the first."""
    entry = ENTRY.fullmatch(key)
    return log_key(int(entry[1]) - 1) if entry and int(entry[1]) > 1 else None


def main() -> None:
    """Serve the directory that the command line names, until the agent ends. Whoever started it
    has told who it is, and opened its socket, so that it may be asked before it is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("socket", type=int, help="the descriptor of a socket that listens")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    asked = parser.parse_args()
    root = asked.directory
    server = AgentServer(root, socket.socket(fileno=asked.socket), read_agent(root))
    ended = threading.Event()
    while server.is_in_place() and not server.is_idle(asked.idle_s):
        ended.wait(min(1.0, asked.idle_s))
    server.close()
    os._exit(0)
