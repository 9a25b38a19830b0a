"""What runs in a worker process, which commits for a trainer?

`distributed.worker_client` starts it; the first argument is the descriptor of its socket. It
imports no torch, runs in its own session with low priority, and maps the staged state's memory by a
descriptor. So it finishes its commit even if the trainer is gone, and then ends. Workers of many
ranks are connected to each other, and commit by the same rounds as trainers.
"""

import mmap
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ckptstore.commit.commit import CommitRequest
from ckptstore.commit.pending import Watch
from ckptstore.commit.transaction import Destination
from ckptstore.core.model import Schema
from ckptstore.core.options import Milestone, Ranks
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.commit import Committer
from ckptstore.distributed.sockets import Invitation, Listener, SocketLink
from ckptstore.distributed.worker_protocol import (
    Message,
    committed_to,
    failure_to,
    receive,
    send,
    state_from,
)
from ckptstore.errors import Cancelled, Unavailable
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, step_aside_of_parent

LOOK_S = 0.5
"""How often an idle worker checks that its trainer lives."""

MEETING_S = 60.0
"""Time for all workers to connect. All of them are running when they are told to."""

_ADVICE = "the next commit starts other workers for those that are gone"


class Worker:
    """One trainer's worker, for commits alone and in any number of groups of ranks."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._trainer = os.getppid()
        self._arena = memoryview(b"")
        self._listener: Listener | None = None
        self._links: dict[int, SocketLink] = {}
        self._peers: dict[int, Collective | Exception] = {}
        self._schemas: dict[bytes, Schema] = {}

    def serve(self) -> None:
        """Open the store that the first message names, then handle one message after another until
        the trainer is gone.
        """
        first = self._heard()
        if first is None:
            return
        handle = StoreHandle(first.says["place"], **first.says["options"])
        threads = ThreadPool(first.says["threads"])
        committer = Committer(Destination(handle, threads))
        while message := self._heard():
            if message.fd >= 0:  # memory that holds staged states until another one comes
                self._arena = memoryview(mmap.mmap(message.fd, 0))
                os.close(message.fd)
            try:
                self._do(message, committer)
            except Exception as error:
                self.tell(failure_to(error))
        for link in self._links.values():
            link.close()
        threads.close()
        handle.close()

    def _do(self, message: Message, committer: Committer) -> None:
        if "listen" in message.says:
            if self._listener:
                self._listener.close()
            self._listener = Listener()
            self.tell(Message({"addresses": self._listener.addresses}))
        elif "places" in message.says:
            self._meet(message)
        else:
            self.tell(self._commit(message, committer))

    def _meet(self, message: Message) -> None:
        """Connect to the other workers of a group. If this fails, the commits of the group fail
        with the same error.
        """
        says = message.says
        group, rank, timeout_s = says["group"], says["rank"], says["timeout_s"]
        places = [[(str(host), int(port)) for host, port in place] for place in says["places"]]
        if group in self._links:
            self._links.pop(group).close()
        try:
            assert self._listener is not None
            link = self._listener.connect(
                Invitation(rank, places, message.blob), min(MEETING_S, timeout_s)
            )
        except Exception as error:
            self._peers[group] = error
        else:
            self._links[group] = link
            self._peers[group] = Collective(link, rank, len(places), timeout_s, _ADVICE)
        finally:
            self._listener = None

    def _commit(self, message: Message, committer: Committer) -> Message:
        """Make the commit, or this rank's part of it, that `state_to` described."""
        peers = None
        if (group := message.says["group"]) is not None:
            found = self._peers.get(group)
            if not isinstance(found, Collective):
                raise found or Unavailable("the worker has not met the workers of other ranks")
            peers = found
            peers.timeout_s = message.says["timeout_s"]
        label, flats = state_from(message, self._arena, self._schemas)
        request = CommitRequest(
            lambda: (label, flats),
            message.says["started"],
            TellingWatch(self),
            ranks=Ranks(**message.says["ranks"]),
        )
        return committed_to(committer.commit(request, peers))

    def tell(self, message: Message) -> None:
        """Tell the trainer, if it is still there."""
        with suppress(OSError):  # the trainer is gone; its commit goes on
            send(self._connection, message)

    def _heard(self) -> Message | None:
        """The trainer's next message, or None if it is gone. Its liveness is checked too, since
        processes that it forked may keep the connection open.
        """
        with suppress(OSError):
            while not self._connection.poll(LOOK_S):
                if os.getppid() != self._trainer:
                    return None
        return receive(self._connection)

    def may_publish(self) -> bool:
        """False if the trainer canceled the commit. A trainer that is gone did not."""
        self.tell(Message({"publishing": True}))
        answer = self._heard()
        return answer is None or bool(answer.says["go"])


class TellingWatch(Watch):
    """Forwards the progress of a commit to the trainer."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def reached(self, milestone: Milestone) -> None:
        self._worker.tell(Message({"reached": milestone.value}))

    def publishing(self) -> None:
        if not self._worker.may_publish():
            raise Cancelled("the commit was called off")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    step_aside_of_parent()
    with Connection(int(sys.argv[1])) as connection:
        Worker(connection).serve()
