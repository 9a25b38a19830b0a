"""How does a state that many ranks hold become one commit?

One process takes the short way, `commit.transaction.WholeCommitter`, without rounds. Each rank
hashes and writes its part, between three rounds:

* *plan*: Ranks describe what they hold. The coordinator assigns the work and names the session.
* *decide*: Ranks have exchanged the fragments of cut chunks and written the planned chunks. They
  report the content of leaves whose replication is unknown.
* *publish*: Packs are closed and durable. The coordinator writes pages, schemas, layout and
  document, and appends the entry.

A failure on any rank before the third round's answer fails the commit on all ranks, and nothing is
visible; after the answer the commit exists. A new plan adds a round in which every rank confirms
that it can follow the plan: from then on, others wait for what it sends.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest
from ckptstore.commit.plan import Flats
from ckptstore.commit.transaction import (
    ATTEMPTS,
    Committed,
    Destination,
    Published,
    Transaction,
    casting_of,
    contended,
)
from ckptstore.core.ids import CommitId, SessionId, digest
from ckptstore.core.options import Milestone
from ckptstore.core.process import uncollected
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.coordinator import (
    AGAIN,
    DESCRIBE,
    DONE,
    PLANNED,
    REFUSED,
    Coordinator,
    head_of,
)
from ckptstore.distributed.framing import Cause, cause_of, failure
from ckptstore.distributed.merge import encode_description
from ckptstore.distributed.rank_worker import (
    Boxes,
    Plans,
    RankTask,
    RankWorker,
    decode_task,
)
from ckptstore.errors import CkptStoreError, NoSpace
from ckptstore.objects.documents import decode_document
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.memory_budget import RankRoom, rank_room

if TYPE_CHECKING:
    from ckptstore.state.casting import Casting


@dataclass(frozen=True, slots=True)
class _Described:
    """This rank's state to commit, its description, and its share of resources."""

    label: CommitMetadata
    flats: Flats
    description: bytes
    room: RankRoom
    casting: "Casting | None"


class RanksCommitter:
    """Commits states to one store with other ranks, each of which has one; one at a time. Keeps the
    plan, and this rank's task, for the next commit.
    """

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._coordinator = Coordinator(to)
        self._schemas = LastSchemas()
        self._described_last = b""
        self._planned_with: Collective | None = None  # its ranks, in whose order the task counts
        self._committed_with: Collective | None = None  # its ranks have one store
        self._task: RankTask | None = None
        self._plans: Plans = {}

    def commit(self, request: CommitRequest, peers: Collective) -> Committed:
        """Write this rank's part of a state, and append the entry; the commit is durable on return.
        Every rank of `peers` must call it with its own part.

        The coordinator's metadata and options count. Staged, encoded, exchanged and assembled bytes
        stay within the request's budget; the coordinator's limits the bytes in transfer.

        Raises `InvalidInput` for too small a budget, `Unavailable` if storage fails, `Conflict` if
        others kept removing chunks to be reused, for states that do not fit together and for
        replicas that differ, and exceptions of `watch`. All ranks raise one error, of the class
        that the causes share; `causes` names the ranks. After any of them the store is as before.
        """
        try:
            described, session = self._plan(peers, request)
            for _ in range(ATTEMPTS):
                outcome = self._attempt(peers, request, described, session)
                if isinstance(outcome, Committed):
                    self._coordinator.close(ended=True)
                    return outcome
                session = outcome
        except NoSpace:
            # Every rank deletes its packs, so a gc that makes room need not wait for the session.
            self._coordinator.close(ended=True)
            raise
        finally:
            self._coordinator.close(ended=False)
        raise contended()

    def _plan(self, peers: Collective, request: CommitRequest) -> tuple[_Described, SessionId]:
        found: list[_Described] = []

        def describe() -> Any:
            asked = bool(found)
            if not asked:
                found.append(self._describe(request))
            label, description = found[0].label, found[0].description
            is_kept = peers is self._planned_with and digest(description) == self._described_last
            known = is_kept and not asked
            return head_of(label), digest(description), b"" if known else description

        def answer(handed_in: list[Any]) -> list[Any]:
            window_bytes = found[0].room.window_bytes
            return self._coordinator.plan(handed_in, found[0].label, request.ranks, window_bytes)

        kind = DESCRIBE
        while kind == DESCRIBE:
            kind, session, task = peers.round("commit: plan", describe, answer)
        if kind == PLANNED:
            self._described_last = b""  # until every rank has confirmed the plan
            peers.share("commit: prepare", lambda: self._follow(task, peers.rank))
            self._described_last, self._planned_with = digest(found[0].description), peers
        return found[0], SessionId(session)

    def _describe(self, request: CommitRequest) -> _Described:
        request.watch.starting()
        config = self._to.config
        room = rank_room(
            request.memory_budget_bytes,
            config.chunk_bytes,
            self._to.threads.count,
            encoding=config.codec != "raw",
        )
        label, flats = request.prepared()
        casting = casting_of(flats, label)
        flats = casting.flats if casting else flats
        with uncollected():
            description = encode_description(flats, self._schemas)
            return _Described(label, flats, description, room, casting)

    def _follow(self, task: bytes, rank: int) -> None:
        with uncollected():
            self._task, self._plans = decode_task(task, rank), {}

    def _attempt(
        self,
        peers: Collective,
        request: CommitRequest,
        described: _Described,
        session: SessionId,
    ) -> Committed | SessionId:
        """The second and the third round: the commit, or the session under which to try again."""
        assert self._task is not None
        room = described.room
        transaction = Transaction(
            self._to, session, rank=peers.rank, unbuffered=room.write.unbuffered
        )
        transaction.measured, transaction.asked = request.measured, request.asked
        transaction.patching = request.memory_budget_bytes is None
        transaction.is_with_publisher = peers.leads or peers is self._committed_with
        boxes = Boxes(list(described.flats.values()), self._to.config.chunk_bytes)
        label, threads = described.label, self._to.threads
        before = partial(self._to.before, label.run, label.parents)
        worker = RankWorker(transaction, boxes, self._task, self._plans, threads, room, before)
        publication = _Publication(
            peers, transaction, worker, request, self._coordinator, described.casting
        )
        with transaction:
            decided = peers.round(
                "commit: decide", lambda: worker.report(peers), self._coordinator.decide
            )
            kind, said = publication.ask(decided, described.label)
            if kind == DONE:
                self._committed_with = peers
                return publication.done(*said)
            transaction.not_taken()
            if kind != AGAIN:
                raise failure(
                    "commit: publish", {0: Cause(*said)}, peers.size
                ) from publication.failed
            transaction.packs.drop()
            return SessionId(said)


