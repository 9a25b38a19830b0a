"""A store as training hands its state to it: commits, at once or in the background, by one process
or by many ranks."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, TypeAlias

from ckptstore.commit.async_commit import (
    AsyncCommits,
    AsyncOptions,
    AsyncResult,
    CommitRoute,
    Overlap,
    Staging,
    by_itself,
)
from ckptstore.commit.commit import CommitStats, Committed
from ckptstore.commit.commit_metadata import CommitMetadata, ParentTracker, label_of
from ckptstore.commit.dedup_probe import DedupProbe
from ckptstore.commit.pending import CommitProgress, Pending, Watch
from ckptstore.commit.schedule import Schedule, rule_of
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument
from ckptstore.core.settings import Settings
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.distributed.collective import TIMEOUT_S, Collective, begun_by_all, is_due_for_all
from ckptstore.distributed.commit import Prepare, RanksCommitted
from ckptstore.distributed.coordinator import Options
from ckptstore.distributed.external_commit import PartsCommitter
from ckptstore.distributed.gloo import BACKGROUND, collective_of
from ckptstore.errors import InvalidInput
from ckptstore.maintenance.enospc import DiskWatch
from ckptstore.maintenance.mirror.tiers import Tier
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader
from ckptstore.runtime import StoreRuntime
from ckptstore.snapshot import Snapshot
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.replication import Globs, marked
from ckptstore.state.staging_buffers import Buffer, BufferPool

logger = logging.getLogger("ckptstore")

PendingCommit: TypeAlias = Pending[Snapshot]
"""What `commit_async` returns."""

RATE_BYTES = 64 << 20
"""Commits that write less say nothing about the disk's speed."""


