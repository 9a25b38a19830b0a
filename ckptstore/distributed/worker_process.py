"""How does a worker process commit for a trainer, and which messages do the two exchange?

`distributed.worker_client` starts it; the first argument is the descriptor of its socket. It
imports no torch, runs in its own session with low priority, and maps the staged state's memory by a
descriptor. So it finishes its commit even if the trainer is gone, and then ends. Workers of many
ranks are connected to each other, and commit by the same rounds as trainers.

Messages are JSON and bytes and, at times, a descriptor. Nothing is unpickled, so neither side can
run code in the other.
"""

import mmap
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeAlias

from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest, Prepared
from ckptstore.commit.pending import Watch
from ckptstore.commit.plan import Flats
from ckptstore.commit.transaction import CommitStats, Committed, Destination, WholeCommitter
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.model import Box
from ckptstore.core.options import Milestone, Ranks
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.commit import RanksCommitter
from ckptstore.distributed.framing import Cause, cause_of, pack, tuples, unpack
from ckptstore.distributed.merge import Described, decode_description, encode_description
from ckptstore.distributed.sockets import Invitation, Listener, SocketLink
from ckptstore.errors import Cancelled, CkptStoreError, Unavailable
from ckptstore.objects.documents import decode_document, encode_document
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, step_aside_of_parent
from ckptstore.state.leaf_sources import FlatState, HeldLeaf, Source
from ckptstore.state.staging_buffers import BufferSource, ElsewhereSource

Message: TypeAlias = dict[str, Any]
"""Values for `framing.pack`. A received descriptor is its `fd`."""

_ARENA, _BYTES, _KNOWN = "arena", "bytes", "known"


def send(connection: "Connection[Any, Any]", message: Message, fd: int | None = None) -> None:
    """Send a message. Raises `OSError` if the other side has closed."""
    connection.send_bytes(pack([message, fd is not None]))
    if fd is not None:
        send_handle(connection, fd, 0)


def receive(connection: "Connection[Any, Any]") -> Message | None:
    """The next message, or None if the other side has closed."""
    try:
        message, has_fd = unpack(connection.recv_bytes())
        return {**message, "fd": recv_handle(connection)} if has_fd else message
    except (OSError, EOFError):
        return None


def state_to(
    label: CommitMetadata, flats: Flats, request: CommitRequest, schemas: LastSchemas
) -> Message:
    """A staged state, or a rank's part of one: its description, and where each leaf's bytes lie: in
    the staging buffer, in the message, or in the store, by chunk ids."""
    return {
        "label": asdict(label),
        "ranks": {
            "canonical": request.ranks.canonical,
            "trust_replicated": request.ranks.trust_replicated,
        },
        "started": request.started,
        "asked": request.asked,
        "description": encode_description(flats, schemas),
        "sources": [[key, *_sources_to(flat), flat.keys] for key, flat in flats.items()],
        "group": None,
    }


def state_from(
    message: Message, arena: memoryview, known: Described
) -> tuple[CommitMetadata, Flats]:
    """The inverse of `state_to`, for a buffer mapped at `arena`. `known` has the decoded schemas of
    the last message, and then of this one."""
    label = CommitMetadata(**{name: tuples(said) for name, said in message["label"].items()})
    trees = decode_description(message["description"], known)
    known.forget(trees)
    sources = {key: rows for key, *rows in message["sources"]}
    flats = {}
    for tree in trees:
        leaves, held, keys = sources[tree.key]
        parts = {
            n: tuple((Box(*tuples(box)), _leaf_from(arena, *leaf)) for box, *leaf in boxes)
            for n, boxes in held
        }
        flats[tree.key] = FlatState(
            tree.schema,
            [_leaf_from(arena, *leaf) for leaf in leaves],
            {n: HeldLeaf(holding, parts[n]) for n, holding in tree.held.items()},
            tree.marks,
            tuple(keys),
        )
    return label, flats


def _sources_to(flat: FlatState) -> list[Any]:
    """The sources of a key: by leaf, and of leaves that ranks divide by leaf and box."""
    held = [
        [n, [[box, *_leaf_to(source)] for box, source in each.parts]]
        for n, each in flat.held.items()
    ]
    return [list(map(_leaf_to, flat.leaves)), held]


def _leaf_to(source: Source) -> list[Any]:
    if isinstance(source, BufferSource):
        return [_ARENA, source.offset, source.nbytes, source.width]
    if source.known_ids is not None:
        return [_KNOWN, source.known_ids, source.nbytes, source.width]
    memory = source.view(0, source.nbytes)
    assert memory is not None  # other leaves are bytes
    return [_BYTES, memory, source.nbytes, source.width]


