"""How does a trainer use a worker process? Start it, send it states, notice when it dies."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ckptstore import errors
from ckptstore.commit.commit import CommitStats, Committed
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import Watch
from ckptstore.commit.worker_protocol import Message, describe, error_from, receive, send
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.model import CommitDocument
from ckptstore.core.options import Milestone
from ckptstore.errors import Cancelled, CkptStoreError, Unavailable
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.staging_buffers import Buffer

ENDS_S = 60.0
"""Time for a worker to exit after its connection closes. A slower one is left running."""


class WorkerClient:
    """The connection to one worker process, which starts at first use. A caller holds `lock` for
    the length of a conversation."""

    def __init__(
        self,
        *,
        place: str,
        storage_options: Mapping[str, Any],
        direct_io: bool | None,
        index: str | None,
        threads: int,
    ) -> None:
        options = {
            "storage_options": dict(storage_options),
            "direct_io": direct_io is not False,
            "index": index,
        }
        self._handle = {"place": place, "threads": threads, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._sent: Buffer | None = None
        self.lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before it starts."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> "subprocess.Popen[bytes] | None":
        """The worker, if it is alive."""
        return (
            self._process
            if self._connection and self._process and self._process.poll() is None
            else None
        )

    def ask(self, message: Message, timeout_s: float) -> Message:
        """The worker's answer. Kills a worker that is silent for `timeout_s`, and raises
        `Unavailable`."""
        connection = self._working()
        try:
            connection.settimeout(timeout_s)
            send(connection, message)
            answer = receive(connection)
            connection.settimeout(None)
        except OSError:
            answer = None
        if answer is None:
            pid = self.pid
            self.end()
            raise Unavailable(
                f"the worker process {pid} ended, or was silent for {timeout_s:g} s; the next "
                "commit starts another worker"
            )
        if "failed" in answer.says:
            raise error_from(answer.says)
        return answer

    def tell(self, message: Message) -> None:
        """Send a message without an answer. Raises `Unavailable` if there is no worker."""
        if not (self._connection and self.alive):
            raise self._lost()
        try:
            send(self._connection, message)
        except OSError as error:
            raise self._lost() from error

    def commit(
        self, message: Message, arena: Buffer, watch: Watch, *, anew: bool = True
    ) -> Message:
        """Have the worker commit the state in `arena` that `message` describes; returns its reply.

        Reports progress to `watch`. Raises `Unavailable` if the worker dies; a later call starts
        another. With `anew=False`, requires a running worker.
        """
        if not anew and not self.alive:
            raise self._lost()
        try:
            connection = self._working()
            send(connection, message._replace(fd=arena.fd if self._sent is not arena else -1))
            self._sent = arena
            said = self._listen(connection, watch)
        except OSError as error:
            raise self._lost() from error
        except BaseException:
            self.end()  # it still reads the buffer, which the next commit reuses
            raise
        if isinstance(said, CkptStoreError):
            raise said
        return said

    def release(self) -> None:
        """Close the connection, and wait for the worker to exit."""
        if self._connection:
            self._connection.close()
        if self._process:
            with suppress(subprocess.TimeoutExpired):  # it exits after the commit it works on
                self._process.wait(ENDS_S)
        self._connection = self._process = self._sent = None

    def end(self) -> None:
        """Kill the worker."""
        if self._process:
            self._process.kill()
        self.release()

    def _listen(self, connection: socket.socket, watch: Watch) -> Message | CkptStoreError:
        """The worker's reply, or its failure; the worker is idle afterwards."""
        cancelled: Cancelled | None = None
        while message := receive(connection):
            if "reached" in message.says:
                watch.reached(Milestone(message.says["reached"]))
            elif "publishing" in message.says:
                try:
                    watch.publishing()
                except Cancelled as error:
                    cancelled = error
                send(connection, Message({"go": cancelled is None}))
            elif "failed" in message.says:
                return cancelled or error_from(message.says)
            else:
                return message
        return self._lost()

    def _working(self) -> socket.socket:
        """The connection to a live worker, started if necessary."""
        if self._connection is None or not self.alive:
            self.release()
            ours, theirs = socket.socketpair()
            with theirs, ExitStack() as unless_started:
                unless_started.callback(ours.close)
                self._process = _start(theirs.fileno())
                unless_started.pop_all()
            self._connection, self._sent = ours, None
            send(ours, Message(self._handle))
        return self._connection

    def _lost(self) -> Unavailable:
        pid, process = self.pid, self._process
        self.release()
        code = process.returncode if process else None
        return Unavailable(
            f"the worker process {pid} ended ({code}) before it reported the commit durable: check "
            "store.log() for it, or commit again; the next commit starts another worker"
        )


class ProcessCommitter:
    """Like `commit.commit.Committer`, but in a worker process, for states in shared buffers."""

    def __init__(
        self,
        worker_client: WorkerClient,
        document_of: Callable[[SessionId, CommitId], CommitDocument],
    ) -> None:
        self._worker_client, self._document_of = worker_client, document_of

    def commit(
        self,
        flats: Mapping[str, FlatState],
        arena: Buffer,
        label: CommitMetadata,
        started: float,
        watch: Watch,
    ) -> Committed:
        """Commit the state in `arena`, as `Committer.commit` does. Raises `Unavailable` if the
        worker dies; the next call starts another."""
        with self._worker_client.lock:
            watch.starting()
            says, blob = describe(flats, label)
            done = self._worker_client.commit(
                Message({**says, "started": started}, blob), arena, watch
            )
        commit = CommitId(done.says["done"])
        document = self._document_of(SessionId(done.says["session"]), commit)
        ids, at = {}, 0
        for leaf, length in zip(done.says["leaves"], done.says["lengths"], strict=True):
            ids[leaf] = done.blob[at : at + length]
            at += length
        return Committed(
            commit,
            document,
            {key: flat.schema for key, flat in flats.items()},
            CommitStats(**done.says["stats"]),
            ids,
        )


_BEGINNING = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location

package = sys.argv[2]
spec = spec_from_file_location(
    "ckptstore", package + "/__init__.py", submodule_search_locations=[package]
)
module = sys.modules["ckptstore"] = module_from_spec(spec)
spec.loader.exec_module(module)
sys.path.append(package.removesuffix("/ckptstore"))

from ckptstore.distributed.worker_process import main

main()
"""
"""A worker's program. It loads this package from the trainer's folder, even if another package has
the same name.

Other modules come from Python's installation and PYTHONPATH, then from beside the package, where
`pip install --target` puts them. Never from the working directory (`-P`), where others may write.
"""


def _start(fd: int) -> "subprocess.Popen[bytes]":
    """Start a worker in its own session, so that signals to the trainer's group spare it. Raises
    `Unavailable` if that fails."""
    package = str(Path(errors.__file__).resolve().parent)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGINNING, str(fd), package],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(
            f"no worker process can be started ({error}): raise the process limit, or open "
            "the store with executor='thread'"
        ) from error
