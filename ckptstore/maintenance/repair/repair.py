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
from ckptstore.core.ids import CONFIG_KEY, CommitId, checkpoint_key, segment_key
from ckptstore.errors import Conflict, Corrupt, NotFound
from ckptstore.log import entries
from ckptstore.log.entries import Position
from ckptstore.log.log import Log
from ckptstore.maintenance.check.fsck import Facts, examine
from ckptstore.maintenance.check.log_audit import decode_at
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.report import Finding, Kind, Level, Report, Severity, Share
from ckptstore.maintenance.progress import Progress, silent
from ckptstore.maintenance.repair.quarantine import keep_copy, quarantine
from ckptstore.maintenance.repair.repair_objects import (
    RecoveredObject,
    recover_document,
    recover_entry,
)
from ckptstore.maintenance.repair.rescue import (
    CopyTwin,
    SavePacks,
    copy_twin,
    plan_packs,
    save_packs,
)
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
    """Write `ckptstore.json` again. Unless `certain`, chunk size and codec are inferred: right
    for every existing commit."""

    config: StoreConfig
    certain: bool


@dataclass(frozen=True, slots=True)
class PutBack:
    """Restore the exact bytes of a log entry or a document."""

    recovered: RecoveredObject


@dataclass(frozen=True, slots=True)
class SetAside:
    """Move an obstructing object to `quarantine/`."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Name the commits that cannot be restored completely in the store's settings."""

    commits: tuple[CommitId, ...]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Rebuild this host's indexes."""

    why: str


