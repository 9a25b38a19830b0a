"""Compaction: code the chunks of old commits smaller, beside everything else (docs/compact.md).

A chunk is read and compared with its id, coded, and decoded again before it is written. Such copies
lie in packs of their own, durable before a `register` entry lists them; no pack is condemned by it.
Then a gc that purges nothing finds two copies of each of those chunks. It keeps the coded one
and deletes the packs of the other, or copies what is left in them. It reads copies that another
process wrote, and no others. So compaction changes nothing that a gc does not change, and may be
killed at any moment: what is registered is finished work, and the next one goes on from there.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ckptstore.commit.transaction import Destination
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, CommitId, SessionId
from ckptstore.core.model import CommitDocument, PackRecord
from ckptstore.core.numbers import check_number
from ckptstore.core.text import Column, Table, bytes_text, count_text
from ckptstore.errors import NotFound
from ckptstore.log.entries import Settings
from ckptstore.maintenance import Progress, Spread, Stores, here, silent
from ckptstore.maintenance.compact.coding import (
    Candidates,
    Coded,
    ToCode,
    code_strips,
    estimate,
)
from ckptstore.maintenance.compact.plan import (
    FINISHED_SETTING,
    SETTING,
    CompactPolicy,
    Group,
    finished_in,
    finished_setting,
    newest_commits,
    places,
    plan_groups,
    strips,
)
from ckptstore.maintenance.gc import GcOptions, GcReport, collect
from ckptstore.maintenance.gc.mark import Keys, short_keys
from ckptstore.maintenance.mover import each_written, list_packs
from ckptstore.objects.codecs import PATCH
from ckptstore.objects.pack import bases_of
from ckptstore.repository import footers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader, Tree

__all__ = ["CompactPolicy", "CompactReport", "compact"]

ENTRY_BYTES = 512 << 20
"""The new packs of so many bytes are listed together: a compaction that is killed has lost no more
of each worker."""

DONE_IDS = 1 << 18
"""So many chunks are remembered as looked at before an entry, in a hundred bytes each."""

ROUND_BYTES = 4 << 30
"""After so many bytes of new packs the old ones are deleted, so that a disk needs room for no more
of both."""

EMPTY = 0.25
"""A pack of which so much is dead is copied, although a gc would leave it: what is left in old ones
would take much of what coding has freed. Once copied, they have nothing dead."""

DEFAULT = CompactPolicy()


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What compaction would do to one run: of `commits` that are old enough, chunks that take
    `stored_bytes` would take `coded_bytes`."""

    run: str
    commits: int
    stored_bytes: int
    coded_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CompactReport:
    """The result of `compact`, or with `dry_run` an estimate: `chunks` took `stored_bytes` and take
    `coded_bytes`; `deltas` of them are differences. `packed_bytes` were written for that, and
    `collected` are the reports of the gcs that deleted the old packs. `newest` commits stay as they
    are by `policy`, `finished` ones were compacted before, or wait until their group is full. An
    estimate says what is true of each of the `runs`, too."""

    groups: tuple[Group, ...]
    policy: CompactPolicy
    newest: int
    finished: int
    chunks: int = 0
    deltas: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    coded_bytes: int = 0
    packed_bytes: int = 0
    problems: tuple[str, ...] = ()
    collected: tuple[GcReport, ...] = ()
    dry_run: bool = False
    runs: tuple[RunEstimate, ...] = ()

    @property
    def commits(self) -> int:
        """Commits that are old enough."""
        return sum(len(group.commits) for group in self.groups)

    @property
    def deleted_bytes(self) -> int:
        """Bytes of what the gcs deleted."""
        return sum(report.freed_bytes for report in self.collected)

    @property
    def written_bytes(self) -> int:
        """Bytes of new packs, those of the gcs among them."""
        return self.packed_bytes + sum(report.copied_bytes for report in self.collected)

    @property
    def freed_bytes(self) -> int:
        """What the disk gained: what was deleted less what was written."""
        return self.deleted_bytes - self.written_bytes

    def __repr__(self) -> str:
        return f"<compact: {str(self).splitlines()[-1]}>"

    def table(self) -> Table:
        """One row per run of an estimate."""
        columns = (
            Column("run"),
            Column("compact", "count"),
            Column("stores", "bytes"),
            Column("would free", "bytes"),
        )
        rows = [
            (r.run, r.commits, r.stored_bytes, r.stored_bytes - r.coded_bytes) for r in self.runs
        ]
        return Table(columns, rows, "What if: compact, by a sample")

    def __str__(self) -> str:
        would = "would be" if self.dry_run else "were"
        lines = [
            f"{count_text(self.commits, 'commit')} in {count_text(len(self.groups), 'group')}",
            f"{count_text(self.chunks, 'chunk')} {would} coded, {self.deltas:,} of them as "
            f"differences: {bytes_text(self.stored_bytes)} in {bytes_text(self.coded_bytes)}",
        ]
        lines += self._left
        if self.collected:
            deleted, written = bytes_text(self.deleted_bytes), bytes_text(self.written_bytes)
            gained = f"freed {bytes_text(self.freed_bytes)}"
            if self.freed_bytes < 0:
                gained = f"freed nothing yet, the store grew by {bytes_text(-self.freed_bytes)}"
            lines.append(f"{gained}: deleted {deleted}, wrote {written}")
        for sessions, nbytes in self.freed_later_bytes.items():
            which = ", ".join(sessions)
            lines.append(
                f"`ckptstore gc` frees {bytes_text(nbytes)} more when these sessions have ended: "
                f"{which}"
            )
        if self.left_bytes:
            lines.append(
                f"left {bytes_text(self.left_bytes)} that no commit needs in packs that hold more "
                "than that: `ckptstore gc --max-unused 0` frees it"
            )
        return "\n".join(lines)

    @property
    def left_bytes(self) -> int:
        """Bytes that no commit needs and that only a gc with a smaller `max_unused` frees."""
        return self.collected[-1].plan.left_bytes if self.collected else 0

    @property
    def freed_later_bytes(self) -> Mapping[tuple[SessionId, ...], int]:
        """Bytes of old packs that a later gc can delete, by the sessions that must end first."""
        return self.collected[-1].plan.freed_later_bytes if self.collected else {}

    @property
    def _left(self) -> Iterator[str]:
        """What was not compacted, and why."""
        if self.newest:
            stay = count_text(self.newest, "commit")
            yield f"left {stay} unchanged: the newest {self.policy.newest} of each run (--newest)"
        if self.finished:
            yield f"left {count_text(self.finished, 'commit')}: compacted before"
        if self.groups and not self.chunks:
            yield "left all chunks of these groups: coded already, patches, or not worth it"

    @property
    def summary(self) -> str:
        """What an estimate says of all runs together."""
        freed, share = self.stored_bytes - self.coded_bytes, 0.0
        if self.stored_bytes:
            share = freed / self.stored_bytes
        return f"would free {bytes_text(freed)} of {bytes_text(self.stored_bytes)} ({share:.0%})"


