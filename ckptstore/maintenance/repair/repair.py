"""What can be done about damage, and doing it: a plan made from fsck's facts, then applied step by
step.

Four rules. Nothing is written that is not proved to be what was there, or to match its id; the one
exception is a lost `ckptstore.json`, and the plan says so. Nothing is deleted: what is replaced
goes to `quarantine/`. The log only ever grows, as by any other writer; an entry is put back only as
the exact bytes that the rest of the log attests, so history never forks. And no copy that reads is
taken away before another one is durable and listed, so that no repair costs a commit
(`maintenance.repair.rescue`).
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
from ckptstore.maintenance.repair.repair_objects import Mended, mend_document, mend_entry
from ckptstore.maintenance.repair.rescue import (
    CopyTwin,
    SavePacks,
    copy_twin,
    plan_packs,
    save_packs,
)
from ckptstore.objects.config import encode_config
from ckptstore.storage.contract import Storage

DAMAGED_SETTING = "damaged"
"""The setting that names the commits which cannot be restored whole."""

ROUNDS = 3
"""A repaired log brings packs and commits to light, and those may need repair; then the marks
follow."""

RETRIES = 10
"""So often a plan is made anew because others changed the store meanwhile."""


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Write `ckptstore.json` again. Unless `certain`, chunk size and codec are concluded: right for
    every commit there is."""

    config: StoreConfig
    certain: bool


@dataclass(frozen=True, slots=True)
class PutBack:
    """Put the exact bytes of a log entry or a document in their place."""

    mended: Mended


@dataclass(frozen=True, slots=True)
class SetAside:
    """Move an object that only stands in the way to `quarantine/`."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Name the commits that cannot be restored whole in the store's settings."""

    commits: tuple[CommitId, ...]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Make this host's indexes anew."""

    why: str


Action: TypeAlias = WriteConfig | PutBack | SetAside | CopyTwin | SavePacks | Mark | Rebuild


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What to do, in order, and the findings that nothing can be done about with what is at hand.

    With `more`, the rest can only be planned once this has been applied.
    """

    actions: tuple[Action, ...]
    unrepairable: tuple[Finding, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was found, what was done (nothing in a dry run: then `plan` says what would be), and
    what fsck finds now."""

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
    """Look for damage, plan, and with `apply` carry the plan out. With `share`, so much stored data
    is read and hashed first; packs in which an earlier fsck found damage are read in any case.

    Nobody needs to be kept out meanwhile: each action looks at the log as it is then, and if others
    changed what it is about, the plan is made anew. Raises `Conflict` if they do so again and
    again: repeat it.
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
            # Others changed what the plan is made from. It is made anew, from the store as it is
            # now.
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


# -- deciding
# ----------------------------------------------------------------------------------------------------------------------


def plan_repair(facts: Facts, mirrors: Sequence[Storage]) -> RepairPlan:
    """What to do about `facts`. Reads the store and the mirrors, changes nothing."""
    actions: list[Action] = []
    if facts.offline_store.problem is not None:
        actions.append(WriteConfig(facts.offline_store.config, facts.offline_store.certain))
    mended, unrepairable = _plan_log(facts, mirrors)
    actions += mended
    if facts.chain.bad:
        # Nothing can be appended to a broken log, and what it lists is not certain: first this,
        # then the rest.
        return RepairPlan(tuple(actions), tuple(unrepairable), more=bool(mended))
    for commit in _commits_without_document(facts.report):
        if document := mend_document(
            facts.offline_store.storage, commit, facts.chain.state.commits[commit], mirrors
        ):
            actions.append(PutBack(document))
    actions += plan_packs(facts, mirrors)
    actions += _plan_marks(facts, actions)
    if _indexes_disagree(facts) and not _only_the_index_knows(facts, actions):
        actions.append(Rebuild("the indexes say something else than the store"))
    return RepairPlan(tuple(actions), tuple(_unrepairable(facts, actions)))


def _plan_log(facts: Facts, mirrors: Sequence[Storage]) -> tuple[list[Action], list[Finding]]:
    """What to put back, the last entry first: it says which one belongs before it, and a log with a
    gap is not appended to meanwhile."""
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
        if mended := mend_entry(
            bad, store, facts.offline_store.storage, mirrors, copies.get(bad.n)
        ):
            actions.append(PutBack(mended))
            entry = decode_at(bad.n, mended.data, store)
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
    """Marks come when nothing else is left to do: only then it is known what stays damaged."""
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
    """Whether a pack stays of which no footer can be read: what it holds is found by the chunk
    index alone."""
    saved = {
        name for action in actions if isinstance(action, SavePacks) for _, name in action.damaged
    }
    return not facts.contents.problems.keys() <= saved


def _unrepairable(facts: Facts, actions: Sequence[Action]) -> Iterator[Finding]:
    """Findings that cost commits and that no action heals."""
    healed = {
        source.entry.chunk
        for action in actions
        if isinstance(action, SavePacks)
        for source in action.sources
    }
    put_back = {action.mended.key for action in actions if isinstance(action, PutBack)}
    for finding in facts.report.findings:
        if finding.commits and finding.chunk not in healed and finding.key not in put_back:
            yield finding


# -- doing
# -------------------------------------------------------------------------------------------------------------------------


def _apply(action: Action, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
    storage = offline_store.storage
    match action:
        case WriteConfig():
            keep_copy(storage, CONFIG_KEY)
            storage.put(CONFIG_KEY, encode_config(action.config))
        case PutBack():
            _put_back(action.mended, offline_store)
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


def _put_back(mended: Mended, offline_store: OfflineStore) -> None:
    """An entry's name is never free, so that nobody takes it; a document is needed only as long as
    its commit is listed."""
    if mended.commit is None:
        keep_copy(offline_store.storage, mended.key)
    elif mended.commit not in _log(offline_store).state.commits:
        return
    else:
        quarantine(offline_store.storage, mended.key)
    offline_store.storage.put(mended.key, mended.data)


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
