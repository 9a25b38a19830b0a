"""Garbage collection beside other writers, readers and gcs: mark, condemn, delete, copy, delete
(docs/gc.md).

Safety comes from the log. Every step is an entry that `log.admission.check` admits or refuses at
the head. An object is deleted only after the log no longer lists it, and an unlisted one only if
its session is over. Nothing depends on time, on a lock, or on running alone.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckptstore.core.config import default_threads
from ckptstore.core.ids import CommitId, PackId, SessionId, pack_key, twin_key
from ckptstore.core.model import PackRecord
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, InvalidInput, NoSpace, NotFound
from ckptstore.log.entries import Body, Condemn, Delete, Entry, Over, Register
from ckptstore.log.fold import Code, Refusal
from ckptstore.log.log import Refused
from ckptstore.log.sessions import Session, open_session, read_sessions
from ckptstore.log.state import State
from ckptstore.maintenance.gc.mark import mark
from ckptstore.maintenance.gc.orphans import Listing, list_objects, orphans
from ckptstore.maintenance.gc.plan import GcPlan, doomed_packs, soft_deleted
from ckptstore.maintenance.gc.repack import Copy, DamagedSource, choose, plan_copies, write_copy
from ckptstore.maintenance.gc.session_monitor import (
    NO_FILE,
    WATCH_NAME,
    Sessions,
    Watch,
    judge,
    load_watch,
    observe,
    save_watch,
    stale_files,
)
from ckptstore.maintenance.progress import Counter, Progress, silent
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.reserve import is_full, room

ATTEMPTS = 3
MAX_UNUSED = 0.05


@dataclass(frozen=True, slots=True)
class GcOptions:
    """`max_unused` is the share of the packs' bytes that may stay dead instead of being
    repacked, `max_repack_bytes` the limit of copying. With `force`, condemned packs are deleted
    although commits in flight may have to write their chunks again."""

    max_unused: float = MAX_UNUSED
    max_repack_bytes: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_unused <= 1:
            raise InvalidInput(
                f"max_unused is {self.max_unused}; wanted a share from 0 to 1, such as 0.05"
            )
        if self.max_repack_bytes is not None and self.max_repack_bytes < 0:
            raise InvalidInput(
                f"max_repack_bytes is {self.max_repack_bytes}; wanted 0 or more, or None for no "
                "limit"
            )


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of a gc. `freed_bytes` are of the objects it deleted, `copied_bytes` of the packs
    it wrote.

    `damaged` are packs whose live chunks could not be copied; they stay as they are, for `fsck`.
    `stopped` is the reason why it copied less than planned.
    """

    plan: GcPlan
    freed_bytes: int = 0
    copied_bytes: int = 0
    condemned: int = 0
    deleted: tuple[PackId, ...] = ()
    orphans: int = 0
    purged: tuple[CommitId, ...] = ()
    over: tuple[SessionId, ...] = ()
    damaged: tuple[PackId, ...] = ()
    stopped: str = ""


