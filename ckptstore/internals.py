"""The parts of an open store that other rooms use and trainers do not see.

`ckptstore.store.internals_of` returns them. Every commit is made here: synchronous or in the
background, by one process or by many ranks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptstore.commit.async_commit import AsyncCommits, CommitRoute, PendingWatch
from ckptstore.commit.commit_metadata import (
    CommitMetadata,
    CommitRequest,
    ParentTracker,
    Prepared,
    RunWatch,
    commit_of,
)
from ckptstore.commit.outages import passes
from ckptstore.commit.parts import PartsCommitter
from ckptstore.commit.pending import UNWATCHED, Pending
from ckptstore.commit.plan import Flats
from ckptstore.commit.transaction import CommitStats, Committed, Destination
from ckptstore.contents import CommitContents, nearest_with
from ckptstore.core.forks import cached_property, survives_forks
from ckptstore.core.ids import ChunkId, CommitId, SessionId, is_commit_id
from ckptstore.core.model import CommitDocument
from ckptstore.core.options import Async, Milestone, Ranks
from ckptstore.core.refs import Latest, parse_ref
from ckptstore.core.settings import Settings
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.errors import (
    CkptStoreError,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.log.resolve import Resolved, newest_first
from ckptstore.maintenance.disk_space import DiskWatch
from ckptstore.peers import Committer, collective_of
from ckptstore.plugins.analysis.measurements import with_tensors
from ckptstore.plugins.tiers.tiers import Tier
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import GcPin, items_of
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, reads_at_once, wholly
from ckptstore.restore.reader import Reader
from ckptstore.snapshot import Snapshot
from ckptstore.state.casting import refuse_divided_ties
from ckptstore.state.flatten import flatten
from ckptstore.state.shards import Globs, marked

if TYPE_CHECKING:
    from ckptstore.distributed.collective import Collective
    from ckptstore.distributed.worker_client import WorkerCommitter

logger = logging.getLogger("ckptstore")

PendingCommit: TypeAlias = Pending[Snapshot]
"""The result of `Store.commit_async`."""

RATE_BYTES = 64 << 20
"""Smaller writes do not measure the speed of the disk."""


CommitKeys: TypeAlias = tuple[tuple[CommitId, SessionId], ...]
"""Commits and the sessions that made them, which name their documents."""

MakeMetadata: TypeAlias = Callable[[], CommitMetadata]
"""Checks the arguments that describe a commit. Ranks call it where errors reach every rank."""


def flats_of(
    app_state: Mapping[str, Any], ranks: Ranks, peers: "Collective | None", *, allow_pickle: bool
) -> Flats:
    """The flattened state; with `peers`, this rank's part of one."""
    # Globs may name what is below.
    plain = peers is None or not (ranks.replicated or ranks.private)
    if peers is None:
        return flatten(app_state, allow_pickle=allow_pickle, plain=plain, shared=True)
    flats = flatten(app_state, allow_pickle=allow_pickle, ranks=True, plain=plain)
    globs = Globs(tuple(ranks.replicated), tuple(ranks.private), ranks.compare)
    return marked(app_state, flats, globs)


def refuse_divided(flats: Flats, label: CommitMetadata) -> None:
    """Raise `InvalidInput` for a cast that names one of two names of a tensor."""
    if label.cast:
        refuse_divided_ties(flats, label.cast)


