"""Garbage collection beside other writers, readers and gcs: mark, condemn, delete, copy, delete
(docs/gc.md).

Safety comes from the log. Every step is an entry that `log.admission.check` admits or refuses at
the head. An object is deleted only after the log no longer lists it, and an unlisted one only if
its session is over. Safety depends on no clock, on no lock, and not on running alone.

What was forgotten within the grace counts as not forgotten, so that a mistake can be undone. That
is a courtesy of the plan: such a gc marks more and purges less than it might.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.core.config import default_threads
from ckptstore.core.ids import CommitId, PackId, SessionId
from ckptstore.core.model import NO_BASE
from ckptstore.core.numbers import check_number
from ckptstore.core.text import SECOND_NS, bytes_text, count_text
from ckptstore.errors import Conflict, Corrupt, NoSpace, NotFound
from ckptstore.log.admission import Code, Refusal
from ckptstore.log.entries import Body, Condemn, Delete, Entry, Over, Register
from ckptstore.log.log import Refused
from ckptstore.log.state import Pack, State
from ckptstore.maintenance import Counter, Progress, Spread, Stores, here, silent
from ckptstore.maintenance.gc.costs import choose, prices_of
from ckptstore.maintenance.gc.mark import PackUse, mark
from ckptstore.maintenance.gc.plan import (
    Copy,
    GcPlan,
    doomed_packs,
    list_objects,
    live_rows,
    orphans,
    place,
    plan_copies,
)
from ckptstore.maintenance.gc.session_monitor import SessionMonitor
from ckptstore.maintenance.mover import Writing, Written, each_written, packs_of
from ckptstore.objects.codecs import Base, base_of, moved
from ckptstore.objects.frames import Stored
from ckptstore.repository.chunk_reader import StoredChunk, StoredPatch, keys_of, read_chunks
from ckptstore.repository.pack_writer import OpenPack
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import REMOTE_READS, ThreadPool, one_by_one
from ckptstore.storage.contract import Storage
from ckptstore.storage.reserve import is_full, room, with_room

B = TypeVar("B", Over, Condemn, Register, Delete)

ATTEMPTS = 3
MAX_UNUSED = 0.05
GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class GcOptions:
    """`max_unused` is the share of the packs' bytes that may stay dead instead of being
    repacked. `max_repack_bytes` is the limit of copying, and a budget: with it, small packs are
    merged although that costs more than it gains. What was forgotten less than `grace_s` ago, by
    the clocks of this host and of the one that forgot it, stays, but for the commits `at_once`.
    With `force`, condemned packs are deleted although commits in flight may have to write their
    chunks again. The chunks of the packs `verified` need not be read before they are kept: their
    writer, this process, has decoded each before it wrote it. Packs of which the share `empty` is
    dead are copied, however little that is of the store."""

    max_unused: float = MAX_UNUSED
    max_repack_bytes: int | None = None
    force: bool = False
    grace_s: float = GRACE_S
    at_once: frozenset[CommitId] = frozenset()
    verified: frozenset[PackId] = frozenset()
    empty: float = 1.0

    def __post_init__(self) -> None:
        share = "a share from 0 to 1, such as 0.05"
        check_number("max_unused", self.max_unused, share, most=1)
        if self.max_repack_bytes is not None:
            check_number("max_repack_bytes", self.max_repack_bytes, "0 or more, or None")
        check_number("grace_s", self.grace_s, "a number of seconds, 0 or more, such as 3600")


@dataclass(slots=True, repr=False)
class GcReport:
    """The result of a gc, which fills it while it works. `freed_bytes` are of the objects it
    deleted, `copied_bytes` of the packs it wrote.

    `damaged` are packs whose live chunks could not be copied; they stay as they are, for `fsck`.
    `stopped` says why it copied less than planned, `not_compacted` what could not be compacted.
    """

    plan: GcPlan
    freed_bytes: int = 0
    copied_bytes: int = 0
    condemned_packs: int = 0
    deleted: tuple[PackId, ...] = ()
    deleted_orphans: int = 0
    purged: tuple[CommitId, ...] = ()
    over: tuple[SessionId, ...] = ()
    damaged: tuple[PackId, ...] = ()
    stopped: str = ""
    not_compacted: tuple[str, ...] = ()
    dry_run: bool = False

    def add(self, later: Iterable["GcReport"]) -> None:
        """Count in what gcs after this one did."""
        sums = "freed_bytes", "copied_bytes", "condemned_packs", "deleted", "deleted_orphans"
        for report in later:
            for name in (*sums, "over", "damaged"):
                setattr(self, name, getattr(self, name) + getattr(report, name))
            self.stopped = self.stopped or report.stopped

    def __repr__(self) -> str:
        return f"<gc: {self._result}>"

    def __str__(self) -> str:
        return str(self.plan) if self.dry_run else self.plan.page(self._result)

    @property
    def _result(self) -> str:
        if self.dry_run:
            return self.plan.result
        freed, wrote = bytes_text(self.freed_bytes), bytes_text(self.copied_bytes)
        gone = (
            f"{count_text(len(self.deleted), 'pack')}, {count_text(self.deleted_orphans, 'orphan')}"
        )
        return f"freed {freed} ({gone}), wrote {wrote}"

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody must look at."""
        damaged = (
            f"pack {pack} is damaged and was not copied; run `ckptstore fsck --read-data`"
            for pack in self.damaged
        )
        stopped = [f"stopped copying: {self.stopped}"] if self.stopped else []
        return (*self.plan.problems, *damaged, *self.not_compacted, *stopped)


