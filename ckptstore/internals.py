"""The parts of an open store that other rooms use and trainers do not see.

`ckptstore.store.internals_of` returns them. They make every commit: at once or in the
background, by one process or by many ranks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

from ckptstore.commit.async_commit import (
    AsyncCommits,
    AsyncOptions,
    AsyncResult,
    CommitRoute,
    by_itself,
)
from ckptstore.commit.commit import CommitStats, Committed
from ckptstore.commit.commit_metadata import CommitMetadata, ParentTracker
from ckptstore.commit.dedup_probe import DedupProbe, GcPin
from ckptstore.commit.pending import Pending, Watch
from ckptstore.contents import CommitContents
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument
from ckptstore.core.options import Ranks
from ckptstore.core.settings import Settings
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.distributed.collective import Collective, begun_by_all
from ckptstore.distributed.commit import Prepare, RanksCommitted
from ckptstore.distributed.coordinator import Options
from ckptstore.distributed.gloo import BACKGROUND, collective_of
from ckptstore.errors import InvalidInput, ReadOnly, Unavailable
from ckptstore.maintenance.enospc import DiskWatch
from ckptstore.maintenance.mirror.tiers import Tier
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.lru import SecondNames
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader
from ckptstore.runtime import StoreRuntime
from ckptstore.snapshot import Snapshot
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.replication import Globs, marked
from ckptstore.state.staging_buffers import Buffer

logger = logging.getLogger("ckptstore")

PendingCommit: TypeAlias = Pending[Snapshot]
"""The result of `Store.commit_async`."""

RATE_BYTES = 64 << 20
"""Smaller writes do not measure the speed of the disk."""

MakeMetadata: TypeAlias = Callable[[], CommitMetadata]
"""Checks the arguments that describe a commit. Ranks call it where errors reach every rank."""


@dataclass(frozen=True, slots=True)
class RanksArguments:
    """How a caller wants several ranks to commit together."""

    process_group: Any
    globs: Globs
    options: Options
    timeout_s: float

    @classmethod
    def of(cls, ranks: Ranks) -> "RanksArguments":
        return cls(
            ranks.process_group,
            Globs(tuple(ranks.replicated), tuple(ranks.private), ranks.compare),
            Options(ranks.canonical, ranks.trust_replicated),
            ranks.timeout_s,
        )


class StoreInternals:
    """An open store for one run: its handle, its committers and what it committed last.

    Threads may share it. Commits of one object take turns.
    """

    def __init__(self, handle: StoreHandle, settings: Settings, tier: Tier | None = None) -> None:
        self.run = settings.run
        self.tier = tier
        if tier:
            handle.objects.rescue = tier.rescue
        self.handle, self.settings = handle, settings
        self.runtime = StoreRuntime(handle, settings)
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._disk = DiskWatch(handle, settings.run, settings.on_full)
        self.parent_tracker = ParentTracker()
        self._best_rate = 0.0
        self.async_commits: AsyncCommits[Snapshot] = AsyncCommits(
            self.parent_tracker,
            lambda: DedupProbe(handle.config, handle.objects, handle.log),
            max_in_flight=settings.max_in_flight,
            staging_bytes=settings.staging_bytes,
            shared=settings.executor == "process",
            place=handle.url,
        )

    @property
    def reopen_arguments(self) -> dict[str, Any]:
        """Arguments with which another process opens this store for the same run."""
        return {
            "place": self.handle.place,
            "run": self.run,
            "storage_options": self.settings.storage_options,
            "index": self.settings.index,
        }

    def chunks(self) -> ObjectStore:
        """The chunks that this store has now, by id."""
        self.handle.objects.sync(self.handle.log.replay(refresh=True))
        return self.handle.objects

    def second_names(self, naming: Callable[[memoryview], bytes]) -> SecondNames:
        """Map from a checksum by `naming` to the ids of chunks that this process hashes from now
        on. The first call decides on `naming`."""
        objects = self.handle.objects
        objects.second_names = objects.second_names or SecondNames(naming)
        return objects.second_names

    def gc_pin(self, purpose: str) -> GcPin | None:
        """A session that keeps the chunks it finds from garbage collection; None if this store is
        not writable. `purpose` appears in `ckptstore sessions`."""
        try:
            self.handle.check_writable()
            return GcPin(self.handle.objects, self.handle.log, purpose)
        except (ReadOnly, Unavailable) as error:
            logger.warning("%s cannot be relied on for chunks: %s", self.handle.url, error)
            return None

    def commit_flat(
        self,
        flats: Callable[[], Mapping[str, FlatState]],
        metadata: MakeMetadata,
        *,
        memory_budget_bytes: int | None = None,
    ) -> Snapshot:
        """Commit the flattened state that `flats` returns, by this process alone. The bytes of its
        leaves may come from anywhere, as in an import."""
        self.check_not_within()
        self.async_commits.settle()
        self.handle.check_writable()
        label = metadata()
        with self._lock:
            started = time.perf_counter()
            label = replace(label, parents=self.parent_tracker.parents())
            with self._within():
                state = flats()
            committed = self._make(
                state,
                lambda: self.runtime.committer.commit(
                    state, label, started, memory_budget_bytes=memory_budget_bytes
                ),
            )
            self.parent_tracker.now(committed.id)
        return self._committed(committed)

    def commit_ranks(
        self,
        app_state: Mapping[str, Any],
        metadata: MakeMetadata,
        peers: Collective,
        ranks: RanksArguments,
        *,
        allow_pickle: bool,
        memory_budget_bytes: int | None,
    ) -> Snapshot:
        """Commit together with `peers`; every rank calls this and gets the same snapshot."""
        self.check_not_within()
        failed = self.async_commits.drain()

        def prepare() -> tuple[CommitMetadata, dict[str, FlatState]]:
            if failed:
                raise failed
            self.handle.check_writable()
            label = metadata()
            flats = self._flats_of_ranks(app_state, ranks.globs, allow_pickle=allow_pickle)
            return replace(label, parents=self.parent_tracker.parents()), flats

        started = time.perf_counter()

        def commit(prepared: Prepare) -> RanksCommitted:
            return self.runtime.ranks_committer.commit(
                peers, prepared, ranks.options, started, memory_budget_bytes=memory_budget_bytes
            )

        committed = self._make_together(peers, prepare, commit)
        self.parent_tracker.now(committed.id)
        return self._committed(committed)

    def commit_external(
        self,
        publish: Callable[[CommitMetadata], RanksCommitted],
        metadata: CommitMetadata,
        *,
        follow: bool = True,
    ) -> Snapshot:
        """The commit that `publish` makes of parts written by another library's ranks.

        With `follow`, its parent is this store's last commit, and it becomes the parent of the
        next one.
        """
        self.check_not_within()
        self.async_commits.settle()
        with self._lock:
            committed = publish(
                replace(metadata, parents=self.parent_tracker.parents()) if follow else metadata
            )
            self.handle.follow()
            if follow:
                self.parent_tracker.now(committed.id)
        return self._committed(committed)

    def commit_async(
        self,
        app_state: Mapping[str, Any],
        metadata: CommitMetadata,
        options: AsyncOptions,
        ranks: RanksArguments,
    ) -> PendingCommit:
        """Stage `app_state` and commit it in the background, alone or with other ranks."""
        route = self._ranks_route(app_state, options, ranks) or self._own_route(app_state, options)
        return self.async_commits.start(app_state, metadata, options, route)

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Mark this thread as one that calls `state_dict()` of the caller's objects, which must not
        commit to the same store."""
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

        Raises the first unseen failure of an asynchronous commit, after everything was closed.
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
        with self._lock:
            self.async_commits.close()
            self.runtime.close()
            self.handle.close()

    def wake_tier(self) -> None:
        """Have the background uploads to the mirror, if there is one, look for new commits."""
        if self.tier:
            self.tier.wake()

    def _commit_staged(
        self,
        flats: Mapping[str, FlatState],
        buffer: Buffer,
        label: CommitMetadata,
        pending: PendingCommit,
        watch: Watch,
    ) -> AsyncResult[Snapshot]:
        """Commit a staged state; called in the background."""
        with self._lock:
            if self.settings.executor == "process":
                committed = self._make(
                    flats,
                    lambda: self.runtime.process_committer.commit(
                        flats, buffer, label, pending.started, watch
                    ),
                )
            else:
                committed = self._make(
                    flats,
                    lambda: self.runtime.background_committer.commit(
                        flats, label, pending.started, watch
                    ),
                )
        return self._result(committed, committed.ids, pending)

    def _result(
        self,
        committed: Committed | RanksCommitted,
        ids: Mapping[int, bytes],
        pending: PendingCommit,
    ) -> AsyncResult[Snapshot]:
        held_s = pending.timings.held_s or pending.age_s
        snapshot = self._committed(
            replace(committed, stats=replace(committed.stats, held_s=held_s))
        )
        return AsyncResult(committed.id, ids, snapshot)

    def _make(self, flats: Mapping[str, FlatState], commit: Callable[[], Committed]) -> Committed:
        logical_bytes = sum(leaf.nbytes for flat in flats.values() for leaf in flat.leaves)
        committed = self._disk.fit(commit, logical_bytes)
        self.handle.follow(
            {ref.schema.hex(): committed.schemas[key] for key, ref in committed.document.trees}
        )
        return committed

    def _make_together(
        self, peers: Collective, prepare: Prepare, commit: Callable[[Prepare], RanksCommitted]
    ) -> RanksCommitted:
        sizes: list[int] = []

        @cache  # a retry after a full disk reuses the state
        def prepared() -> tuple[CommitMetadata, Mapping[str, FlatState]]:
            label, flats = prepare()
            sizes.append(sum(flat.nbytes for flat in flats.values()))
            if peers.leads:
                self._disk.before(sizes[0])
            return label, flats

        with self._lock:
            committed = self._disk.fit_together(peers, lambda: commit(prepared), lambda: sum(sizes))
            if peers.leads:
                self.handle.follow()
        return committed

    def _flats_of_ranks(
        self, app_state: Mapping[str, Any], globs: Globs, *, allow_pickle: bool
    ) -> dict[str, FlatState]:
        with self._within():
            flats = flatten(app_state, allow_pickle=allow_pickle, ranks=True)
            return marked(app_state, flats, globs)

    def _own_route(
        self, app_state: Mapping[str, Any], options: AsyncOptions
    ) -> CommitRoute[Snapshot]:
        """Background commits of this process alone."""

        def flats() -> dict[str, FlatState]:
            with self._within():
                return flatten(app_state, allow_pickle=options.allow_pickle)

        elsewhere = self.settings.executor == "process"
        return CommitRoute(
            flats, self._commit_staged, by_itself, whole=elsewhere, elsewhere=elsewhere
        )

    def _ranks_route(
        self, app_state: Mapping[str, Any], options: AsyncOptions, ranks: RanksArguments
    ) -> CommitRoute[Snapshot] | None:
        """Background commits of several ranks together; None if there is one rank."""
        peers = collective_of(ranks.process_group, ranks.timeout_s)
        behind = collective_of(ranks.process_group, ranks.timeout_s, channel=BACKGROUND)
        if not (peers and behind):
            return None
        if options.trust_version or options.dedup_first:
            raise InvalidInput(
                "ranks that commit together copy all that they hold: leave out trust_version and "
                "dedup_first"
            )
        flats = partial(
            self._flats_of_ranks, app_state, ranks.globs, allow_pickle=options.allow_pickle
        )
        make = partial(self._commit_staged_ranks, behind, ranks.options)
        return CommitRoute(
            flats,
            make,
            partial(begun_by_all, peers),
            whole=True,
            elsewhere=self.settings.executor == "process",
        )

    def _commit_staged_ranks(
        self,
        peers: Collective,
        options: Options,
        staged: Mapping[str, FlatState],
        buffer: Buffer,
        metadata: CommitMetadata,
        pending: PendingCommit,
        watch: Watch,
    ) -> AsyncResult[Snapshot]:
        """Commit a staged state together with `peers`; called in the background."""

        def commit(prepared: Prepare) -> RanksCommitted:
            if self.settings.executor == "process":
                return self.runtime.process_ranks_committer.commit(
                    peers, prepared, buffer, options, pending.started, watch
                )
            return self.runtime.background_ranks_committer.commit(
                peers, prepared, options, pending.started, watch
            )

        committed = self._make_together(peers, lambda: (metadata, staged), commit)
        return self._result(committed, {}, pending)

    def _committed(self, committed: Committed | RanksCommitted) -> Snapshot:
        self.wake_tier()
        self._disk.after(committed.stats.logical_bytes, committed.stats.new_bytes)
        self._report(committed)
        return self.snapshot_of(
            committed.id, committed.document, committed.document.tags, committed.stats
        )

    def snapshot_of(
        self,
        commit: CommitId,
        document: CommitDocument,
        tags: tuple[str, ...],
        stats: CommitStats | None = None,
        reader: Reader | None = None,
    ) -> Snapshot:
        """A snapshot whose restores wait for lazy copies and set the parent of later commits."""
        contents = CommitContents(
            reader or self.runtime.reader, commit, document, self.async_commits.hold
        )
        return Snapshot(contents, tags=tags, stats=stats, restored=self.parent_tracker.now)

    def _report(self, committed: Committed | RanksCommitted) -> None:
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
