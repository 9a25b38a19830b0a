"""The trainer's side of a worker process: start one when it is needed, hand it a staged state, hear how far it is, notice when it dies."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptstore import errors
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.engine.checkout import Reader
from ckptstore.engine.commit import CommitStats, Committed
from ckptstore.engine.label import Label
from ckptstore.engine.parcels import Message, describe, receive, send
from ckptstore.engine.progress import Milestone, Watch
from ckptstore.errors import Cancelled, CkptStoreError, Unavailable
from ckptstore.state.arenas import Arena
from ckptstore.state.flat import Flat

ENDS_S = 60.0
"""A worker that has been told that there is nothing more to do ends within this time, or is left to itself."""


class HiredCommitter:
    """Makes commits like `engine.commit.Committer`, in a worker process, of states that lie in shared arenas. One at a time."""

    def __init__(
        self, reader: Reader, *, place: str, storage_options: Mapping[str, Any], direct_io: bool | None, index: str | None, threads: int
    ) -> None:
        self._reader = reader
        options = {"storage_options": dict(storage_options), "direct_io": direct_io is not False, "index": index}  # all of it is aside
        self._opening = {"place": place, "threads": threads, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._sent: Arena | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._process.pid if self._process else None

    def commit(self, flats: Mapping[str, Flat], arena: Arena, label: Label, started: float, watch: Watch) -> Committed:
        """Have the state in `arena` committed; see `Committer.commit`.

        Raises `Unavailable` if the worker dies: the next call starts another.
        """
        with self._lock:
            watch.starting()
            says, blob = describe(flats, label)
            try:
                connection = self._working()
                send(connection, Message({**says, "started": started}, blob, arena.fd if self._sent is not arena else -1))
                self._sent = arena
                done = self._listen(connection, watch)
            except OSError as error:
                raise self._lost() from error
            except BaseException:
                if self._process and self._process.poll() is not None:
                    self._dismiss()
                raise
        return self._made(done, flats)

    def close(self) -> None:
        """Let the worker go; it ends by itself."""
        with self._lock:
            self._dismiss()

    def _listen(self, connection: socket.socket, watch: Watch) -> Message:
        called_off: Cancelled | None = None
        while message := receive(connection):
            if "reached" in message.says:
                watch.reached(Milestone(message.says["reached"]))
            elif "publishing" in message.says:
                try:
                    watch.publishing()
                except Cancelled as error:
                    called_off = error
                send(connection, Message({"go": called_off is None}))
            elif "failed" in message.says:
                raise called_off or _error(message.says["failed"], message.says["text"])
            else:
                return message
        raise self._lost()

    def _made(self, done: Message, flats: Mapping[str, Flat]) -> Committed:
        commit = CommitId(done.says["done"])
        document = self._reader.document(SessionId(done.says["session"]), commit)
        ids, at = {}, 0
        for leaf, length in zip(done.says["leaves"], done.says["lengths"], strict=True):
            ids[leaf] = done.blob[at : at + length]
            at += length
        return Committed(commit, document, {key: flat.schema for key, flat in flats.items()}, CommitStats(**done.says["stats"]), ids)

    def _working(self) -> socket.socket:
        """The connection to a worker that lives, a new one if need be."""
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self._dismiss()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = _start(theirs.fileno())
            self._connection, self._sent = ours, None
            send(ours, Message(self._opening))
        return self._connection

    def _lost(self) -> Unavailable:
        pid, code = self.pid, None
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            code = self._process.wait(ENDS_S)
        self._dismiss()
        return Unavailable(
            f"the worker process {pid} ended ({code}) before it said that the commit is durable: look into store.log() whether it exists, "
            f"or commit again; the next commit starts another worker"
        )

    def _dismiss(self) -> None:
        if self._connection:
            self._connection.close()
        if self._process:
            with suppress(subprocess.TimeoutExpired):  # it still makes a commit, and ends when that is made
                self._process.wait(ENDS_S)
        self._connection = self._process = self._sent = None


def _start(fd: int) -> "subprocess.Popen[bytes]":
    """A process of its own session, so that what ends the trainer's does not end it."""
    package = str(Path(errors.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "ckptstore.engine.worker", str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _error(kind: str, text: str) -> CkptStoreError:
    cls = getattr(errors, kind, CkptStoreError)
    error: CkptStoreError = cls(text)
    return error