def compact(
    handle: StoreHandle,
    policy: CompactPolicy = DEFAULT,
    *,
    threads: int = 1,
    full_only: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
    spread: Spread[Stores] | None = None,
) -> CompactReport:
    """Code what `policy` says on `threads` threads, or by `spread`, then delete the old packs; with
    `full_only`, groups that will have more commits wait. With `dry_run`, estimate only.

    Raises `InvalidInput` for less than one thread, `Corrupt` if a document or page cannot be read,
    and what `collect` raises.
    """
    check_number("threads", threads, "1 or more", least=1, whole=True)
    if not dry_run:
        handle.check_writable()
    pool = ThreadPool(threads, aside=True)
    try:
        compaction = _Compaction(handle, policy, pool, progress, spread, full_only=full_only)
        return compaction.estimate() if dry_run else compaction.execute()
    finally:
        pool.close()


def remember(handle: StoreHandle, policy: CompactPolicy | None) -> None:
    """Let every gc of the store compact by `policy`, or with None by none."""
    handle.check_writable()
    handle.log.append(Settings(((SETTING, policy.setting if policy else None),)))


LOOKED_UP_IDS = 1 << 14
"""So many chunks are looked up at once, each in a row of 100 bytes."""


def cut_ids(ids: bytes) -> Iterator[bytes]:
    """The ids in parts that are looked up at once."""
    step = LOOKED_UP_IDS * CHUNK_ID_BYTES
    return (ids[at : at + step] for at in range(0, len(ids), step))