class StoreInternals:
    """An open store for one run: its handle, its threads, its committers, and its last commit.

    A committer that the caller waits for, one in the background (with low priority, or in a worker
    process) and a reader are created when they are first used. Threads may share it. Commits of one
    object take turns.
    """

    def __init__(self, handle: StoreHandle, settings: Settings, tier: Tier | None = None) -> None:
        self.run = settings.run
        self.tier = tier
        if tier:
            handle.objects.rescue = tier.rescue
        self.handle, self.settings = handle, settings
        self.threads = ThreadPool(settings.threads)
        self._low_priority = ThreadPool(settings.threads, aside=True)
        slow = handle.storage.capabilities.slow_requests
        self._reading = ThreadPool(reads_at_once(settings.threads)) if slow else self.threads
        self._thread = threading.local()
        self._disk = DiskWatch(handle, settings.run, settings.on_full)
        self._run_watch = RunWatch(settings.run)
        self.parent_tracker = ParentTracker(lambda session: handle.log.replay().made_by(session))
        self._best_rate = 0.0
        self._committed_chunks: tuple[CommitKeys, Mapping[bytes, ChunkId]] = (), {}
        self.async_commits: AsyncCommits[Snapshot] = AsyncCommits(
            self.parent_tracker,
            max_in_flight=settings.max_in_flight,
            staging_bytes=settings.staging_bytes,
            shared=settings.executor == "process",
            place=handle.url,
        )
        survives_forks(self)

    def forked(self) -> None:
        self._lock = threading.Lock()
        self.__dict__.pop("committer", None)

    @cached_property
    def committer(self) -> Committer:
        return Committer(Destination(self.handle, self.threads))

    @cached_property
    def background_committer(self) -> "Committer | WorkerCommitter":
        if self.settings.executor != "process":
            return Committer(Destination(self.handle, self._low_priority))
        from ckptstore.distributed.worker_client import WorkerCommitter

        options = {
            "storage_options": dict(self.settings.storage_options),
            "patch_memory_bytes": self.settings.patch_memory_bytes,
            "direct_io": self.settings.direct_io is not False,
            "index": self.settings.index,
        }
        return WorkerCommitter(self.handle.place, options, self.settings.threads)

    @cached_property
    def parts_committer(self) -> PartsCommitter:
        """For commits whose parts another library's ranks write: `open` and `write`, then
        `publish` within `commit_external`."""
        return PartsCommitter(Destination(self.handle, self.threads))

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.handle.config, self.handle.objects, self._reading)

    @property
    def worker(self) -> "WorkerCommitter | None":
        """The worker process; None while there is none."""
        is_there = self.settings.executor == "process"
        return self.__dict__.get("background_committer") if is_there else None

    def chunks(self) -> ObjectStore:
        """The chunks that this store has now, by id."""
        self.handle.objects.sync(self.handle.log.replay(refresh=True))
        return self.handle.objects

    def committed_chunks(self) -> Mapping[bytes, ChunkId]:
        """Ids by checksum of the chunks that were committed last, as of the last replay of the log:
        in this run's newest commit, whoever made it, and in the one that this object made or
        restored last.

        Empty, with a warning, if those commits cannot be read.
        """
        state, tip = self.handle.log.state, self.parent_tracker.tip()
        last = (*state.runs.get(self.run, ())[-1:], commit_of(tip))
        kept = {
            commit: state.commits[commit].session
            for commit in last
            if commit and commit in state.commits
        }
        commits, (known, found) = tuple(kept.items()), self._committed_chunks
        try:
            if commits != known:
                self.handle.objects.sync(state)
                found = self._ids_by_checksum(commits)
                self._committed_chunks = commits, found
            return found
        except CkptStoreError as error:
            logger.warning("%s: the last commit's chunks are not known: %s", self.handle.url, error)
            return {}

    def _ids_by_checksum(self, commits: CommitKeys) -> Mapping[bytes, ChunkId]:
        reader, objects = self.reader, self.handle.objects
        documents = [reader.document(session, commit) for commit, session in commits]
        trees = [tree for document in documents for tree in reader.trees(document.trees).values()]
        ids = b"".join({content.ids for tree in trees for content in tree.contents})
        where = objects.locate(ids)
        rows = zip(where["checksum"].tolist(), where["found"].tolist(), items_of(ids), strict=True)
        return {checksum: ChunkId(chunk) for checksum, found, chunk in rows if found}

    def gc_pin(self, purpose: str) -> GcPin | None:
        """A session that keeps the chunks it finds from garbage collection; None if this store is
        not writable. `purpose` appears in `ckptstore sessions`."""
        try:
            self.handle.check_writable()
            return GcPin(self.handle.objects, self.handle.log, purpose)
        except (ReadOnly, Unavailable) as error:
            logger.warning("%s cannot be relied on for chunks: %s", self.handle.url, error)
            return None

    def commit(
        self,
        flats: Callable[[], Flats],
        metadata: MakeMetadata,
        ranks: Ranks,
        peers: "Collective | None" = None,
        *,
        memory_budget_bytes: int | None = None,
        stats: bool = False,
        follow: bool = True,
    ) -> Snapshot:
        """Commit now the flattened state that `flats` returns, whose bytes may come from anywhere,
        as in an import. With `stats`, tensors are measured; with `follow`, it becomes the parent of
        the next commit. Every rank of `peers` calls this and gets the same commit."""
        self.check_not_within()
        self.async_commits.wait()
        started = time.perf_counter()
        measured: dict[bytes, bytes] | None = {} if stats else None
        with self._lock, self.async_commits.noting_failures():
            what = self._prepared(flats, metadata, peers)
            called = PendingCommit(None) if peers else None
            watch = PendingWatch(called, {}, None) if called else UNWATCHED
            request = CommitRequest(
                what, started, watch, memory_budget_bytes, ranks, None, measured
            )

            given = (request, peers, self.committer, self.threads)
            if called:
                # Others wait for this rank until the commit has ended, or was called off.
                make = partial(self._make, *given, follow=follow)
                committed = wholly(make, called.cancel)
            else:
                committed = self._make(*given, follow=follow)
        return self.committed(committed, leads=peers is None or peers.leads)

    def _prepared(
        self, flats: Callable[[], Flats], metadata: MakeMetadata, peers: "Collective | None"
    ) -> Prepared | BaseException:
        """The state to commit. If one of several ranks has none, the reason, to be raised in a
        round that reaches all ranks."""
        try:
            if peers:
                peers.check_reached()
                self.async_commits.raise_failure(
                    "raised by the next commit, which was not made: repeat it"
                )
            self.handle.check_writable()
            label = metadata()
            if not label.parents:
                label = self.parent_tracker.following(label)
            with self._within():
                found = flats()
            refuse_divided(found, label)
            return Prepared(label, found)
        except BaseException as error:
            if peers:
                return error
            raise

    def _make(
        self,
        request: CommitRequest,
        peers: "Collective | None",
        committer: "Committer | WorkerCommitter",
        threads: ThreadPool,
        *,
        follow: bool = False,
    ) -> Committed:
        """Make a commit; on a full disk, try once more if that is promising. With `follow`, it is
        the parent of the next one."""
        leads = peers is None or peers.leads
        nbytes = request.what.nbytes if isinstance(request.what, Prepared) else 0
        if nbytes and leads:
            self._disk.before(nbytes)
        make = committer.way(peers)
        try:
            try:
                committed = make(request)
            except NoSpace as full:
                self._disk.relieve(full, nbytes, peers, collect=True)
                try:
                    committed = make(request)
                except NoSpace as still_full:
                    self._disk.relieve(still_full, nbytes, peers, collect=False)
                    raise
            if follow:
                self.parent_tracker.now(committed.id)
        except BaseException:
            if follow:
                self.parent_tracker.failed(request.asked)
            raise
        if leads:
            self.handle.follow()
        return self._measured(committed, request, peers, threads)

    def _measured(
        self,
        committed: Committed,
        request: CommitRequest,
        peers: "Collective | None",
        threads: ThreadPool,
    ) -> Committed:
        """A commit with its statistics, if they were asked for. It is durable, so it succeeds
        without them where they cannot be read."""
        if request.measured is None:
            return committed
        measured, reader = request.measured, self.reader
        try:
            return with_tensors(self.handle, threads, reader, committed, measured, peers)
        except CkptStoreError as error:
            named = committed.id[:12]
            logger.warning("commit %s is durable, and has no statistics: %s", named, error)
            return committed

    def commit_external(
        self,
        publish: Callable[[CommitMetadata, list[SessionId]], Committed],
        metadata: CommitMetadata,
        *,
        follow: bool = True,
    ) -> Snapshot:
        """The commit that `publish` makes of parts written by another library's ranks. It adds the
        session for which it asks the log to the list that it gets.

        With `follow`, it follows this store's last commit, and the next one follows it.
        """
        self.check_not_within()
        self.async_commits.wait()
        with self._lock:
            asked: list[SessionId] = []
            try:
                label = self.parent_tracker.following(metadata) if follow else metadata
                committed = publish(label, asked)
                self.handle.follow()
                if follow:
                    self.parent_tracker.now(committed.id)
            except BaseException:
                if follow:
                    self.parent_tracker.failed(asked)
                raise
        return self.after_failure(self.committed(committed))

    def after_failure(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot`, which a call has just made, or raise the failure of an earlier
        background commit that the caller has not seen. It is raised only now, so that one failure
        does not cost two commits."""
        self.async_commits.raise_failure(
            f"raised by the next call, whose commit was made all the same: {snapshot.id[:12]}"
        )
        return snapshot

    def commit_async(
        self,
        app_state: Mapping[str, Any],
        metadata: CommitMetadata,
        options: Async,
        ranks: Ranks,
        peers: "Collective | None",
        *,
        allow_pickle: bool,
        stats: bool,
    ) -> PendingCommit:
        """Stage `app_state` and commit it in the background, alone or with `peers`."""
        met: list[Collective | None] = []
        if peers and options.trust_version:
            raise InvalidInput(
                "ranks that commit together copy all that they hold: leave out trust_version"
            )
        elsewhere = self.settings.executor == "process"
        looks_later = options.goes_on and not (elsewhere and peers)
        self.handle.check_writable(asks_storage=not looks_later)
        if elsewhere and (stats or metadata.cast):
            raise InvalidInput("stats, cast need executor='thread': a worker process has no torch")

        def flats() -> Flats:
            with self._within():
                found = flats_of(app_state, ranks, peers, allow_pickle=allow_pickle)
            refuse_divided(found, metadata)
            return found

        def meet() -> None:
            met.append(collective_of(ranks.process_group, ranks.timeout_s, behind=True))

        def goes_on(error: BaseException) -> bool:
            return passes(error) and not (met[0] and met[0].lost)  # a lost rank is no lost storage

        def commit(request: CommitRequest, pending: PendingCommit) -> tuple[Committed, Snapshot]:
            behind = met[0]
            asked = replace(request, ranks=ranks, measured={} if stats else None)
            with self._lock:
                if looks_later and (error := self._why_not_writable()):
                    if not behind:
                        raise error
                    asked = replace(asked, what=error)  # raised in a round, on all ranks
                committed = self._make(asked, behind, self.background_committer, self._low_priority)
            held_s = pending.timings.held_s or pending.age_s
            cost = replace(committed.stats, held_s=held_s)
            leads = behind is None or behind.leads
            made = self.committed(replace(committed, stats=cost), leads=leads, pending=pending)
            return committed, made

        whole = peers is not None or elsewhere
        pending = self.async_commits.start(
            app_state,
            metadata,
            options,
            CommitRoute(flats, commit, peers, meet, whole, elsewhere, goes_on),
        )
        pending.flush_mirror = self.tier.flush if self.tier else None
        return pending

    def _why_not_writable(self) -> BaseException | None:
        """What `check_writable` raises. A place that is gone, as a mount may be, can come back."""
        try:
            self.handle.check_writable()
        except BaseException as error:
            gone = isinstance(error, NotFound | Corrupt) and self.handle.is_gone()
            return Unavailable(str(error)) if gone else error
        return None

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Mark this thread as calling `state_dict()` of the caller's objects. These methods must
        not commit to the same store."""
        self._thread.within = True
        try:
            yield
        finally:
            self._thread.within = False

    def check_not_within(self) -> None:
        """Raise `InvalidInput` within a `state_dict()` that a commit to this store called."""
        if getattr(self._thread, "within", False):
            raise InvalidInput(
                "a state_dict() called for a commit commits to, or closes, the same store; that "
                "commit would wait for itself; do it before or after the commit"
            )

    def close(self) -> None:
        """Wait for the commits in flight; close committers, readers, threads and files.

        Then raises the first failure of an asynchronous commit that the caller has not seen.
        """
        self.check_not_within()
        failed = self.async_commits.drain()
        with ExitStack() as closing:
            closing.callback(self._release)
            if self.tier:
                closing.callback(self.tier.close)
        if failed:
            raise failed

    def _release(self) -> None:
        with self._lock, ExitStack() as closing:  # all of it, also if one is interrupted
            closing.callback(self.handle.close)
            for threads in (self.threads, self._low_priority, self._reading):
                closing.callback(threads.close)
            if self.worker:
                closing.callback(self.worker.close)
            closing.callback(self.async_commits.close)

    def wake_tier(self) -> None:
        """Tell the background uploader of the mirror, if there is one, to look for new commits."""
        if self.tier:
            self.tier.wake()

    def candidates(self, peers: "Collective | None") -> Iterable[tuple[Reader | None, Resolved]]:
        """Commits of this run, newest first, each with a reader if only the mirror has it; with
        `peers`, as the coordinator lists them: the failure of a commit in the background that one
        of them has not seen is raised on all. A gc may have purged one of them meanwhile: who opens
        it finds out."""
        log, tier = self.handle.log, self.tier
        if peers is None:
            return self._newest_first()

        def listed() -> list[tuple[Resolved, bool]]:
            self.async_commits.settle()
            found = self._newest_first() if peers.leads else ()
            return [(info, reader is None) for reader, info in found]

        choice = peers.share("resume: choose", listed, lambda all_: all_[0])
        rows = [
            (Resolved(CommitId(commit), SessionId(session), step, tuple(tags)), is_here)
            for (commit, session, step, tags), is_here in choice
        ]
        known = log.replay().commits
        log.replay(refresh=any(is_here and info.id not in known for info, is_here in rows))
        if tier is None:
            return [(None, info) for info, _ in rows]
        return peers.on_all(
            lambda: [(None if is_here else tier.reader(), info) for info, is_here in rows]
        )

    def _newest_first(self) -> list[tuple[Reader | None, Resolved]]:
        state = self.handle.log.replay()
        if self.tier:
            return self.tier.newest_first(self.run, state)
        return [(None, info) for info in newest_first(state, self.run)]

    def find(self, ref: str | int) -> tuple[Reader | None, Resolved]:
        """The commit of `ref`, with a reader if only the mirror has it. `latest` is the newest of
        both. Waits for commits in flight, unless `ref` is an id: a later commit cannot change its
        meaning.
        """
        if not (isinstance(ref, str) and is_commit_id(ref)):
            self.async_commits.settle()
        if self.tier and isinstance(named := parse_ref(ref), Latest):
            for found in self.tier.newest_first(named.run or self.run, self.handle.log.replay()):
                return found
        try:
            return None, find_commit(self.handle, ref, self.run)
        except NotFound:
            if self.tier and (there := self.tier.find(ref, self.run)):
                return there
            raise

    def snapshot(self, info: Resolved, reader: Reader | None = None) -> Snapshot:
        """A snapshot of the commit `info`. Reads its document."""
        document = (reader or self.reader).document(info.session, info.id)
        return self.snapshot_of(info.id, document, info.tags, reader=reader)

    def committed(
        self, committed: Committed, *, leads: bool = True, pending: PendingCommit | None = None
    ) -> Snapshot:
        """The snapshot of a commit that was just made. Reports the commit, and of several ranks the
        one that `leads` has it mirrored."""
        document, newest = committed.document, self.handle.log.state.runs.get(self.run, ())
        outages = self.async_commits.outages
        outages.durable = committed.id, document.step
        if outages.failing_since is not None:
            step = "" if document.step is None else f" of step {document.step}"
            outages.recovered(f"the commit{step}")
        if self.tier and leads:
            reached = partial(pending.reached, Milestone.MIRRORED) if pending else None
            self.tier.watch(committed.id, reached) if reached else self.tier.wake()
        self._disk.after(committed.stats.logical_bytes, committed.stats.new_bytes)
        self._run_watch.after(committed.id, document.parents, newest)
        self._report(committed)
        return self.snapshot_of(committed.id, document, document.tags, committed.stats)

    def snapshot_of(
        self,
        commit: CommitId,
        document: CommitDocument,
        tags: tuple[str, ...],
        stats: CommitStats | None = None,
        reader: Reader | None = None,
    ) -> Snapshot:
        """A snapshot whose restores wait for lazy copies and set the parent of later commits."""
        hold, near = self.async_commits.hold, partial(nearest_with, self.handle, self.reader)
        contents = CommitContents(reader or self.reader, commit, document, hold, None, near)
        return Snapshot(contents, tags=tags, stats=stats, restored=self.parent_tracker.now)

    def _report(self, committed: Committed) -> None:
        """Log one line; `Snapshot.stats` has the same figures."""
        stats, document = committed.stats, committed.document
        if stats.new_bytes >= RATE_BYTES:
            self._best_rate = max(self._best_rate, stats.written_bytes_per_s)
        share = (
            f", {stats.written_bytes_per_s / self._best_rate:.0%} of the disk's best here"
            if stats.new_bytes >= RATE_BYTES
            else ""
        )
        logger.info(
            "commit %s%s%s: %s -> %s new, held %s, durable after %s%s",
            committed.id[:12],
            "" if document.step is None else f" step {document.step}",
            f" ({', '.join(document.tags)})" if document.tags else "",
            bytes_text(stats.logical_bytes),
            bytes_text(stats.new_bytes),
            seconds_text(stats.held_s),
            seconds_text(stats.durable_s),
            share,
        )
