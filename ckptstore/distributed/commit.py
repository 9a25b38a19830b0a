"""How does a state that many ranks hold become one commit?

Each rank hashes and writes its part, between three rounds:

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptstore.commit.commit import ATTEMPTS, CommitStats
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.model import CommitDocument
from ckptstore.core.options import Milestone
from ckptstore.core.process import uncollected
from ckptstore.distributed import framing
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.coordinator import (
    AGAIN,
    DESCRIBE,
    DONE,
    PLANNED,
    Coordinator,
    Options,
    digest_of,
    head_of,
    refused,
)
from ckptstore.distributed.describe import encode_description
from ckptstore.distributed.exchange_plan import Boxes, Moves, moves_of
from ckptstore.distributed.framing import Cause, failure
from ckptstore.distributed.rank_plan import RankTask, decode_task
from ckptstore.distributed.rank_worker import RankWorker
from ckptstore.errors import CkptStoreError, Conflict, NoSpace
from ckptstore.log.log import Log
from ckptstore.objects import canonical
from ckptstore.objects.documents import decode_document
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.memory_budget import rank_room
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState

Prepare: TypeAlias = Callable[[], tuple[CommitMetadata, Mapping[str, FlatState]]]
"""Returns what a rank commits. It runs within the first round, so that its failure reaches every
rank.
"""


@dataclass(frozen=True, slots=True)
class RanksCommitted:
    """A commit of many ranks that is in the log."""

    id: CommitId
    document: CommitDocument
    stats: CommitStats


class RanksCommitter:
    """Commits states of many ranks to one store. Exists on every rank and makes one commit at a
    time. Keeps this rank's task for the next commit.
    """

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, log: Log, threads: ThreadPool
    ) -> None:
        self._config, self._objects, self._log, self._threads = config, objects, log, threads
        self._coordinator = Coordinator(config, objects, log)
        self._schemas = LastSchemas()
        self._described = b""
        self._task: RankTask | None = None
        self._moves: Moves | None = None
        self._runs = DedupHints()
        self._room = rank_room(
            None, config.chunk_bytes, threads.count, encoding=config.codec != "raw"
        )

    def commit(
        self,
        peers: Collective,
        prepare: Prepare,
        options: Options,
        started: float,
        watch: Watch = UNWATCHED,
        *,
        memory_budget_bytes: int | None = None,
    ) -> RanksCommitted:
        """Write this rank's part of a state. Every rank of `peers` must call it with its own part.

        The coordinator's metadata and options count. `watch` receives progress; an error that it
        raises on any rank stops all ranks. Staged, encoded, exchanged and assembled bytes stay
        within `memory_budget_bytes`; the coordinator's budget limits the bytes in transfer.

        Raises one error on all ranks: `Conflict` for states that do not fit together, for replicas
        that differ, and if concurrent gc kept removing chunks that this commit reused; otherwise
        the class that the causes share. `causes` names the ranks.
        """
        try:
            metadata, flats, session = self._plan(
                peers, prepare, options, watch, memory_budget_bytes
            )
            for _ in range(ATTEMPTS):
                outcome = self._attempt(peers, flats, session, metadata, started, watch)
                if isinstance(outcome, RanksCommitted):
                    self._coordinator.close(ended=True)
                    return outcome
                session = outcome
        except NoSpace:
            self._coordinator.close(
                ended=True
                # Every rank deletes its packs, so a gc that makes room need not wait for the
                # session.
            )
            raise
        finally:
            self._coordinator.close(ended=False)
        raise Conflict(
            f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; "
            "repeat it"
        )

    def _plan(
        self,
        peers: Collective,
        prepare: Prepare,
        options: Options,
        watch: Watch,
        memory_budget_bytes: int | None,
    ) -> tuple[CommitMetadata, Mapping[str, FlatState], SessionId]:
        described: list[tuple[CommitMetadata, Mapping[str, FlatState], bytes]] = []

        def describe() -> bytes:
            asked = bool(described)
            if not asked:
                watch.starting()
                chunk_bytes, encoding = self._config.chunk_bytes, self._config.codec != "raw"
                self._room = rank_room(
                    memory_budget_bytes, chunk_bytes, self._threads.count, encoding=encoding
                )
                metadata, flats = prepare()
                with uncollected():
                    described.append((metadata, flats, encode_description(flats, self._schemas)))
            metadata, _, description = described[0]
            known = digest_of(description) == self._described and not asked
            return framing.join(
                [head_of(metadata), digest_of(description), b"" if known else description]
            )

        def answer(handed_in: list[bytes]) -> list[bytes]:
            return self._coordinator.plan(
                handed_in, described[0][0], replace(options, window_bytes=self._room.window_bytes)
            )

        kind = DESCRIBE
        while kind == DESCRIBE:
            kind, session, task = framing.split(peers.round("commit: plan", describe, answer), 3)
        metadata, flats, description = described[0]
        if kind == PLANNED:
            self._described = b""  # until every rank has confirmed the plan
            peers.round(
                "commit: prepare",
                lambda: self._follow(task, flats, peers.rank),
                lambda ready: ready,
            )
            self._described = digest_of(description)
        return metadata, flats, SessionId(session.decode())

    def _follow(self, task: bytes, flats: Mapping[str, FlatState], rank: int) -> bytes:
        """Decode a new task and compute its moves."""
        with uncollected():
            self._task, self._runs = decode_task(task), DedupHints()
            self._moves = moves_of(
                self._task, Boxes(list(flats.values()), self._config.chunk_bytes), rank
            )
        return b""

    def _attempt(
        self,
        peers: Collective,
        flats: Mapping[str, FlatState],
        session: SessionId,
        metadata: CommitMetadata,
        started: float,
        watch: Watch,
    ) -> RanksCommitted | SessionId:
        packs = PackSet.of(
            self._config,
            self._objects,
            session,
            self._threads,
            peers.rank,
            unbuffered=self._room.write.unbuffered,
        )
        attempt = _Attempt(self._coordinator, peers, packs, metadata, started, watch)
        try:
            return attempt.run(self._work(flats, packs), self._look, self._registered)
        except BaseException as error:
            # Once the coordinator may have appended the entry, only the log's answer tells whether
            # these packs belong to a commit.
            if not attempt.handed_in or (
                isinstance(error, CkptStoreError) and error.causes and 0 not in error.causes
            ):
                with suppress(CkptStoreError):
                    packs.drop()
            raise

    def _work(self, flats: Mapping[str, FlatState], packs: PackSet) -> RankWorker:
        assert self._task is not None and self._moves is not None
        boxes = Boxes(list(flats.values()), self._config.chunk_bytes)
        return RankWorker(
            boxes,
            self._task,
            self._moves,
            self._config.chunk_bytes,
            packs,
            self._threads,
            self._room,
        )

    def _look(self) -> Dedup:
        state = self._log.replay()
        self._objects.sync(state)
        return Dedup(self._objects, state, self._runs)

    def _registered(self, numbers: bytes, packs: PackSet) -> None:
        tables = {pack.record.id: pack.table for pack in packs.closed}
        for number, name in canonical.decode(numbers):
            if name in tables:
                self._objects.registered(number, name, tables[name])


class _Attempt:
    """The second and the third round, under one session. `handed_in` is set once the coordinator
    may have appended to the log.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        peers: Collective,
        packs: PackSet,
        metadata: CommitMetadata,
        started: float,
        watch: Watch,
    ) -> None:
        self._coordinator, self._peers, self._packs, self._metadata, self._started, self._watch = (
            coordinator,
            peers,
            packs,
            metadata,
            started,
            watch,
        )
        self._dedup: Dedup | None = None
        self._packed_s = 0.0
        self._failed: Exception | None = None
        self.handed_in = False

    def run(
        self,
        work: RankWorker,
        look: Callable[[], Dedup],
        register: Callable[[bytes, PackSet], None],
    ) -> RanksCommitted | SessionId:
        """The commit, or the session under which to try again."""
        decided = self._peers.round(
            "commit: decide", lambda: self._report(work, look), self._coordinator.decide
        )
        answer = self._peers.round(
            "commit: publish", lambda: self._receipt(work, decided), self._publish
        )
        kind, first, second = framing.split(answer, 3)
        if kind != DONE:
            self._packs.drop()
            if kind == AGAIN:
                return SessionId(first.decode())
            raise failure(
                "commit: publish", {0: Cause(*canonical.decode(first))}, self._peers.size
            ) from self._failed
        commit, numbers, totals = framing.split(second, 3)
        durable_s = time.perf_counter() - self._started
        self._watch.reached(Milestone.DURABLE)
        register(numbers, self._packs)
        return self._committed(
            CommitId(commit.decode()), first, canonical.decode(totals), durable_s
        )

    def _report(self, work: RankWorker, look: Callable[[], Dedup]) -> bytes:
        self._dedup = work.write(self._peers, look)
        samples = work.samples(self._packs.session)
        where = canonical.encode([[sample.shared, sample.cell] for sample in samples])
        return framing.join([work.reports(), where, b"".join(sample.id for sample in samples)])

    def _receipt(self, work: RankWorker, decided: bytes) -> bytes:
        """This rank's receipt. `_publish` reports a failure of the coordinator's own, so that all
        ranks know that the log was not asked.
        """
        try:
            return self._written(work, decided)
        except Exception as error:
            if not self._peers.leads:
                raise
            self._failed = error
            return b""

    def _written(self, work: RankWorker, decided: bytes) -> bytes:
        work.write_decided([tuple(each) for each in canonical.decode(decided)])
        self._watch.reached(Milestone.HASHED)
        self._packs.wait()
        self._packed_s = time.perf_counter() - self._started
        self._watch.reached(Milestone.WRITTEN)
        self._watch.publishing()
        written = work.written
        head = {
            "packs": [
                [pack.record.id, pack.record.bytes, pack.record.chunks]
                for pack in self._packs.closed
            ],
            "reused": sorted(self._dedup.reused) if self._dedup else [],
            "chunks": written.chunks,
            "new_chunks": written.new_chunks,
            "sent_bytes": written.sent_bytes,
        }
        self.handed_in = not self._peers.leads
        return framing.join([canonical.encode(head), written.jobs, written.cells, written.decided])

    def _publish(self, handed_in: list[bytes]) -> list[bytes]:
        """Publish. A failure before the append counts as a refusal: ranks that know it delete their
        packs.
        """
        if self._failed:
            return refused(self._failed, self._peers.size)
        assert self._dedup is not None
        try:
            return self._coordinator.publish(handed_in, self._metadata, self._dedup, self._packs)
        except BaseException as error:
            self.handed_in = self._coordinator.asked
            if self.handed_in or not isinstance(error, Exception):
                raise
            self._failed = error
            return refused(error, self._peers.size)

    def _committed(
        self, commit: CommitId, stored: bytes, totals: dict[str, int], durable_s: float
    ) -> RanksCommitted:
        document = decode_document(stored, commit)
        stats = CommitStats(
            document.logical_bytes,
            document.new_bytes,
            document.leaves,
            totals["chunks"],
            totals["new_chunks"],
            self._packed_s,
            durable_s,
            time.perf_counter() - self._started,
        )
        return RanksCommitted(commit, document, stats)