def _leaf_from(arena: memoryview, kind: str, what: Any, nbytes: int, width: int) -> Source:
    if kind == _KNOWN:
        return ElsewhereSource(what, nbytes, width)
    if kind == _BYTES:
        return BufferSource(memoryview(what), 0, nbytes, width)
    return BufferSource(arena, what, nbytes, width)


def committed_to(committed: Committed) -> Message:
    """A worker's message about a commit that is durable."""
    _, stored = encode_document(committed.document)
    ids = list(committed.ids.items())
    return {"done": committed.id, "stats": asdict(committed.stats), "document": stored, "ids": ids}


def committed_from(message: Message) -> Committed:
    """The inverse of `committed_to`."""
    commit = CommitId(message["done"])
    return Committed(
        commit,
        decode_document(message["document"], commit),
        CommitStats(**message["stats"]),
        dict(message["ids"]),
    )


def failure_to(error: Exception) -> Message:
    """A worker's message about a failed commit."""
    return {"failed": cause_of(error), "causes": dict(getattr(error, "causes", {}))}


def error_from(message: Message) -> CkptStoreError:
    """The inverse of `failure_to`, as one of our errors."""
    error = Cause(*message["failed"]).error()
    error.causes = {int(rank): why for rank, why in message["causes"].items()}
    return error


LOOK_S = 0.5
"""How often an idle worker checks that its trainer lives."""

MEETING_S = 60.0
"""Time for all workers to connect. All of them are running when they are told to."""

_ADVICE = "the next commit starts other workers for those that are gone"


class Worker(Watch):
    """One trainer's worker, for commits alone and in any number of groups of ranks. It forwards
    their progress to the trainer."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._trainer = os.getppid()
        self._arena = memoryview(b"")
        self._listener: Listener | None = None
        self._links: dict[int, SocketLink] = {}
        self._peers: dict[int, Collective | Exception] = {}
        self._known = Described()

    def serve(self) -> None:
        """Open the store that the first message names, then handle one message after another until
        the trainer is gone.
        """
        first = self._heard()
        if first is None:
            return
        handle = StoreHandle(first["place"], **first["options"])
        threads = ThreadPool(first["threads"])
        to = Destination(handle, threads)
        self._alone, self._together = WholeCommitter(to), RanksCommitter(to)
        while message := self._heard():
            if "fd" in message:  # memory that holds staged states until another one comes
                self._arena = memoryview(mmap.mmap(message["fd"], 0))
                os.close(message["fd"])
            try:
                self._do(message)
            except Exception as error:
                self.tell(failure_to(error))
        for link in self._links.values():
            link.close()
        threads.close()
        handle.close()

    def _do(self, message: Message) -> None:
        if "listen" in message:
            if self._listener:
                self._listener.close()
            self._listener = Listener()
            self.tell({"addresses": self._listener.addresses})
        elif "places" in message:
            self._meet(message)
        else:
            self.tell(committed_to(self._commit(message)))

    def _meet(self, message: Message) -> None:
        """Connect to the other workers of a group. If this fails, the commits of the group fail
        with the same error.
        """
        group, rank, timeout_s = message["group"], message["rank"], message["timeout_s"]
        places = [[(str(host), int(port)) for host, port in place] for place in message["places"]]
        if group in self._links:
            self._links.pop(group).close()
        try:
            assert self._listener is not None
            link = self._listener.connect(
                Invitation(rank, places, message["secret"]), min(MEETING_S, timeout_s)
            )
        except Exception as error:
            self._peers[group] = error
        else:
            self._links[group] = link
            self._peers[group] = Collective(link, rank, len(places), timeout_s, _ADVICE)
        finally:
            self._listener = None

    def _commit(self, message: Message) -> Committed:
        """Make the commit, or this rank's part of it, that `state_to` described."""
        peers = None
        if (group := message["group"]) is not None:
            found = self._peers.get(group)
            if not isinstance(found, Collective):
                raise found or Unavailable("the worker has not met the workers of other ranks")
            peers = found
            peers.timeout_s = message["timeout_s"]
        request = CommitRequest(
            Prepared(*state_from(message, self._arena, self._known)),
            message["started"],
            self,
            ranks=Ranks(**message["ranks"]),
            asked=list(map(SessionId, message["asked"])),
        )
        return self._together.commit(request, peers) if peers else self._alone.commit(request)

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

    def reached(self, milestone: Milestone) -> None:
        self.tell({"reached": milestone.value})

    def publishing(self, session: SessionId) -> None:
        """Raise `Cancelled` if the trainer canceled the commit. A trainer that is gone did not."""
        self.tell({"publishing": session})
        if (answer := self._heard()) and not answer["go"]:
            raise Cancelled("the commit was called off")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    step_aside_of_parent()
    with Connection(int(sys.argv[1])) as connection:
        Worker(connection).serve()