class _Compaction:
    """One run of `compact`."""

    def __init__(
        self,
        handle: StoreHandle,
        policy: CompactPolicy,
        threads: ThreadPool,
        progress: Progress,
        spread: Spread[Stores] | None,
        *,
        full_only: bool,
    ) -> None:
        self._handle, self._threads, self._progress = handle, threads, progress
        self._engine = spread
        self._state = handle.log.replay()
        handle.objects.sync(self._state)
        self._reader = Reader(handle.config, handle.objects, threads)
        self._policy = policy
        self._groups = plan_groups(self._state, policy, full_only=full_only)
        self._newest = newest_commits(self._state, policy)
        self._candidates = Candidates(handle.objects, handle.log, self._kept())
        self._coded = Coded()
        self._packed: list[PackRecord] = []
        self._logical_bytes: dict[CommitId, int] = {}
        for commit in (commit for group in self._groups for commit in group.commits):
            with self._unless_purged([commit]):
                self._logical_bytes[commit] = self._document(commit).logical_bytes
        self._done_bytes, self._total_bytes = 0, sum(self._logical_bytes.values())

    def _kept(self) -> Keys:
        """The keys of the chunks of the newest commits, and of all that patches make these of."""
        kept: Keys = np.empty(0, np.uint64)
        for commit in self._newest if self._groups else ():
            with self._unless_purged([commit]):
                trees = self._trees(commit).values()
                left = b"".join(content.ids for tree in trees for content in tree.contents)
                while left:
                    keys = short_keys(left)
                    fresh = np.frombuffer(left, "V32")[~np.isin(keys, kept)].tobytes()
                    kept = np.union1d(kept, keys)
                    left = b"".join(map(self._bases_of, cut_ids(fresh)))
        return kept

    def _bases_of(self, ids: bytes) -> bytes:
        """The ids of the bases of those of `ids` that are patches."""
        where, found = self._handle.objects.located(ids), list[bytes]()
        patched = where[where["codec"] == PATCH]
        for number, pack in self._handle.objects.listed(set(patched["pack"].tolist())).items():
            table = footers.read_table(self._handle.storage, pack)
            own = np.isin(table["offset"], patched["offset"][patched["pack"] == number])
            found.append(bases_of(table[own]).tobytes())
        return b"".join(found)

    def estimate(self) -> CompactReport:
        """What `execute` would do, by a sample."""
        runs: dict[str, Coded] = defaultdict(Coded)
        for strip in self._strips():
            estimate(self._handle.objects, strip.places, strip.key, runs[strip.run])
            self._tell(strip.planned_bytes)
        self._coded = Coded.total(runs.values())
        estimates = (
            RunEstimate(run, self._old(run), round(each.stored_bytes), round(each.coded_bytes))
            for run, each in sorted(runs.items())
        )
        return replace(self._report(()), dry_run=True, runs=tuple(estimates))

    def _old(self, run: str) -> int:
        """Commits of a run that are old enough."""
        return sum(len(group.commits) for group in self._groups if group.run == run)

    def execute(self) -> CompactReport:
        """Code all strips. In rounds, the last of which also does what an earlier compaction that
        was killed has left, gcs delete the old packs. Workers of an engine do not wait for that:
        the packs go at the end."""
        collected: list[GcReport] = []
        round_bytes = math.inf if self._engine else ROUND_BYTES
        strips, swept = self._strips(), 0.0
        for strip in strips:
            self._write(chain((strip,), strips), round_bytes)
            if self._coded.coded_bytes >= swept + round_bytes:
                collected.append(self._sweep())
                swept = self._coded.coded_bytes
        if self._groups and (swept < self._coded.coded_bytes or not collected):
            collected.append(self._sweep())
        self._finish()
        return self._report(collected)

    def _sweep(self) -> GcReport:
        """Delete the old packs."""
        verified = frozenset(record.id for record in self._packed)
        options = GcOptions(grace_s=math.inf, verified=verified, empty=EMPTY)
        return collect(self._handle, options, progress=self._progress, spread=self._engine)

    def _finish(self) -> None:
        """Note in the store's settings which groups are finished."""
        state = self._handle.log.replay()
        before = finished_in(state)
        finished = before | {group.run: group.end for group in self._groups if group.full}
        if finished != before and not self._coded.problems:
            body = Settings(((FINISHED_SETTING, finished_setting(finished)),))
            self._handle.log.append(body)

    def _report(self, collected: Sequence[GcReport]) -> CompactReport:
        coded = self._coded
        grouped = sum(len(group.commits) for group in self._groups)
        there = sum(not row.soft for row in self._state.commits.values())
        return CompactReport(
            tuple(self._groups),
            self._policy,
            len(self._newest),
            there - grouped - len(self._newest),
            round(coded.chunks),
            round(coded.deltas),
            round(coded.raw_bytes),
            round(coded.stored_bytes),
            round(coded.coded_bytes),
            sum(record.bytes for record in self._packed),
            tuple(coded.problems),
            tuple(collected),
        )

    def _write(self, strips: Iterable[ToCode], limit_bytes: float) -> None:
        """Code strips, of at most about `limit_bytes`, and list the new packs."""
        spread = self._engine or here((self._handle,), self._threads)
        to, items = Destination(self._handle, self._threads), self._items(strips, limit_bytes)
        with closing(each_written(to, "compact", spread, code_strips, items)) as done:
            for item, coded, write in done:
                with write:
                    if write.packs.closed:
                        self._packed += list_packs(self._handle.log, write)
                self._coded = Coded.total([self._coded, coded])
                self._tell(sum(strip.planned_bytes for strip in item))
        self._candidates.done.clear()  # from now on the index says which of them are coded

    def _items(self, strips: Iterable[ToCode], limit_bytes: float) -> Iterator[Sequence[ToCode]]:
        """The strips that are enough for an entry, while they are at most about `limit_bytes` and
        few enough to be remembered."""
        some, nbytes, given_bytes = list[ToCode](), 0, 0
        for strip in strips:
            some.append(strip)
            nbytes += strip.stored_bytes
            is_last = nbytes >= limit_bytes or len(self._candidates.done) >= DONE_IDS
            if is_last or nbytes - given_bytes >= ENTRY_BYTES:
                yield some
                some, given_bytes = [], nbytes
            if is_last:
                return
        if some:
            yield some

    def _strips(self) -> Iterator[ToCode]:
        """What there is to code in all groups, oldest first."""
        chunk_bytes, before_bytes, told_bytes = self._reader.chunk_bytes, 0, 0
        for group in self._groups:
            group_bytes = sum(self._logical_bytes.get(c, 0) for c in group.commits)
            with self._unless_purged(group.commits):
                trees = [self._trees(commit) for commit in group.commits]
                contents = (c for of in trees for tree in of.values() for c in tree.contents)
                for ids in cut_ids(b"".join(content.ids for content in contents)):
                    self._candidates.foresee(ids)
                for n, strip in enumerate(strips(places(trees), chunk_bytes, RUN_BYTES), 1):
                    strips_bytes = n * RUN_BYTES * len(group.commits)  # if all chunks are large
                    done_bytes = before_bytes + min(strips_bytes, group_bytes)
                    if chunks := self._candidates.of(strip):
                        self._candidates.done.update(each.id for some in chunks for each in some)
                        yield ToCode(group.run, group.key, chunks, done_bytes - told_bytes)
                        told_bytes = done_bytes
            before_bytes += group_bytes
        self._tell(self._total_bytes - told_bytes)

    def _tell(self, more_bytes: int) -> None:
        """Report the progress, with the bytes of what was coded before and after."""
        self._done_bytes += more_bytes
        before, after = self._coded.stored_bytes, self._coded.coded_bytes
        phase = f"compact {bytes_text(round(before))} to {bytes_text(round(after))},"
        self._progress(phase, self._done_bytes, self._total_bytes)

    @contextmanager
    def _unless_purged(self, commits: Sequence[CommitId]) -> Iterator[None]:
        """What others have purged since the plan need not be there."""
        try:
            yield
        except NotFound:
            if all(commit in self._handle.log.replay().commits for commit in commits):
                raise

    def _document(self, commit: CommitId) -> CommitDocument:
        return self._reader.document(self._state.commits[commit].session, commit)

    def _trees(self, commit: CommitId) -> Mapping[str, Tree]:
        return self._reader.trees(self._document(commit).trees)