Action: TypeAlias = WriteConfig | PutBack | SetAside | CopyTwin | SavePacks | Mark | Rebuild


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The actions, in order, and the findings that cannot be repaired with the available sources.

    With `more`, the rest can only be planned after this plan was applied.
    """

    actions: tuple[Action, ...]
    unrepairable: tuple[Finding, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Repaired:
    """The findings, the actions taken (none in a dry run: `plan` has the planned ones), and the
    findings that remain."""

    before: Report
    plan: RepairPlan
    applied: tuple[Action, ...]
    after: Report


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
    facts = _look(offline_store, share, progress)
    before, plan = facts.report, plan_repair(facts, mirrors)
    first, applied, rounds, retries = plan, list[Action](), ROUNDS if apply else 0, RETRIES
    while rounds and plan.actions:
        try:
            for action in plan.actions:
                progress("repair", len(applied), len(applied) + len(plan.actions))
                _apply(action, facts.offline_store, mirrors)
                applied.append(action)
            rounds -= 1
        except (Conflict, Corrupt, NotFound):
            # Others changed the facts behind the plan; plan again from the current store.
            if not retries:
                raise
            retries -= 1
        if any(isinstance(action, WriteConfig) for action in applied):
            offline_store = replace(offline_store, problem=None)
        facts = _look(offline_store, share, progress)
        plan = plan_repair(facts, mirrors)
    return Repaired(before, first, tuple(applied), facts.report)


def _look(offline_store: OfflineStore, share: Share | None, progress: Progress) -> Facts:
    return examine(offline_store, level=Level.PACKS, share=share, suspects=True, progress=progress)


def plan_repair(facts: Facts, mirrors: Sequence[Storage]) -> RepairPlan:
    """Plan the actions for `facts`. Reads the store and the mirrors, changes nothing."""
    actions: list[Action] = []
    if facts.offline_store.problem is not None:
        actions.append(WriteConfig(facts.offline_store.config, facts.offline_store.certain))
    recovered, unrepairable = _plan_log(facts, mirrors)
    actions += recovered
    if facts.chain.bad:
        # A broken log takes no appends and its list is uncertain: repair it first.
        return RepairPlan(tuple(actions), tuple(unrepairable), more=bool(recovered))
    for commit in _commits_without_document(facts.report):
        if document := recover_document(
            facts.offline_store.storage, commit, facts.chain.state.commits[commit], mirrors
        ):
            actions.append(PutBack(document))
    actions += plan_packs(facts, mirrors)
    actions += _plan_marks(facts, actions)
    if _indexes_disagree(facts) and not _only_the_index_knows(facts, actions):
        actions.append(Rebuild("the indexes disagree with the store"))
    return RepairPlan(tuple(actions), tuple(_unrepairable(facts, actions)))


def _plan_log(facts: Facts, mirrors: Sequence[Storage]) -> tuple[list[Action], list[Finding]]:
    """Restore the last entry first: it attests the one before, and a log with a gap takes no
    appends meanwhile."""
    actions: list[Action] = []
    unrepairable = []
    findings = {
        finding.entry: finding for finding in facts.report.findings if finding.kind is Kind.ENTRY
    }
    copies = facts.offline_store.copies(bad.n for bad in facts.chain.bad)
    store, before = facts.offline_store.config.store, None
    for bad in reversed(facts.chain.bad):
        if before and before.n == bad.n:
            bad = replace(bad, wanted=bad.wanted or before)
        if recovered := recover_entry(
            bad, store, facts.offline_store.storage, mirrors, copies.get(bad.n)
        ):
            actions.append(PutBack(recovered))
            entry = decode_at(bad.n, recovered.data, store)
            before = Position(bad.n - 1, entry.prev_hash, entry.prev_bytes)
        else:
            unrepairable.append(findings[bad.n])
    if not facts.chain.bad:
        actions += (
            SetAside(checkpoint_key(n), problem) for n, problem in facts.chain.bad_checkpoints
        )
        actions += (SetAside(segment_key(n), problem) for n, problem in facts.chain.bad_segments)
    return actions, unrepairable


def _commits_without_document(report: Report) -> Iterator[CommitId]:
    return (finding.commits[0] for finding in report.findings if finding.kind is Kind.DOCUMENT)


def _plan_marks(facts: Facts, actions: Sequence[Action]) -> Iterator[Action]:
    """Marks come last: only then is it known what stays damaged."""
    if actions:
        return
    marked = facts.chain.state.settings.get(DAMAGED_SETTING) or ()
    damaged = tuple(sorted(facts.report.damaged_commits))
    if damaged != marked:
        yield Mark(damaged)


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
    healed = {
        source.entry.chunk
        for action in actions
        if isinstance(action, SavePacks)
        for source in action.sources
    }
    put_back = {action.recovered.key for action in actions if isinstance(action, PutBack)}
    for finding in facts.report.findings:
        if finding.commits and finding.chunk not in healed and finding.key not in put_back:
            yield finding


def _apply(action: Action, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
    storage = offline_store.storage
    match action:
        case WriteConfig():
            keep_copy(storage, CONFIG_KEY)
            storage.put(CONFIG_KEY, encode_config(action.config))
        case PutBack():
            _put_back(action.recovered, offline_store)
        case SetAside():
            quarantine(storage, action.key)
        case CopyTwin():
            copy_twin(action, offline_store, _log(offline_store))
        case SavePacks():
            save_packs(action, offline_store, _log(offline_store), mirrors)
        case Mark():
            setting = action.commits or None
            _log(offline_store).append(entries.Settings(((DAMAGED_SETTING, setting),)))
        case Rebuild():
            _drop_indexes(offline_store)


def _put_back(recovered: RecoveredObject, offline_store: OfflineStore) -> None:
    """An entry's name is never free meanwhile, so that no writer takes it; a document is needed
    only while its commit is listed."""
    if recovered.commit is None:
        keep_copy(offline_store.storage, recovered.key)
    elif recovered.commit not in _log(offline_store).state.commits:
        return
    else:
        quarantine(offline_store.storage, recovered.key)
    offline_store.storage.put(recovered.key, recovered.data)


def _log(offline_store: OfflineStore) -> Log:
    log = offline_store.open_log()
    log.replay()
    return log


def _drop_indexes(offline_store: OfflineStore) -> None:
    from ckptstore.index.catalog import Catalog
    from ckptstore.index.chunks import ChunkIndex

    Catalog.open(offline_store.catalog_path, offline_store.config.store).reset()
    index = ChunkIndex.open(offline_store.chunks_path, offline_store.config.store)
    index.reset()
    index.close()