def collect(
    handle: StoreHandle,
    options: GcOptions = GcOptions(),
    *,
    dry_run: bool = False,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
    spread: Spread[Stores] | None = None,
) -> GcReport:
    """Plan a gc and, without `dry_run`, execute the plan; `spread` copies, by default this thread.

    Raises `Corrupt`, before anything is deleted, if a commit's document or pages cannot be read;
    `Conflict` if other gcs kept condemning.
    """
    if not dry_run:
        handle.check_writable()
    threads = ThreadPool(default_threads())
    gc = _Gc(handle, options, threads, clock, progress, spread)
    try:
        for _ in range(ATTEMPTS):
            try:
                if dry_run:
                    full = not handle.read_only and is_full(handle.storage)
                    return GcReport(gc.plan(full=full), dry_run=True)
                with room(handle.storage) as full:
                    return gc.execute(gc.plan(full=full))
            except Refused as error:
                if error.refusal.code is not Code.FENCED:
                    raise
                last = error
                gc.list_store()
        raise Conflict(
            f"other gcs condemned packs {ATTEMPTS} times while this one looked; let them finish, "
            "then repeat gc"
        ) from last
    finally:
        threads.close()


def plans_at(
    handle: StoreHandle,
    states: Iterable[State],
    options: GcOptions,
    progress: Progress = silent,
) -> list[GcPlan]:
    """The plan of a gc on a full disk for a hypothetical state of the log. Changes nothing.

    Raises `Corrupt` if a commit's document or pages cannot be read, `NotFound` for objects that
    another gc is deleting.
    """
    threads = ThreadPool(default_threads())
    try:
        gc = _Gc(handle, options, threads, time.monotonic, progress)
        return [gc.plan_at(state, full=True) for state in states]
    finally:
        threads.close()


def _recently_forgotten(state: State, options: GcOptions) -> tuple[CommitId, ...]:
    """The commits forgotten within the grace. A clock that was ahead when it forgot one
    makes it stay longer."""
    now_ns, grace_ns = time.time_ns(), options.grace_s * SECOND_NS
    return tuple(
        sorted(
            commit
            for commit, row in state.commits.items()
            if row.soft and max(now_ns - row.forgotten_ns, 0) < grace_ns
            if commit not in options.at_once
        )
    )


