"""How does a trainer commit through a worker process, alone or with the trainers of other ranks?

It starts the worker, hands it its part of the state, reports progress, and notices when the worker
dies. Of many ranks, the trainers have the workers connect: their addresses and a secret travel once
over the trainers' own connections. From then on the workers need no trainer, and finish the commit
even if trainers die. After a failure on any rank, the next commit connects the workers anew with
another secret.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckptstore import errors
from ckptstore.commit.commit_metadata import CommitRequest
from ckptstore.commit.transaction import Committed
from ckptstore.core.forks import survives_forks
from ckptstore.core.ids import SessionId
from ckptstore.core.options import Milestone
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.framing import cause_of
from ckptstore.distributed.sockets import SECRET_BYTES
from ckptstore.distributed.worker_process import (
    Message,
    committed_from,
    error_from,
    receive,
    send,
    state_to,
)
from ckptstore.errors import Cancelled, CkptStoreError, Unavailable
from ckptstore.objects.schema import LastSchemas
from ckptstore.state.staging_buffers import Buffer

ENDS_S = 60.0
"""Time for a worker to exit after its connection closes. A slower one is left running."""


class WorkerCommitter:
    """Like `peers.Committer`, in a worker process, for states in shared buffers. The
    process starts at the first commit. One commit at a time.
    """

    def __init__(self, place: str, options: Mapping[str, Any], threads: int) -> None:
        """`options` are those of `StoreHandle`."""
        self._opening = {"place": place, "options": dict(options), "threads": threads}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._parents: subprocess.Popen[bytes] | None = None
        self._groups: dict[Collective, int] = {}
        survives_forks(self)

    def forked(self) -> None:
        """Leave the worker to the parent: it goes on for as long as the parent is connected."""
        self._lock = threading.Lock()
        self._parents = self._process or self._parents  # referenced: its end is not seen here
        if self._connection:
            self._connection.close()  # this process's descriptor alone
        self._process = self._connection = None
        self._sent: Buffer | None = None
        self._schemas = LastSchemas()
        self._met: dict[Collective, subprocess.Popen[bytes]] = {}
        """The worker that is connected to the workers of the other ranks."""

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before it starts."""
        return self._process.pid if self._process else None

    def way(self, peers: Collective | None) -> Callable[[CommitRequest], Committed]:
        """The function that writes a state, or with `peers` this rank's part of one."""
        return partial(self.commit, peers=peers)

    def commit(self, request: CommitRequest, peers: Collective | None) -> Committed:
        """Commit the state in the request's buffer.

        Raises `Unavailable`, with `causes` if there are peers, if a worker or a trainer is gone;
        the next call starts new workers in place of lost ones.
        """
        with self._lock:
            if peers is None:
                message = self._message(request)
                try:
                    self._working()
                except OSError as error:
                    raise self._lost() from error
                return committed_from(self._carry_out(message, request))
            message = self._ready(peers, request)
            try:
                if not self._alive:
                    raise self._lost()
                return committed_from(self._carry_out(message, request))
            except BaseException as error:
                self._met.pop(peers, None)
                if isinstance(error, CkptStoreError) and not error.causes:
                    error.causes = {peers.rank: str(cause_of(error))}
                raise

    def close(self) -> None:
        """Close the connection, and wait for the worker to exit."""
        if self._connection:
            with suppress(OSError):
                # Forked children may hold this end too, so that a close alone says nothing.
                with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
                self._connection.close()
        if self._process:
            with suppress(subprocess.TimeoutExpired):  # it exits after the commit it works on
                self._process.wait(ENDS_S)
        self._connection = self._process = self._sent = None

    def _message(self, request: CommitRequest) -> Message:
        """The message for the worker, for which the state is staged."""
        request.watch.starting()
        return state_to(*request.prepared(), request, self._schemas)

    # -- the workers of many ranks --

    def _ready(self, peers: Collective, request: CommitRequest) -> Message:
        """The message for the worker, once all ranks have theirs and all workers are connected."""
        found: list[Message] = []

        def describe() -> bool:
            found.append(self._message(request))
            return self._alive is not None and self._met.get(peers) is self._alive

        if not peers.share("workers: ready", describe, all):
            self._meet(peers)
        found[0].update(group=self._groups[peers], timeout_s=peers.timeout_s)
        return found[0]

    def _meet(self, peers: Collective) -> None:
        """Start missing workers and connect all of them."""
        group = self._groups.setdefault(peers, len(self._groups))

        def listen() -> Any:
            self._met.pop(peers, None)
            return self._listening(peers.timeout_s)

        secret, places = peers.share(
            "workers: meet", listen, lambda places: (os.urandom(SECRET_BYTES), places)
        )
        invitation = {
            "group": group,
            "rank": peers.rank,
            "places": places,
            "timeout_s": peers.timeout_s,
            "secret": secret,
        }
        if not (self._connection and self._alive):
            raise self._lost()
        try:
            send(self._connection, invitation)
        except OSError as error:
            raise self._lost() from error
        self._met[peers] = self._alive

    def _listening(self, timeout_s: float) -> Any:
        """The addresses at which the worker listens. Kills a worker that is silent for `timeout_s`,
        and raises `Unavailable`."""
        answer = None
        with suppress(OSError):
            connection = self._working()
            send(connection, {"listen": True})
            answer = receive(connection) if connection.poll(timeout_s) else None
        if answer is None:
            pid = self.pid
            self._end()
            raise Unavailable(
                f"the worker process {pid} ended, or was silent for {timeout_s:g} s; the next "
                "commit starts another worker"
            )
        if "failed" in answer:
            raise error_from(answer)
        return answer["addresses"]

    # -- the worker process --

    @property
    def _alive(self) -> "subprocess.Popen[bytes] | None":
        process = self._process if self._connection else None
        return process if process and process.poll() is None else None

    def _working(self) -> "Connection[Any, Any]":
        """The connection to a live worker, started if necessary."""
        if self._connection is None or not self._alive:
            self.close()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self._process = _start(theirs.fileno())
                self._connection = Connection(ours.detach())
            send(self._connection, self._opening)
        return self._connection

    def _carry_out(self, message: Message, request: CommitRequest) -> Message:
        """Let the worker commit the state that `message` describes, and return its reply."""
        connection, arena = self._connection, request.buffer
        assert connection is not None and arena is not None
        try:
            send(connection, message, arena.fd if self._sent is not arena else None)
            self._sent = arena
            said = self._listen(connection, request)
        except OSError as error:
            raise self._lost() from error
        except BaseException:
            self._end()  # it still reads the buffer, which the next commit reuses
            raise
        if isinstance(said, CkptStoreError):
            raise said
        return said

    def _listen(
        self, connection: "Connection[Any, Any]", request: CommitRequest
    ) -> Message | CkptStoreError:
        """The worker's reply, or its failure; the worker is idle afterwards."""
        cancelled: Cancelled | None = None
        watch = request.watch
        while message := receive(connection):
            if "reached" in message:
                watch.reached(Milestone(message["reached"]))
            elif "publishing" in message:
                session = SessionId(message["publishing"])
                try:
                    watch.publishing(session)
                except Cancelled as error:
                    cancelled = error
                else:
                    request.asked.append(session)
                send(connection, {"go": cancelled is None})
            elif "failed" in message:
                return cancelled or error_from(message)
            else:
                return message
        return self._lost()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
        self.close()

    def _lost(self) -> Unavailable:
        pid, process = self.pid, self._process
        self.close()
        code = process.returncode if process else None
        return Unavailable(
            f"the worker process {pid} ended ({code}) before it reported the commit durable: check "
            "store.log() for it, or commit again; the next commit starts another worker"
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
