"""What runs in a worker process, which commits for a trainer?

`commit.worker_client` starts it; the first argument is the descriptor of its socket. It imports no
torch, runs in its own session with low priority, and maps the staged state's memory by a
descriptor. So it finishes its commit even if the trainer is gone, and then ends.
"""

import mmap
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from ckptstore.commit.commit import Committer
from ckptstore.commit.pending import Watch
from ckptstore.commit.worker_protocol import (
    Message,
    failure_to,
    flats_from,
    label_from,
    receive,
    send,
)
from ckptstore.core.options import Milestone
from ckptstore.distributed.worker_group import WorkerGroup
from ckptstore.errors import Cancelled
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, step_aside_of_parent

LOOK_S = 0.5
"""How often an idle worker checks that its trainer lives."""


class Worker:
    """One trainer's worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting = select.poll()
        self._waiting.register(connection, select.POLLIN)
        self._trainer = os.getppid()
        self._arena = memoryview(b"")

    def serve(self) -> None:
        """Open the store that the first message names, then handle one message after another until
        the trainer is gone.
        """
        first = self._heard()
        if first is None:
            return
        asked = first.says
        options = {name: asked[name] for name in ("storage_options", "direct_io", "index")}
        handle = StoreHandle(asked["place"], **options)
        threads = ThreadPool(asked["threads"])
        committer = Committer(handle.config, handle.objects, handle.log, threads)
        delegate = WorkerGroup(handle.config, handle.objects, handle.log, threads)
        while message := self._heard():
            self._map(message.fd)
            self._do(message, committer, delegate)
        delegate.close()
        threads.close()
        handle.close()

    def _map(self, fd: int) -> None:
        """Map the memory that came with a message; it holds staged states until another one
        comes.
        """
        if fd >= 0:
            self._arena = memoryview(mmap.mmap(fd, 0))
            os.close(fd)

    def _do(self, message: Message, committer: Committer, delegate: WorkerGroup) -> None:
        """Handle a message, alone or as the worker of one of many ranks."""
        try:
            if "listen" in message.says:
                self.tell(delegate.listen())
            elif "invitation" in message.says:
                delegate.meet(message)
            elif "group" in message.says:
                self.tell(delegate.commit(message, self._arena, TellingWatch(self)))
            else:
                self.tell(self._commit(committer, message))
        except Exception as error:
            self.tell(failure_to(error))

    def _commit(self, committer: Committer, message: Message) -> Message:
        says = message.says
        flats = flats_from(says["keys"], message.blob, self._arena)
        made = committer.commit(
            flats, label_from(says["label"]), says["started"], TellingWatch(self)
        )
        stats = {name: getattr(made.stats, name) for name in made.stats.__slots__}
        leaves = list(made.ids)
        ends = [len(made.ids[n]) for n in leaves]
        done = {
            "done": made.id,
            "session": made.document.session,
            "stats": stats,
            "leaves": leaves,
            "lengths": ends,
        }
        return Message(done, b"".join(made.ids[n] for n in leaves))

    def tell(self, message: Message) -> None:
        """Tell the trainer, if it is still there."""
        with suppress(OSError):  # the trainer is gone; its commit goes on
            send(self._connection, message)

    def _heard(self) -> Message | None:
        """The trainer's next message, or None if it is gone. Its liveness is checked too, since
        processes that it forked may keep the connection open.
        """
        while not self._waiting.poll(1000 * LOOK_S):
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
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        Worker(connection).serve()