class Committing:
    """The part of `Store` that makes commits."""

    def __init__(self, handle: StoreHandle, settings: Settings, tier: Tier | None = None) -> None:
        self.run = settings.run
        self._tier = tier
        if tier:
            handle.objects.rescue = tier.rescue
        self._handle, self._settings = handle, settings
        self._runtime = StoreRuntime(handle, settings)
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._disk = DiskWatch(handle, settings.run, settings.on_full)
        self._parent_tracker = ParentTracker()
        self._best_rate = 0.0
        self._async: AsyncCommits[Snapshot] = AsyncCommits(
            self._parent_tracker,
            lambda: DedupProbe(handle.config, handle.objects, handle.log),
            max_in_flight=settings.max_in_flight,
            staging_bytes=settings.staging_bytes,
            shared=settings.executor == "process",
            place=handle.url,
        )

    def commit(
        self,
        app_state: Mapping[str, Any],
        *,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        process_group: Any = None,
        replicated: Sequence[str] = (),
        private: Sequence[str] = (),
        compare: bool = True,
        canonical: bool = True,
        trust_replicated: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> Snapshot:
        """Store `app_state` as a new commit of this run and return it; durable when this returns.

        `app_state` maps names to objects with `state_dict()` or to plain containers and values.
        `tag` names the commit (moving a tag that exists) and protects it from retention. Its parent
        is the commit that this store object committed, restored or resumed last, else the run's
        newest. What must be staged or encoded takes at most `memory_budget_bytes`; without it, what
        the host can spare.

        Where torch.distributed is initialized with several ranks, all of them (of `process_group`,
        if given) commit together, each its own part, and get one snapshot; `process_group="alone"`
        commits this process by itself (docs/distributed.md). `replicated` and `private` are globs
        of paths that are the same on all ranks, or each rank's own; of the rest, what is equal on
        the ranks that have it is one, or without `compare` each rank's own as well. Without
        `canonical`, chunks that the edges of shards cut are not completed, so that ids depend on
        the number of ranks; without `trust_replicated`, every replica is hashed whole. No rank
        waits for another longer than `timeout_s`. `memory_budget_bytes` bounds what each rank
        takes, bytes that ranks exchange included.

        Before the first commit, and when the disk gets short, a warning is logged. Raises
        `InvalidInput` for what cannot be stored, naming its path; `Unavailable` if storage fails;
        `NoSpace` if it is full, saying what is missing and what would free it; `Conflict` if others
        kept changing what this commit builds on. Whatever is raised, nothing is visible and nothing
        is lost. With several ranks, every rank raises, and `causes` says what failed where.
        """
        self._check_not_within()
        globs = Globs.of(replicated, private, compare)
        if peers := collective_of(process_group, timeout_s):
            failed = self._async.drain()

            def prepare() -> tuple[CommitMetadata, dict[str, FlatState]]:
                if failed:
                    raise failed
                self._handle.check_writable()
                label = label_of(self.run, step, tag, message, metrics)
                with self._within():
                    flats = marked(
                        app_state, flatten(app_state, allow_pickle=allow_pickle, ranks=True), globs
                    )
                return replace(label, parents=self._parent_tracker.parents()), flats

            options = Options(canonical, trust_replicated)
            started = time.perf_counter()

            def commit(prepared: Prepare) -> RanksCommitted:
                return self._runtime.ranks.commit(
                    peers, prepared, options, started, memory_budget_bytes=memory_budget_bytes
                )

            committed = self._make_together(peers, prepare, commit)
            self._parent_tracker.now(committed.id)
            return self._committed(committed)

        def flats() -> Mapping[str, FlatState]:
            return flatten(app_state, allow_pickle=allow_pickle)

        return self.commit_flat(
            flats,
            step=step,
            tag=tag,
            message=message,
            metrics=metrics,
            memory_budget_bytes=memory_budget_bytes,
        )

    def commit_flat(
        self,
        flats: Callable[[], Mapping[str, FlatState]],
        *,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        memory_budget_bytes: int | None = None,
    ) -> Snapshot:
        """Commit what `flats` returns, a state that is flattened already: its leaves' bytes may
        come from anywhere, as in an import."""
        self._check_not_within()
        self._async.settle()
        self._handle.check_writable()
        label = label_of(self.run, step, tag, message, metrics)
        with self._lock:
            started = time.perf_counter()
            label = replace(label, parents=self._parent_tracker.parents())
            with self._within():
                state = flats()
            committed = self._make(
                state,
                lambda: self._runtime.one.commit(
                    state, label, started, memory_budget_bytes=memory_budget_bytes
                ),
            )
            self._parent_tracker.now(committed.id)
        return self._committed(committed)

    @property
    def parts(self) -> PartsCommitter:
        """For commits whose parts another library's ranks write: `open` and `write` are for them,
        `commit_parts` ends it."""
        return self._runtime.parts

    def commit_parts(
        self,
        publish: Callable[[CommitMetadata], RanksCommitted],
        *,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        run: str | None = None,
    ) -> Snapshot:
        """The commit that `publish` makes of parts (`parts.publish`), in this run or in `run`."""
        self._check_not_within()
        self._async.settle()
        label = label_of(run or self.run, step, tag, message, metrics)
        with self._lock:
            committed = publish(
                label if run else replace(label, parents=self._parent_tracker.parents())
            )
            self._handle.follow()
            if not run:
                self._parent_tracker.now(committed.id)
        return self._committed(committed)

    def commit_async(
        self,
        app_state: Mapping[str, Any],
        *,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        allow_pickle: bool = False,
        overlap: Overlap = "wait",
        staging: Staging = "eager",
        trust_version: bool = False,
        dedup_first: bool = False,
        on_progress: Callable[[CommitProgress], object] | None = None,
        process_group: Any = None,
        replicated: Sequence[str] = (),
        private: Sequence[str] = (),
        compare: bool = True,
        canonical: bool = True,
        trust_replicated: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> PendingCommit:
        """Copy `app_state` and return; hash, write and publish the copy in the background
        (docs/async.md).

        The commit is the state as of this call, whatever is done to its tensors afterwards. Commits
        are made in the order of the calls. While `max_in_flight` commits are under way, or the
        staging memory is taken, the call waits; with `overlap="skip"` it returns at once with a
        commit that is `done` and whose `wait` raises `Busy`. A state larger than the staging memory
        is copied as far as it fits, and the call waits until the rest has been written.
        `on_progress` is called at each milestone, on whatever thread reaches it.

        With `staging="lazy"` the call returns before parameters and optimizer state have been
        copied: that happens while forward and backward run, and the next step of an optimizer waits
        for it. Whoever writes to them elsewhere calls `pending.wait_staged()` first. With
        `trust_version`, frozen parameters that torch has not seen written since the last commit are
        neither copied nor hashed. With `dedup_first`, the call hashes the state and copies only
        what the store lacks: less memory, a longer call where much is new.

        Where torch.distributed is initialized with several ranks, all of them call this, as they
        call `commit`, whose parameters mean the same here; the call returns when every rank has
        copied its part, and the rest goes over connections of its own, so that training may
        communicate meanwhile. Such a commit copies all that a rank holds: no `trust_version` or
        `dedup_first`. With `executor="process"` the ranks' workers make it together, and finish it
        also when trainers die.

        Raises what `commit` raises for a state that cannot be stored, and what an earlier
        asynchronous commit failed with if nobody has seen it: then this one was not begun, on any
        rank.
        """
        self._check_not_within()
        self._handle.check_writable()
        label = label_of(self.run, step, tag, message, metrics)
        async_options = AsyncOptions(
            overlap, staging, trust_version, dedup_first, allow_pickle, on_progress
        )
        globs, options = (
            Globs.of(replicated, private, compare),
            Options(canonical, trust_replicated),
        )
        together = self._together(
            app_state, async_options, globs, options, process_group, timeout_s
        )
        return self._async.start(
            app_state, label, async_options, together or self._alone(app_state, async_options)
        )

    def every(
        self,
        auto: Literal["auto"] | None = None,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        mtbf_s: float | None = None,
        on_signal: signal.Signals | None = None,
    ) -> Schedule[Snapshot]:
        """A schedule to call after each step, `every(app_state, step=step, …)`: it calls
        `commit_async` when that is due.

        That is after every multiple of `steps`, every so many `seconds`, or with `"auto"` as often
        as is best by what the last commit cost training and by `mtbf_s`, the mean time between
        failures. When the signal `on_signal` has come, the next call commits, waits until that is
        durable, and sets `stopped`; only the main thread can ask for it. Several ranks all make one
        with the same arguments, and call it at each step: the first rank's clock counts, and a
        signal to any rank. Raises `InvalidInput` unless one rule is given.
        """
        return Schedule(
            self.commit_async, rule_of(auto, steps, seconds, mtbf_s), on_signal, _agreed_schedule
        )

    @property
    def staging(self) -> BufferPool:
        """The memory that asynchronous commits copy states to: its `budget_bytes` and
        `held_bytes`."""
        return self._async.pool

    @property
    def worker_pid(self) -> int | None:
        """The process that makes asynchronous commits with `executor="process"`; None while there
        is none."""
        return self._runtime.worker_pid

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Before the block is left, also by an exception, wait for the commits that are in flight;
        raises what one of them failed with."""
        try:
            yield
        finally:
            failed = self._async.drain()
        if failed:
            raise failed

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Within the block this thread asks the caller's objects for their state: they must not
        commit to this store themselves."""
        self._thread.within = True
        try:
            yield
        finally:
            self._thread.within = False

    def _check_not_within(self) -> None:
        if getattr(self._thread, "within", False):
            raise InvalidInput(
                "a state_dict() that is called for a commit commits to, or closes, the same store: "
                "that commit would wait for itself; "
                "do it before the commit or after it"
            )

    def _release(self) -> None:
        with self._lock:
            self._async.close()
            self._runtime.release()
            self._handle.close()

    def _wake_tier(self) -> None:
        if self._tier:
            self._tier.wake()

    def _commit_staged(
        self,
        flats: Mapping[str, FlatState],
        arena: Buffer,
        label: CommitMetadata,
        pending: PendingCommit,
        watch: Watch,
    ) -> AsyncResult[Snapshot]:
        """What the background does with a state that was staged."""
        with self._lock:
            if self._settings.executor == "process":
                committed = self._make(
                    flats,
                    lambda: self._runtime.process_committer.commit(
                        flats, arena, label, pending.started, watch
                    ),
                )
            else:
                committed = self._make(
                    flats,
                    lambda: self._runtime.background_committer.commit(
                        flats, label, pending.started, watch
                    ),
                )
        return self._made(committed, committed.ids, pending)

    def _made(
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
        self._handle.follow(
            {ref.schema.hex(): committed.schemas[key] for key, ref in committed.document.trees}
        )
        return committed

    def _make_together(
        self, peers: Collective, prepare: Prepare, commit: Callable[[Prepare], RanksCommitted]
    ) -> RanksCommitted:
        sizes: list[int] = []

        @cache  # of a commit that did not fit, the state is not asked for again
        def prepared() -> tuple[CommitMetadata, Mapping[str, FlatState]]:
            label, flats = prepare()
            sizes.append(sum(flat.nbytes for flat in flats.values()))
            if peers.leads:
                self._disk.before(sizes[0])
            return label, flats

        with self._lock:
            committed = self._disk.fit_together(peers, lambda: commit(prepared), lambda: sum(sizes))
            if peers.leads:
                self._handle.follow()
        return committed

    def _alone(
        self, app_state: Mapping[str, Any], async_options: AsyncOptions
    ) -> CommitRoute[Snapshot]:
        """The way by which this process commits in the background by itself."""

        def flats() -> dict[str, FlatState]:
            with self._within():
                return flatten(app_state, allow_pickle=async_options.allow_pickle)

        elsewhere = self._settings.executor == "process"
        return CommitRoute(
            flats, self._commit_staged, by_itself, whole=elsewhere, elsewhere=elsewhere
        )

    def _together(
        self,
        app_state: Mapping[str, Any],
        async_options: AsyncOptions,
        globs: Globs,
        options: Options,
        process_group: Any,
        timeout_s: float,
    ) -> CommitRoute[Snapshot] | None:
        """The way by which several ranks commit in the background; None if this process is by
        itself."""
        peers = collective_of(process_group, timeout_s)
        behind = collective_of(process_group, timeout_s, channel=BACKGROUND)
        if not (peers and behind):
            return None
        if async_options.trust_version or async_options.dedup_first:
            raise InvalidInput(
                "several ranks that commit together copy all that they hold: leave out "
                "trust_version and dedup_first"
            )

        def flats() -> dict[str, FlatState]:
            with self._within():
                return marked(
                    app_state,
                    flatten(app_state, allow_pickle=async_options.allow_pickle, ranks=True),
                    globs,
                )

        def make(
            staged: Mapping[str, FlatState],
            arena: Buffer,
            label: CommitMetadata,
            pending: PendingCommit,
            watch: Watch,
        ) -> AsyncResult[Snapshot]:
            def prepare() -> tuple[CommitMetadata, Mapping[str, FlatState]]:
                return label, staged

            def commit(prepared: Prepare) -> RanksCommitted:
                if self._settings.executor == "process":
                    return self._runtime.process_ranks_committer.commit(
                        behind, prepared, arena, options, pending.started, watch
                    )
                return self._runtime.background_ranks_committer.commit(
                    behind, prepared, options, pending.started, watch
                )

            committed = self._make_together(behind, prepare, commit)
            return self._made(committed, {}, pending)

        elsewhere = self._settings.executor == "process"
        return CommitRoute(
            flats, make, partial(begun_by_all, peers), whole=True, elsewhere=elsewhere
        )

    def _committed(self, committed: Committed | RanksCommitted) -> Snapshot:
        self._wake_tier()
        self._disk.after(committed.stats.logical_bytes, committed.stats.new_bytes)
        self._report(committed)
        return self._snapshot_of(
            committed.id, committed.document, committed.document.tags, committed.stats
        )

    def _snapshot_of(
        self,
        commit: CommitId,
        document: CommitDocument,
        tags: tuple[str, ...],
        stats: CommitStats | None = None,
        reader: Reader | None = None,
    ) -> Snapshot:
        """A snapshot that waits for lazy copies before it restores, and is the parent of what is
        committed after it has."""
        reader = reader or self._runtime.reader
        return Snapshot(
            reader,
            commit,
            document,
            tags=tags,
            stats=stats,
            restoring=self._async.hold,
            restored=self._parent_tracker.now,
        )

    def _report(self, committed: Committed | RanksCommitted) -> None:
        """One line for people; everything in it is in `Snapshot.stats` too."""
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


def _agreed_schedule(options: Mapping[str, Any], due: bool, came: bool) -> tuple[bool, bool]:
    """What the ranks that commit with these options make of what each of them thinks."""
    peers = collective_of(options.get("process_group"), options.get("timeout_s", TIMEOUT_S))
    return is_due_for_all(peers, due, came) if peers else (due, came)
