"""Repair of a store: a plan made from fsck's facts, then applied step by step.

Four rules. Everything written is proved to be the original, or matches its id; the one exception is
a lost `ckptstore.json`, and the plan says so. Nothing is deleted: replaced objects go to
`quarantine/`. The log only grows. An entry is restored only as the exact bytes that the rest of the
log attests, so history never forks. And a readable copy is removed only after another one is
durable and listed, so repair never costs a commit (`maintenance.repair.rescue`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CONFIG_KEY, CommitId, document_key, log_key
from ckptstore.errors import Conflict, Corrupt, NotFound
from ckptstore.log import entries
from ckptstore.log.entries import Position
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.check.fsck import Facts, examine
from ckptstore.maintenance.check.indexes import drop_indexes
from ckptstore.maintenance.check.log import decode_at
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.report import Finding, Kind, Report, Severity, Share
from ckptstore.maintenance.repair.recover import (
    quarantine,
    recover_document,
    recover_entry,
    replace_small,
)
from ckptstore.maintenance.repair.rescue import CopyTwin, SavePacks, plan_packs
from ckptstore.objects.documents import encode_config
from ckptstore.storage.contract import Storage

DAMAGED_SETTING = "damaged"
"""The setting that names the commits which cannot be restored completely."""

ROUNDS = 3
"""A repaired log brings back packs and commits, which may need repair; then the marks follow."""

RETRIES = 10
"""How often a plan is made again because others changed the store meanwhile."""


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Write `ckptstore.json` again. Chunk size and codec are inferred: right for every existing
    commit."""

    config: StoreConfig

    def __str__(self) -> str:
        return (
            f"write ckptstore.json anew: store {self.config.store}, chunk size "
            f"{self.config.chunk_bytes}, codec {self.config.codec}; certain is the store's id, and "
            "that every commit can be read so"
        )

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        replace_small(offline_store.storage, CONFIG_KEY, encode_config(self.config))


@dataclass(frozen=True, slots=True)
class PutBack:
    """Restore the exact bytes of a log entry, or of the document of `commit`."""

    key: str
    origin: str
    data: bytes
    commit: CommitId | None = None

    def __str__(self) -> str:
        return (
            f"put back {self.key} from {self.origin}; certain: its hash is the one that others name"
        )

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        """An entry's name is never free meanwhile, so that no writer takes it; a document is needed
        only while its commit is listed."""
        if self.commit is None:
            replace_small(offline_store.storage, self.key, self.data)
        elif self.commit in offline_store.open_log().replay().commits:
            quarantine(offline_store.storage, self.key)
            offline_store.storage.put(self.key, self.data)


@dataclass(frozen=True, slots=True)
class SetAside:
    """Move an obstructing object to `quarantine/`."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"move {self.key} to quarantine/: {self.why}"

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        quarantine(offline_store.storage, self.key)


@dataclass(frozen=True, slots=True)
class Mark:
    """Name the commits that cannot be restored completely in the store's settings."""

    commits: tuple[CommitId, ...]

    def __str__(self) -> str:
        if not self.commits:
            return "take back the marks of damaged commits"
        return f"mark as damaged: {', '.join(commit[:12] for commit in self.commits)}"

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        log = offline_store.open_log()
        log.replay()
        log.append(entries.Settings(((DAMAGED_SETTING, self.commits or None),)))


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Rebuild this host's indexes."""

    def __str__(self) -> str:
        return "make this host's indexes anew: the indexes disagree with the store"

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        drop_indexes(offline_store)


Action: TypeAlias = WriteConfig | PutBack | SetAside | CopyTwin | SavePacks | Mark | Rebuild


@dataclass(frozen=True, slots=True, repr=False)
class RepairPlan:
    """The actions, in order, and the findings that cannot be repaired with the available sources.

    With `more`, the rest can only be planned after this plan was applied.
    """

    actions: tuple[Action, ...]
    unrepairable: tuple[Finding, ...]
    more: bool = False

    def __repr__(self) -> str:
        return f"<repair plan: {len(self.actions)} actions, {len(self.unrepairable)} lost>"