@dataclass(slots=True)
class _Publication:
    """The third round. `failed` is what kept this rank, the coordinator, from the log."""

    _peers: Collective
    _transaction: Transaction
    _worker: RankWorker
    _request: CommitRequest
    _coordinator: Coordinator
    _casting: "Casting | None"
    _packed_at: float = 0.0
    failed: Exception | None = None

    def ask(self, decided: Any, label: CommitMetadata) -> Any:
        """The coordinator's answer to the ranks' receipts. If another rank has failed, the log was
        not asked, and the transaction may be undone."""

        def publish(handed_in: list[Any]) -> list[Any]:
            try:
                if self.failed:
                    raise self.failed
                watch = self._request.watch
                return self._coordinator.publish(handed_in, label, self._transaction, watch)
            except Exception as error:
                if self._transaction.is_asked:
                    raise
                self.failed = error
                return [(REFUSED, cause_of(error))] * len(handed_in)

        try:
            return self._peers.round("commit: publish", lambda: self._receipt(decided), publish)
        except CkptStoreError as error:
            if not self._peers.leads and error.causes and 0 not in error.causes:
                self._transaction.not_taken()
            raise

    def _receipt(self, decided: Any) -> Any:
        """This rank's receipt. `ask` reports a failure of the coordinator's own, so that all ranks
        know that the log was not asked.
        """
        try:
            return self._written(decided)
        except Exception as error:
            if not self._peers.leads:
                raise
            self.failed = error
            return None

    def _written(self, decided: Any) -> Any:
        watch = self._request.watch
        self._worker.write_decided(decided)
        watch.reached(Milestone.HASHED)
        errors = self._casting.errors(self._peers.rank) if self._casting else []
        receipt = (*self._worker.receipt(), errors)
        self._packed_at = time.perf_counter()
        if not self._peers.leads:  # which is told of the commit when it appends that
            watch.reached(Milestone.WRITTEN)
            watch.publishing(self._transaction.session)
            # Once the coordinator may have appended the entry, only the log's answer tells whether
            # these packs belong to a commit, and which commit the next one follows.
            self._transaction.asks()
        return receipt

    def done(
        self, commit: str, stored: bytes, packs: Any, chunks: int, new_chunks: int
    ) -> Committed:
        """The commit whose document is `stored`."""
        durable_at = time.perf_counter()
        document = decode_document(stored, CommitId(commit))
        if not self._peers.leads:
            self._request.watch.reached(Milestone.DURABLE)
            self._transaction.index(packs)
        published = Published(
            CommitId(commit), document, packs, chunks, new_chunks, self._packed_at, durable_at
        )
        return published.committed(self._request.started)
