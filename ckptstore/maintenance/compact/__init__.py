"""Compaction: code the chunks of old commits smaller, beside everything else (docs/compact.md).

Coded copies are written to packs of their own, durable before a `register` entry lists them; no
pack is condemned by that. Then a gc that purges nothing finds two copies of each of those chunks.
It keeps the smaller one, which it has read and compared with its id, and deletes the packs of the
other, or copies what is left in them. So compaction changes nothing that a gc does not change, and
may be killed at any moment: what is registered is finished work.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument
from ckptstore.core.numbers import check_number
from ckptstore.core.text import Column, Table, bytes_text, count_text
from ckptstore.errors import NotFound
from ckptstore.log.entries import Settings
from ckptstore.maintenance import Counter, Progress, silent
from ckptstore.maintenance.compact.coding import (
    Candidates,
    Coded,
    StripCoder,
    estimate,
    kept_keys,
)
from ckptstore.maintenance.compact.plan import (
    SETTING,
    ChunkSlot,
    CompactPolicy,
    Group,
    newest_commits,
    places,
    plan_groups,
    strips,
)
from ckptstore.maintenance.gc import GcOptions, GcReport, collect
from ckptstore.maintenance.mover import list_packs
from ckptstore.repository.pack_writer import PackSet
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.restore.reader import Reader, Tree

__all__ = ["CompactPolicy", "CompactReport", "compact"]

ROUND_BYTES = 4 << 30
"""After so many bytes of new packs the old ones are deleted, so that a disk needs room for no more
of both."""

DEFAULT = CompactPolicy()
KEEP_ALL = GcOptions(grace_s=math.inf)


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
    are by `policy`, and `waiting` ones until their group is complete. An estimate says what is true
    of each of the `runs`, too."""

    groups: tuple[Group, ...]
    policy: CompactPolicy
    newest: int
    waiting: int
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
                gained = f"freed nothing, the store grew by {bytes_text(-self.freed_bytes)}"
            lines.append(f"{gained}: deleted {deleted}, wrote {written}")
        return "\n".join(lines)

    @property
    def _left(self) -> Iterator[str]:
        """What was not compacted, and why."""
        if self.newest:
            stay = count_text(self.newest, "commit")
            yield f"left {stay} as they are: the newest {self.policy.newest} of each run (--newest)"
        if self.waiting:
            yield (
                f"left {count_text(self.waiting, 'commit')} for later: a group waits until it has "
                f"{self.policy.every} (--every; --newest 0 takes a smaller one, too)"
            )
        if self.groups and not self.chunks:
            yield "left all chunks of these groups: they are coded already, or would not be smaller"

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
    dry_run: bool = False,
    progress: Progress = silent,
) -> CompactReport:
    """Code what `policy` says on `threads` threads, then delete the old packs; with `dry_run`,
    estimate only.

    Raises `InvalidInput` for less than one thread, `Corrupt` if a document or page cannot be read,
    and what `collect` raises.
    """
    check_number("threads", threads, "1 or more", least=1, whole=True)
    if not dry_run:
        handle.check_writable()
    pool = ThreadPool(threads, aside=True)
    try:
        compaction = _Compaction(handle, policy, pool, progress)
        return compaction.estimate() if dry_run else compaction.execute()
    finally:
        pool.close()


def remember(handle: StoreHandle, policy: CompactPolicy | None) -> None:
    """Let every gc of the store compact by `policy`, or with None by none."""
    handle.check_writable()
    handle.log.append(Settings(((SETTING, policy.setting if policy else None),)))


class _Compaction:
    """One run of `compact`."""

    def __init__(
        self, handle: StoreHandle, policy: CompactPolicy, threads: ThreadPool, progress: Progress
    ) -> None:
        self._handle, self._threads, self._progress = handle, threads, progress
        self._state = handle.log.replay()
        handle.objects.sync(self._state)
        self._reader = Reader(handle.config, handle.objects, threads)
        self._policy, self._groups = policy, plan_groups(self._state, policy)
        self._newest = newest_commits(self._state, policy)
        self._packed_bytes = 0
        kept: set[bytes] = set()
        for commit in self._newest:
            with self._unless_purged([commit]):
                trees = self._trees(commit).values()
                kept.update(content.ids for tree in trees for content in tree.contents)
        self._candidates = Candidates(handle.objects, handle.log, kept_keys(kept))
        self._coded = Coded()
        self._logical_bytes: dict[CommitId, int] = {}
        for commit in (commit for group in self._groups for commit in group.commits):
            with self._unless_purged([commit]):
                self._logical_bytes[commit] = self._document(commit).logical_bytes
        self._counter = Counter(progress, "compact", sum(self._logical_bytes.values()))

    def estimate(self) -> CompactReport:
        """What `execute` would do, by a sample."""
        runs: dict[str, Coded] = defaultdict(Coded)
        for group, strip in self._strips():
            chunks = self._candidates.of(strip)
            estimate(self._handle.objects, chunks, group.key, runs[group.run])
            self._candidates.done.update(each.id for place in chunks for each in place)
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
        """Code all strips, in rounds that each end with a gc."""
        collected: list[GcReport] = []
        strips = self._strips()
        for strip in strips:
            if self._round(chain((strip,), strips)):
                collected.append(collect(self._handle, KEEP_ALL, progress=self._progress))
        return self._report(collected)

    def _report(self, collected: Sequence[GcReport]) -> CompactReport:
        coded = self._coded
        grouped = sum(len(group.commits) for group in self._groups)
        there = sum(not row.soft for row in self._state.commits.values())
        return CompactReport(
            self._groups,
            self._policy,
            len(self._newest),
            there - grouped - len(self._newest),
            round(coded.chunks),
            round(coded.deltas),
            round(coded.raw_bytes),
            round(coded.stored_bytes),
            round(coded.coded_bytes),
            self._packed_bytes,
            tuple(coded.problems),
            tuple(collected),
        )

    def _round(self, strips: Iterable[tuple[Group, Sequence[ChunkSlot]]]) -> bool:
        """Code strips until they make a round, and list the new packs; False if there are none."""
        with Transaction.begin(Destination(self._handle, self._threads), what="compact") as write:
            work = shared(strips)
            stop_at = self._coded.coded_bytes + ROUND_BYTES
            works = [partial(self._code, work, write.packs, stop_at)] * self._threads.count
            self._threads.together(works, work.stop)
            write.packs.wait()
            if write.packs.closed:
                records = list_packs(self._handle.log, write)
                self._packed_bytes += sum(record.bytes for record in records)
        return bool(write.packs.closed)

    def _code(
        self, work: Iterable[tuple[Group, Sequence[ChunkSlot]]], packs: PackSet, stop_at: float
    ) -> None:
        """Code strips on this thread while fewer than `stop_at` bytes were made in all."""
        with packs.writing() as writer:
            coder = StripCoder(self._handle.objects, writer, self._coded)
            for group, strip in work:
                with self._unless_purged(group.commits):
                    chunks = self._candidates.of(strip)
                    if chunks:
                        coder.code(chunks, group.key, self._candidates.done)
                if self._coded.coded_bytes >= stop_at:
                    break

    def _strips(self) -> Iterator[tuple[Group, Sequence[ChunkSlot]]]:
        """The strips of all groups, oldest first."""
        chunk_bytes = self._reader.chunk_bytes
        for group in self._groups:
            with self._unless_purged(group.commits):
                trees = [self._trees(commit) for commit in group.commits]
                for strip in strips(places(trees), chunk_bytes, RUN_BYTES):
                    yield group, strip
            for commit in group.commits:
                self._counter.add(self._logical_bytes.get(commit, 0))

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