def _mark_again() -> Refused:
    """Another gc condemned since the mark: each could rely on the duplicate the other deletes."""
    return Refused(Refusal(Code.FENCED, "another gc condemned packs since the mark; mark again"))


def _without(body: Body, refusal: Refusal) -> Body | None:
    """What may still be appended of `body` after a refusal; None if nothing is left. Pure."""
    match body:
        case Over():
            sessions = tuple(s for s in body.sessions if s not in refusal.sessions)
            return Over(sessions) if sessions else None
        case Condemn():
            packs = body.packs - refusal.packs
            purge = tuple(c for c in body.purge if c not in refusal.commits)
            return replace(body, packs=packs, purge=purge) if packs or purge else None
        case Register():
            condemn = body.condemn - refusal.packs
            return replace(body, condemn=condemn) if condemn else None
        case Delete():
            packs = body.packs - refusal.packs
            return Delete(packs) if packs else None
    return None


class _PackCopy:
    """The chunks of the pack `source` in the pack `target`. `offsets` says where each goes that
    begins at some offset of the source."""

    def __init__(self, source: PackId, target: OpenPack, offsets: Mapping[int, int]) -> None:
        self._source, self._target, self._offsets = source, target, offsets
        self._bases: dict[int, tuple[int, Base]] = {}
        """The record and the place in the target of what may be a base, by offset in the source."""

    def append(self, chunk: StoredChunk | StoredPatch) -> None:
        """Queue a chunk as it is stored, after its base. Raises `Corrupt` for a difference whose
        base is not copied."""
        target, entry = self._target, chunk.entry
        stored: Stored = chunk.stored
        if entry.base != NO_BASE:
            number, base = self._base(chunk)
            entry, stored = entry._replace(base=number), moved(stored, base)
        target.pad_to(self._offsets[entry.offset])
        copied = entry._replace(offset=target.offset)
        number = target.put(copied, stored)
        if entry.base == NO_BASE:
            base = Base(copied.offset, copied.stored_bytes, copied.codec)
            self._bases[entry.offset] = number, base

    def _base(self, chunk: StoredChunk | StoredPatch) -> tuple[int, Base]:
        """The record and the place in the target of the base of a difference."""
        offset = base_of(chunk.stored).offset
        if offset not in self._bases:
            raise Corrupt(
                f"chunk {chunk.entry.chunk.hex()[:12]} of pack {self._source} is a difference from "
                f"one at offset {offset}, which is not copied; run `ckptstore fsck`"
            )
        return self._bases[offset]


class Copied(NamedTuple):
    """The numbers of the `sources` that were copied, and those that cannot be read."""

    sources: frozenset[int]
    damaged: tuple[PackId, ...]


def write_copy(stores: Stores, threads: ThreadPool, given: Writing[Copy]) -> Written[Copied]:
    """Write a new pack; none if no source could be read."""
    (store,), copy = stores, given.item
    metadata = copy.sources[0].pack.metadata
    with (
        packs_of(store, threads, given.session) as packs,
        packs.writing(metadata=metadata) as writer,
    ):
        target = writer.pack_with_room(copy.bytes)
        sound = [use for use in copy.sources if _append_chunks(store.storage, use, target)]
        if not sound:
            writer.discard()
    damaged = tuple(use.pack.id for use in copy.sources if use not in sound)
    copied = Copied(frozenset(use.number for use in sound), damaged)
    return Written(tuple(packs.closed), copied)


def _append_chunks(storage: Storage, use: PackUse, target: OpenPack) -> bool:
    """Append the live chunks of a pack as they are stored, each verified; False if some cannot be
    read."""
    try:
        rows = live_rows(storage, use)
        moves, _ = place(rows, target.offset)
        copy = _PackCopy(use.pack.id, target, dict(moves.tolist()))
        for chunk in read_chunks(storage, use.pack, rows):
            copy.append(chunk)
        target.flush()
    except (Corrupt, NotFound):
        return False
    return True