def collect(
    handle: StoreHandle,
    options: GcOptions = GcOptions(),
    *,
    dry_run: bool = False,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> GcReport:
    """Plan a gc and, without `dry_run`, execute the plan.

    Raises `Corrupt`, before anything is deleted, if a commit's document or pages cannot be read;
    `Conflict` if other gcs kept condemning.
    """
    if not dry_run:
        handle.check_writable()
    threads = ThreadPool(default_threads())
    run: _Run | None = None
    try:
        for _ in range(ATTEMPTS):
            try:
                facts = _Facts(handle, threads, clock, progress)
                if dry_run:
                    return GcReport(
                        facts.plan(options, full=not handle.read_only and is_full(handle.storage))
                    )
                with room(handle.storage) as full:
                    plan = facts.plan(options, full=full)
                    report = replace(run.report, plan=plan) if run else GcReport(plan)
                    run = _Run(facts, report, patient=not (options.force or full))
                    return run.execute()
            except _MarkAgain as error:
                last = error
        raise Conflict(
            f"other gcs condemned packs {ATTEMPTS} times while this one looked; let them finish, "
            "then repeat gc"
        ) from last
    finally:
        threads.close()


def plans_at(handle: StoreHandle, states: Iterable[State], options: GcOptions) -> list[GcPlan]:
    """The plan of a gc on a full disk for a hypothetical state of the log. Changes nothing.

    Raises `Corrupt` if a commit's document or pages cannot be read, `NotFound` for objects that
    another gc is deleting.
    """
    threads = ThreadPool(default_threads())
    try:
        facts = _Facts(handle, threads, time.monotonic, silent)
        return [facts.plan_at(state, options, full=True) for state in states]
    finally:
        threads.close()


class _MarkAgain(Exception):
    """Another gc condemned since the mark: each could rely on the duplicate that the other one
    deletes."""


class _Facts:
    """The facts behind a plan, gathered in a safe order: objects are listed before the log is
    replayed."""

    def __init__(
        self,
        handle: StoreHandle,
        threads: ThreadPool,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self.handle, self.threads, self.clock, self.progress = handle, threads, clock, progress
        self._watch_path = handle.index_directory / WATCH_NAME
        self.watch = load_watch(self._watch_path)
        self.listing = self._list()

    def plan(self, options: GcOptions, *, full: bool) -> GcPlan:
        state = self.handle.log.replay()
        try:
            return self.plan_at(state, options, full=full)
        except (Corrupt, NotFound) as error:
            if self.handle.log.replay().fence != state.fence:
                raise _MarkAgain from error
            raise

    def plan_at(self, state: State, options: GcOptions, *, full: bool) -> GcPlan:
        storage = self.handle.storage
        sessions = self.look(state)
        active = frozenset() if full or options.force else sessions.active_ids
        marked = mark(storage, state, self.threads, self.progress)
        purge = soft_deleted(state)
        pack_bytes = storage.capabilities.pack_bytes
        chosen = choose(
            marked.uses,
            max_unused=options.max_unused,
            max_repack_bytes=options.max_repack_bytes,
            pack_bytes=pack_bytes,
        )
        return GcPlan(
            mark=marked.n,
            fence=marked.fence,
            over=sessions.over,
            purge=purge,
            doomed=tuple(doomed_packs(state, marked, self.watch.waits, active)),
            orphans=orphans(
                self.listing,
                state,
                over=frozenset(sessions.over),
                purged=frozenset(purge),
                stale=self.stale(sessions),
            ),
            copies=tuple(plan_copies(storage, marked, chosen, pack_bytes)),
            copies_wait=tuple(sorted(active)),
            missing=marked.missing,
            unreadable=tuple(use.pack.id for use in marked.uses if not use.readable),
            full=full,
        )

    def look(self, state: State) -> Sessions:
        """Find the active sessions at `state`, and save the observation."""
        infos = tuple(read_sessions(self.handle.storage))
        named = self.listing.unaccounted(state) - {info.id for info in infos}
        counters = dict.fromkeys(named, NO_FILE) | {info.id: info.counter for info in infos}
        files = {key.removeprefix("tmp/"): size for key, size in self.listing.temporaries.items()}
        now_s = self.clock()
        self.remember(observe(self.watch, counters, files, now_s))
        return judge(self.watch, infos, named, state, now_s)

    def remember(self, watch: Watch) -> None:
        self.watch = watch
        save_watch(self._watch_path, watch)

    def stale(self, sessions: Sessions) -> frozenset[str]:
        """Names in `tmp/` without a writer."""
        return frozenset(
            name
            for name in stale_files(self.watch, self.clock())
            if name[:24] not in sessions.active_ids
        )

    def _list(self) -> Listing:
        counter = Counter(self.progress, "list objects", 1)
        listing = list_objects(self.handle.storage)
        counter.add()
        return listing


class _Run:
    """One execution of a plan; `report` is its progress."""

    def __init__(self, facts: _Facts, report: GcReport, *, patient: bool) -> None:
        self.report = report
        self._plan = report.plan
        self._facts, self._storage, self._log = facts, facts.handle.storage, facts.handle.log
        self._patient = patient
        self._fence = self._plan.fence

    def execute(self) -> GcReport:
        self._declare_over()
        self._condemn()
        self._delete(pack.number for pack in self._plan.doomed)
        self._sweep()
        self._copy_all()
        return self.report

    def _note(self, **changes: object) -> None:
        # Fields of GcReport, by name.
        self.report = replace(self.report, **changes)  # type: ignore[arg-type]

    def _append(self, body: Body, without: Callable[[Body, Refusal], Body | None]) -> Entry | None:
        """Append `body`, or what `without` leaves of it after a refusal; None if nothing is
        left."""
        left: Body | None = body
        while left is not None:
            try:
                return self._log.append(left)
            except Refused as error:
                if error.refusal.code is Code.FENCED:
                    raise _MarkAgain from error
                smaller = without(left, error.refusal)
                if smaller == left:
                    raise
                left = smaller
        return None

    def _declare_over(self) -> None:
        def without(body: Body, refusal: Refusal) -> Body | None:
            assert isinstance(body, Over)
            left = tuple(session for session in body.sessions if session not in refusal.sessions)
            return Over(left) if left else None

        if self._plan.over and (entry := self._append(Over(self._plan.over), without)):
            assert isinstance(entry.body, Over)
            self._note(over=self.report.over + entry.body.sessions)

    def _condemn(self) -> None:
        def without(body: Body, refusal: Refusal) -> Body | None:
            assert isinstance(body, Condemn)
            packs, purge = (
                body.packs - refusal.packs,
                tuple(c for c in body.purge if c not in refusal.commits),
            )
            return replace(body, packs=packs, purge=purge) if packs or purge else None

        if not (self._plan.condemn or self._plan.purge):
            return
        if entry := self._append(
            Condemn(self._plan.mark, self._fence, self._plan.condemn, self._plan.purge), without
        ):
            assert isinstance(entry.body, Condemn)
            self._fence = entry.n
            self._note(
                condemned=self.report.condemned + len(entry.body.packs),
                purged=self.report.purged + entry.body.purge,
            )

    def _delete(self, numbers: Iterable[int]) -> None:
        """Delete those of the packs `numbers` that are condemned and that no session in flight
        may still reuse."""
        state = self._log.replay()
        condemned = {n: pack for n in numbers if (pack := state.packs.get(n)) and not pack.live}
        active = self._facts.look(state).active_ids if self._patient else frozenset()
        waits = {
            pack.id: self._facts.watch.waits.get(pack.id, active) & active
            for pack in condemned.values()
        }
        listed = {pack.id for pack in state.packs.values()}
        remembered = {
            pack: sessions for pack, sessions in self._facts.watch.waits.items() if pack in listed
        }
        self._facts.remember(replace(self._facts.watch, waits=remembered | waits))

        def without(body: Body, refusal: Refusal) -> Body | None:
            assert isinstance(body, Delete)
            return Delete(body.packs - refusal.packs) if body.packs - refusal.packs else None

        free = frozenset(n for n, pack in condemned.items() if not waits[pack.id])
        entry = self._append(Delete(free), without) if free else None
        if entry is None:
            return
        assert isinstance(entry.body, Delete)
        counter = Counter(self._facts.progress, "delete packs", len(entry.body.packs))
        for n in sorted(entry.body.packs):
            pack = condemned[n]
            for key in (
                (pack_key(pack.id), twin_key(pack.id)) if pack.metadata else (pack_key(pack.id),)
            ):
                self._storage.delete(key)
                self._note(freed_bytes=self.report.freed_bytes + pack.bytes)
            self._note(deleted=(*self.report.deleted, pack.id))
            counter.add()

    def _sweep(self) -> None:
        """Delete the planned orphans that are still orphans; they were listed before this
        replay."""
        state = self._log.replay()
        stale = self._facts.stale(self._facts.look(state))
        planned = frozenset(orphan.key for orphan in self._plan.orphans)
        found = [
            orphan
            for orphan in orphans(self._facts.listing, state, stale=stale)
            if orphan.key in planned
        ]
        counter = Counter(self._facts.progress, "delete orphans", len(found))
        for orphan in found:
            self._storage.delete(orphan.key)
            self._note(
                freed_bytes=self.report.freed_bytes + orphan.bytes, orphans=self.report.orphans + 1
            )
            counter.add()

    def _copy_all(self) -> None:
        counter = Counter(self._facts.progress, "copy", self._plan.copied_bytes)
        for copy in self._plan.copies:
            try:
                self._copy(copy, counter)
            except NoSpace as error:
                self._note(stopped=str(error))
                return

    def _copy(self, copy: Copy, counter: Counter) -> None:
        left: Copy | None = copy
        while left is not None:
            try:
                if self._copied(left, counter):
                    self._note(copied_bytes=self.report.copied_bytes + left.bytes)
                    self._delete(source.number for source in left.sources)
                return
            except DamagedSource as error:
                left = self._without_damaged(left, error)

    def _copied(self, copy: Copy, counter: Counter) -> bool:
        """Whether the copy was made and registered. Its session ends if no object bears its
        name; otherwise the next gc declares it over."""
        with open_session(self._storage, "gc") as session:
            try:
                record = write_copy(
                    self._storage, session.id, copy, self._facts.threads, counter.add
                )
            except (CkptStoreError, DamagedSource):
                session.end()
                raise
            return self._register(session, record, copy)

    def _without_damaged(self, copy: Copy, error: DamagedSource) -> Copy | None:
        """The part of `copy` that can still be made. A source that another gc has deleted is not
        damaged: mark again."""
        if self._log.replay().fence != self._fence:
            raise _MarkAgain from error
        self._note(damaged=(*self.report.damaged, error.source.id))
        sources = tuple(source for source in copy.sources if source is not error.source)
        return replace(copy, sources=sources) if sources else None

    def _register(self, session: Session, record: PackRecord, copy: Copy) -> bool:
        """List the copy and condemn its sources, except those referred to since the mark; False
        if none could be."""

        def without(body: Body, refusal: Refusal) -> Body | None:
            assert isinstance(body, Register)
            condemn = body.condemn - refusal.packs
            return replace(body, condemn=condemn) if condemn else None

        sources = frozenset(source.number for source in copy.sources)
        try:
            entry = self._append(
                Register(session.id, self._plan.mark, self._fence, (record,), sources), without
            )
        except (_MarkAgain, Refused):
            self._drop(session, record)
            raise
        if entry is None:
            self._drop(session, record)
            return False
        assert isinstance(entry.body, Register)
        self._fence = entry.n
        self._note(condemned=self.report.condemned + len(entry.body.condemn))
        return True

    def _drop(self, session: Session, record: PackRecord) -> None:
        """Delete a pack whose registration was refused: no entry lists it or ever will. So no gc
        needs to wait for its session."""
        self._storage.delete(pack_key(record.id))
        self._storage.delete(twin_key(record.id))
        session.end()