@dataclass(frozen=True, slots=True, repr=False)
class Repaired:
    """The findings, the actions taken (none in a dry run: `plan` has the planned ones), and the
    findings that remain."""

    before: Report
    plan: RepairPlan
    applied: tuple[Action, ...]
    after: Report
    dry_run: bool

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions taken, or in a dry run the planned ones."""
        return self.plan.actions if self.dry_run else self.applied

    def __repr__(self) -> str:
        verb = "planned" if self.dry_run else "taken"
        return f"<repair: {len(self.actions)} actions {verb}; {self.after.summary}>"

    def __str__(self) -> str:
        lines = [f"{'would' if self.dry_run else 'done'}: {action}" for action in self.actions]
        if self.plan.more and self.dry_run:
            lines.append("then: what the whole log lists is looked at, and repaired as well")
        lines += map(str, self.plan.unrepairable if self.dry_run else self.after.findings)
        if not self.plan.actions and not self.applied:
            lines.append(
                "there is nothing that could be done"
                if self.after.damaged
                else "there is nothing to repair"
            )
        elif self.dry_run:
            lines.append("nothing was changed: add --apply to do it")
        return "\n".join(lines)


def repair(
    offline_store: OfflineStore,
    *,
    mirrors: Sequence[Storage] = (),
    apply: bool = False,
    share: Share | None = None,
    progress: Progress = silent,
) -> Repaired:
    """Check the store, plan a repair, and with `apply` carry it out.

    `share` limits the stored data that is read and verified first; packs in which an earlier fsck
    found damage are always read. Other processes may continue: each action checks the current log,
    and the plan is made again if others changed its subject. Raises `Conflict` if that happens
    repeatedly.
    """
    facts = examine(offline_store, share=share, progress=progress)
    before, plan = facts.report, plan_repair(facts, mirrors)
    first, applied, rounds, retries = plan, list[Action](), ROUNDS if apply else 0, RETRIES
    while rounds and plan.actions:
        try:
            for action in plan.actions:
                progress("repair", len(applied), len(applied) + len(plan.actions))
                action.apply(facts.offline_store, mirrors)
                applied.append(action)
            rounds -= 1
        except (Conflict, Corrupt, NotFound):
            # Others changed the facts behind the plan; plan again from the current store.
            if not retries:
                raise
            retries -= 1
        if any(isinstance(action, WriteConfig) for action in applied):
            offline_store = replace(offline_store, problem=None)
        facts = examine(offline_store, share=share, progress=progress)
        plan = plan_repair(facts, mirrors)
    return Repaired(before, first, tuple(applied), facts.report, not apply)


def plan_repair(facts: Facts, mirrors: Sequence[Storage]) -> RepairPlan:
    """Plan the actions for `facts`. Reads the store and the mirrors, changes nothing."""
    actions: list[Action] = []
    offline_store, state = facts.offline_store, facts.chain.state
    if offline_store.problem is not None:
        actions.append(WriteConfig(offline_store.config))
    if facts.chain.bad:
        # A broken log takes no appends and its list is uncertain: repair it first.
        entries, unrepairable = _plan_log(facts, mirrors)
        return RepairPlan((*actions, *entries), tuple(unrepairable), more=bool(entries))
    actions += (SetAside(cache.key, cache.problem) for cache in facts.chain.bad_caches)
    for finding in facts.report.findings:
        if finding.kind is Kind.DOCUMENT:
            (commit,) = finding.commits
            key = document_key(state.commits[commit].session, commit)
            if found := recover_document(offline_store.storage, key, commit, mirrors):
                actions.append(PutBack(key, *found, commit))
    actions += plan_packs(facts, mirrors)
    damaged = tuple(sorted(facts.report.damaged_commits))
    # Marks come last: only then is it known what stays damaged.
    if not actions and damaged != (state.settings.get(DAMAGED_SETTING) or ()):
        actions.append(Mark(damaged))
    if _indexes_disagree(facts) and not _only_the_index_knows(facts, actions):
        actions.append(Rebuild())
    return RepairPlan(tuple(actions), tuple(_unrepairable(facts, actions)))


def _plan_log(facts: Facts, mirrors: Sequence[Storage]) -> tuple[list[PutBack], list[Finding]]:
    """Restore the last entry first: it attests the one before, and a log with a gap takes no
    appends meanwhile."""
    actions: list[PutBack] = []
    unrepairable = []
    findings = {
        finding.entry: finding for finding in facts.report.findings if finding.kind is Kind.ENTRY
    }
    copies = facts.offline_store.copies(bad.n for bad in facts.chain.bad)
    store, before = facts.offline_store.config.store, None
    for bad in reversed(facts.chain.bad):
        if before and before.n == bad.n:
            bad = replace(bad, wanted=bad.wanted or before)
        found = recover_entry(bad, store, facts.offline_store.storage, mirrors, copies.get(bad.n))
        if found is None:
            unrepairable.append(findings[bad.n])
            continue
        actions.append(PutBack(log_key(bad.n), *found))
        entry = decode_at(bad.n, found[1], store)
        before = Position(bad.n - 1, entry.prev_hash, entry.prev_bytes)
    return actions, unrepairable


def _indexes_disagree(facts: Facts) -> bool:
    return any(
        finding.severity is Severity.INDEX and finding.kind is not Kind.CHECKPOINT
        for finding in facts.report.findings
    )


def _only_the_index_knows(facts: Facts, actions: Sequence[Action]) -> bool:
    """Whether there is a pack without readable footer: only the chunk index knows its chunks."""
    saved = {
        name for action in actions if isinstance(action, SavePacks) for _, name in action.damaged
    }
    return not facts.contents.problems.keys() <= saved


def _unrepairable(facts: Facts, actions: Sequence[Action]) -> Iterator[Finding]:
    """Findings that cost commits and that no action repairs."""
    saves = [action for action in actions if isinstance(action, SavePacks)]
    healed = {source.entry.chunk for save in saves for source in save.sources}
    put_back = {action.key for action in actions if isinstance(action, PutBack)}
    for finding in facts.report.findings:
        if finding.commits and finding.chunk not in healed and finding.key not in put_back:
            yield finding