class _Gc:
    """One gc: its plan, gathered in a safe order (objects are listed before the log is replayed),
    and the execution; `report` is its progress."""

    def __init__(
        self,
        handle: StoreHandle,
        options: GcOptions,
        threads: ThreadPool,
        clock: Callable[[], float],
        progress: Progress,
        spread: Spread[Stores] | None = None,
    ) -> None:
        self._storage, self._log = handle.storage, handle.log
        self._options, self._threads, self._progress = options, threads, progress
        self._handle, self._clock = handle, clock
        self._to = Destination(handle, threads)
        self._engine = spread
        self._plan, self._fence = GcPlan(), 0
        self.report = GcReport(self._plan)
        self.list_store()

    def list_store(self) -> None:
        counter = Counter(self._progress, "list objects", 1)
        self._listing = list_objects(self._storage)
        self._monitor = SessionMonitor(self._handle, self._clock, self._listing)
        counter.add()

    def plan(self, *, full: bool) -> GcPlan:
        state = self._log.replay()
        try:
            plan = self.plan_at(state, full=full)
        except (Corrupt, NotFound) as error:
            if self._log.replay().fence != state.fence:
                raise _mark_again() from error
            raise
        # What was not there may have been moved by another host, while this one looked for it.
        if (plan.missing or plan.unreadable) and self._log.replay().fence != state.fence:
            raise _mark_again()
        return plan

    def plan_at(self, state: State, *, full: bool) -> GcPlan:
        storage, options = self._storage, self._options
        recent = _recently_forgotten(state, options)
        commits = state.commits.update((c, state.commits[c]._replace(soft=0)) for c in recent)
        state = replace(state, commits=commits)
        sessions = self._monitor.look(state)
        active = frozenset() if full or options.force else sessions.active_ids
        marked = mark(storage, state, self._threads, self._progress, options.verified)
        purge = tuple(sorted(commit for commit, row in state.commits.items() if row.soft))
        choice = choose(
            marked.uses,
            max_unused=options.max_unused,
            max_repack_bytes=options.max_repack_bytes,
            pack_bytes=storage.capabilities.pack_bytes,
            prices=prices_of(storage.capabilities),
            empty=options.empty,
        )
        return GcPlan(
            mark=marked.n,
            fence=marked.fence,
            over=sessions.over,
            purge=purge,
            recent=recent,
            doomed=tuple(doomed_packs(state, marked, self._monitor.waits, active)),
            orphans=orphans(
                self._listing,
                state,
                over=frozenset(sessions.over),
                purged=frozenset(purge),
                stale=sessions.stale,
            ),
            copies=tuple(plan_copies(storage, choice.groups)),
            copies_wait=tuple(sorted(active)),
            missing=marked.missing,
            unreadable=tuple(use.pack.id for use in marked.uses if not use.readable),
            full=full,
            left_bytes=choice.left_bytes,
            rewrites=choice.rewrites,
        )

    def execute(self, plan: GcPlan) -> GcReport:
        """Carry out a plan; what an earlier plan has done stays in the report."""
        self.report.plan, self._plan, self._fence = plan, plan, plan.fence
        if plan.over and (over := self._append(Over(plan.over))):
            self.report.over += over.sessions
        if plan.condemn or plan.purge:
            body = self._append(Condemn(plan.mark, self._fence, plan.condemn, plan.purge))
            if body:
                self.report.condemned_packs += len(body.packs)
                self.report.purged += body.purge
        self._delete(pack.number for pack in plan.doomed)
        self._sweep()
        self._copy_all()
        return self.report

    def _append(self, body: B, append: Callable[[Any], Entry] | None = None) -> B | None:
        """Append `body`, or what is left of it after a refusal; returns what was appended, None
        if nothing was left. Raises `Refused` with the code `FENCED` after another gc."""
        left: Body | None = body
        while left is not None:
            try:
                entry = with_room(self._storage, partial(append or self._log.append, left))
            except Refused as error:
                smaller = _without(left, error.refusal)
                if smaller == left:
                    raise
                left = smaller
                continue
            if isinstance(left, Condemn | Register):
                self._fence = entry.n
            assert isinstance(left, type(body))
            return left
        return None

    def _delete(self, numbers: Iterable[int]) -> None:
        """Delete those of the packs `numbers` that are condemned and that no session in flight
        may still reuse."""
        state = self._log.replay()
        condemned = {n: pack for n in numbers if (pack := state.packs.get(n)) and not pack.live}
        active = self._monitor.look(state).active_ids
        if self._options.force or self._plan.full:
            active = frozenset()
        waits = self._monitor.wait_for(condemned.values(), active, state)
        free = frozenset(n for n, pack in condemned.items() if not waits[pack.id])
        body = self._append(Delete(free)) if free else None
        if body is None:
            return
        counter = Counter(self._progress, "delete packs", len(body.packs))
        deleted = [condemned[n] for n in sorted(body.packs)]

        def delete(pack: Pack) -> None:
            for key in keys_of(pack):
                self._storage.delete(key)
            counter.add()

        if self._storage.capabilities.slow_requests:
            with closing(ThreadPool(REMOTE_READS)) as threads:
                threads.spread(delete, deleted)
        else:
            one_by_one(delete, deleted)
        for pack in deleted:
            self.report.freed_bytes += pack.stored_bytes
            self._monitor.waits.pop(pack.id, None)
        self.report.deleted += tuple([pack.id for pack in deleted])

    def _sweep(self) -> None:
        """Delete the planned orphans that are still orphans; they were listed before this
        replay."""
        state = self._log.replay()
        stale = self._monitor.look(state).stale
        if not self._plan.orphans:
            return
        planned = frozenset(orphan.key for orphan in self._plan.orphans)
        found = [o for o in orphans(self._listing, state, stale=stale) if o.key in planned]
        counter = Counter(self._progress, "delete orphans", len(found))
        for orphan in found:
            self._storage.delete(orphan.key)
            self.report.freed_bytes += orphan.bytes
            self.report.deleted_orphans += 1
            counter.add()

    def _copy_all(self) -> None:
        copies, condemned = self._plan.copies, set[int]()
        counter = Counter(self._progress, "copy", self._plan.copied_bytes)
        if not copies:
            return
        spread = self._engine or here((self._handle,), self._threads)
        try:
            with closing(each_written(self._to, "gc", spread, write_copy, copies)) as done:
                for copy, copied, transaction in done:
                    counter.add(copy.bytes)
                    condemned |= self._list(copied, transaction)
                    # Packs would wait for the sessions of other workers.
                    if condemned and not self._engine:
                        self._delete(condemned)
                        condemned.clear()
        except NoSpace as error:
            self.report.stopped = str(error)
        if condemned:
            self._delete(condemned)

    def _list(self, copied: Copied, transaction: Transaction) -> frozenset[int]:
        """List a new pack and condemn its sources, except those referred to since the mark."""
        with transaction:
            if copied.damaged and self._log.replay().fence != self._fence:
                raise _mark_again()  # a pack that another gc has deleted is not damaged
            self.report.damaged += copied.damaged
            records = tuple(pack.record for pack in transaction.packs.closed)
            body = None
            if copied.sources:
                mark, fence = self._plan.mark, self._fence
                body = Register(transaction.session, mark, fence, records, copied.sources)
                body = self._append(body, transaction.append)
            if body is None:
                transaction.packs.drop()
                return frozenset()
        self.report.condemned_packs += len(body.condemn)
        self.report.copied_bytes += sum(record.stored_bytes for record in records)
        return body.condemn
