"""What can be done about damage, and doing it: a plan made from fsck's facts, then applied step by step.

Three rules. Nothing is written that is not proved to be what was there, or to match its id; the one exception is a lost `ckptstore.json`,
and the plan says so. Nothing is deleted: what is replaced goes to `quarantine/`. The log only ever grows, as by any other writer; an entry
is put back only as the exact bytes that the rest of the log attests, so history never forks.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptstore.core.config import MIB, StoreConfig
from ckptstore.core.ids import CONFIG_KEY, ChunkId, CommitId, PackId, checkpoint_key, new_session_id, segment_key
from ckptstore.core.places import make_directories
from ckptstore.errors import CkptStoreError
from ckptstore.history import entries
from ckptstore.history.entries import Position
from ckptstore.history.log import Log
from ckptstore.history.sessions import open_session
from ckptstore.objects.backend import Backend
from ckptstore.objects.config import encode_config
from ckptstore.upkeep.chain import decode_at, read_small
from ckptstore.upkeep.findings import Finding, Kind, Level, Report, Severity, Share
from ckptstore.upkeep.fsck import Facts, examine
from ckptstore.upkeep.ground import Ground
from ckptstore.upkeep.inventory import keys_of
from ckptstore.upkeep.mend import Mended, mend_document, mend_entry
from ckptstore.upkeep.progress import Progress, silent
from ckptstore.upkeep.salvage import Donor, Source, find_sources, is_metadata, pack_numbers, pack_of_key, records, write_packs

DAMAGED_SETTING = "damaged"
"""The setting that names the commits which cannot be restored whole."""

QUARANTINE = "quarantine/"

ROUNDS = 3
"""A repaired log brings packs and commits to light, and those may need repair; then the marks follow."""


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Write `ckptstore.json` again. Unless `certain`, chunk size and codec are concluded: right for every commit there is."""

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
class CopyTwin:
    """Replace one of a pack's twins by the sound other one."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SavePacks:
    """Copy what verifies (`sources`) into new packs, register them, and take the packs `damaged` (by number) out of the log and aside.
    `lost` are chunks that commits need and nobody has."""

    damaged: tuple[tuple[int, PackId], ...]
    sources: tuple[Source, ...]
    lost: tuple[ChunkId, ...]


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
    hopeless: tuple[Finding, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was found, what was done (nothing in a dry run: then `plan` says what would be), and what fsck finds now."""

    before: Report
    plan: RepairPlan
    applied: tuple[Action, ...]
    after: Report


def repair(
    ground: Ground,
    *,
    mirrors: Sequence[Backend] = (),
    apply: bool = False,
    share: Share | None = None,
    progress: Progress = silent,
) -> Repaired:
    """Look for damage, plan, and with `apply` carry the plan out. With `share`, so much stored data is read and hashed first; packs in
    which an earlier fsck found damage are read in any case.

    Nobody needs to be kept out meanwhile. Raises `Conflict` if others changed what was to be repaired: repeat it.
    """
    facts = _look(ground, share, progress)
    before, plan = facts.report, plan_repair(facts, mirrors)
    first, applied = plan, list[Action]()
    for _ in range(ROUNDS if apply else 0):
        if not plan.actions:
            break
        for action in plan.actions:
            progress("repair", len(applied), len(applied) + len(plan.actions))
            _apply(action, facts.ground, mirrors)
            applied.append(action)
        if any(isinstance(action, WriteConfig) for action in plan.actions):
            ground = replace(ground, problem=None)
        facts = _look(ground, share, progress)
        plan = plan_repair(facts, mirrors)
    return Repaired(before, first, tuple(applied), facts.report)


def _look(ground: Ground, share: Share | None, progress: Progress) -> Facts:
    return examine(ground, level=Level.PACKS, share=share, suspects=True, progress=progress)


# -- deciding ----------------------------------------------------------------------------------------------------------------------


def plan_repair(facts: Facts, mirrors: Sequence[Backend]) -> RepairPlan:
    """What to do about `facts`. Reads the store and the mirrors, changes nothing."""
    actions: list[Action] = []
    if facts.ground.problem is not None:
        actions.append(WriteConfig(facts.ground.config, facts.ground.certain))
    mended, hopeless = _plan_log(facts, mirrors)
    actions += mended
    if facts.chain.bad:
        # Nothing can be appended to a broken log, and what it lists is not certain: first this, then the rest.
        return RepairPlan(tuple(actions), tuple(hopeless), more=bool(mended))
    for commit in _commits_without_document(facts.report):
        if document := mend_document(facts.ground.backend, commit, facts.chain.state.commits[commit], mirrors):
            actions.append(PutBack(document))
    actions += _plan_packs(facts, mirrors)
    actions += _plan_marks(facts, actions)
    if any(finding.severity is Severity.INDEX and finding.kind is not Kind.CHECKPOINT for finding in facts.report.findings):
        actions.append(Rebuild("the indexes say something else than the store"))
    return RepairPlan(tuple(actions), tuple(_hopeless(facts, actions)))


def _plan_log(facts: Facts, mirrors: Sequence[Backend]) -> tuple[list[Action], list[Finding]]:
    """What to put back, the last entry first: it says which one belongs before it, and a log with a gap is not appended to meanwhile."""
    actions: list[Action] = []
    hopeless = []
    findings = {finding.entry: finding for finding in facts.report.findings if finding.kind is Kind.ENTRY}
    copies = facts.ground.copies(bad.n for bad in facts.chain.bad)
    store, before = facts.ground.config.store, None
    for bad in reversed(facts.chain.bad):
        if before and before.n == bad.n:
            bad = replace(bad, wanted=bad.wanted or before)
        if mended := mend_entry(bad, store, facts.ground.backend, mirrors, copies.get(bad.n)):
            actions.append(PutBack(mended))
            entry = decode_at(bad.n, mended.data, store)
            before = Position(bad.n - 1, entry.prev_hash, entry.prev_bytes)
        else:
            hopeless.append(findings[bad.n])
    if not facts.chain.bad:
        actions += (SetAside(checkpoint_key(n), problem) for n, problem in facts.chain.bad_checkpoints)
        actions += (SetAside(segment_key(n), problem) for n, problem in facts.chain.bad_segments)
    return actions, hopeless


def _commits_without_document(report: Report) -> Iterator[CommitId]:
    return (finding.commits[0] for finding in report.findings if finding.kind is Kind.DOCUMENT)


def _plan_packs(facts: Facts, mirrors: Sequence[Backend]) -> Iterator[Action]:
    numbers = {pack.id: number for number, pack in facts.chain.state.packs.items()}
    damaged: set[PackId] = set()
    for name in sorted({finding.pack for finding in facts.report.findings if finding.pack is not None} & set(numbers)):
        pack = facts.chain.state.packs[numbers[name]]
        wrong = _wrong_objects(facts, name)
        sound = [key for key in keys_of(name, metadata=pack.metadata) if key not in wrong]
        if sound:
            yield from (CopyTwin(sound[0], key) for key in sorted(wrong))
        elif wrong:
            damaged.add(name)
    save = _save(facts, damaged, numbers, mirrors)
    if save.damaged or save.sources:
        yield save


def _wrong_objects(facts: Facts, name: PackId) -> set[str]:
    """The objects of a pack that are not as they should be; those that storage would not give are left alone."""
    kinds = (Kind.PACK, Kind.TWIN, Kind.CHUNK)
    return {finding.key for finding in facts.report.findings if finding.pack == name and finding.kind in kinds and finding.key}


def _save(facts: Facts, damaged: set[PackId], numbers: dict[PackId, int], mirrors: Sequence[Backend]) -> SavePacks:
    donors = [Donor(facts.ground.backend), *map(Donor, mirrors)]
    own = {chunk for key, table in donors[0].tables.items() if pack_of_key(key) in damaged for chunk in table["chunk"].tolist()}
    own |= {chunk for name in damaged & set(facts.tables) for chunk in facts.tables[name]["chunk"].tolist()}
    held = {chunk for name, table in facts.tables.items() if name not in damaged for chunk in table["chunk"].tolist()}
    bad = {chunk.entry.chunk for chunk in facts.bad}
    wanted = sorted(((own | bad) - held) | set(facts.missing))
    sources = find_sources(donors, wanted)
    lost = tuple(chunk for chunk in wanted if chunk not in sources and chunk in facts.needed)
    return SavePacks(tuple((numbers[name], name) for name in sorted(damaged)), tuple(sources[c] for c in wanted if c in sources), lost)


def _plan_marks(facts: Facts, actions: Sequence[Action]) -> Iterator[Action]:
    """Marks come when nothing else is left to do: only then it is known what stays damaged."""
    if actions:
        return
    marked = facts.chain.state.settings.get(DAMAGED_SETTING) or ()
    damaged = tuple(sorted(facts.report.damaged_commits))
    if damaged != marked:
        yield Mark(damaged)


def _hopeless(facts: Facts, actions: Sequence[Action]) -> Iterator[Finding]:
    """Findings that cost commits and that no action heals."""
    healed = {source.entry.chunk for action in actions if isinstance(action, SavePacks) for source in action.sources}
    put_back = {action.mended.key for action in actions if isinstance(action, PutBack)}
    for finding in facts.report.findings:
        if finding.commits and finding.chunk not in healed and finding.key not in put_back:
            yield finding


# -- doing -------------------------------------------------------------------------------------------------------------------------


def _apply(action: Action, ground: Ground, mirrors: Sequence[Backend]) -> None:
    backend = ground.backend
    match action:
        case WriteConfig():
            _keep_copy(backend, CONFIG_KEY)
            backend.put(CONFIG_KEY, encode_config(action.config))
        case PutBack():
            _keep_copy(backend, action.mended.key)
            backend.put(action.mended.key, action.mended.data)
        case SetAside():
            quarantine(backend, action.key)
        case CopyTwin():
            _copy(backend, action.source, action.target)
        case SavePacks():
            _save_packs(action, ground, mirrors)
        case Mark():
            setting = action.commits or None
            _log(ground).append(entries.Settings(((DAMAGED_SETTING, setting),)))
        case Rebuild():
            _drop_indexes(ground)


def _save_packs(action: SavePacks, ground: Ground, mirrors: Sequence[Backend]) -> None:
    """New packs first, then the log, then the damaged objects: a crash anywhere leaves the old state or the new."""
    donors = [Donor(ground.backend), *map(Donor, mirrors)]
    log = _log(ground)
    with open_session(ground.backend, "repair") as session:
        numbers = pack_numbers()
        closed = []
        for metadata in (False, True):
            part = [source for source in action.sources if is_metadata(source) is metadata]
            if part:
                closed += write_packs(donors, part, session.id, metadata=metadata, numbers=numbers)
        state = log.replay()
        condemned = frozenset(number for number, _ in action.damaged if number in state.packs and state.packs[number].live)
        if closed:
            log.append(entries.Register(session.id, state.n, state.fence, records(closed), condemned))
        elif condemned:
            log.append(entries.Condemn(state.n, state.fence, condemned, ()))
    if gone := frozenset(number for number, _ in action.damaged if number in log.state.packs):
        log.append(entries.Delete(gone))
    for number, name in action.damaged:
        for key in keys_of(name, metadata=state.packs[number].metadata):
            quarantine(ground.backend, key)


def _log(ground: Ground) -> Log:
    log = ground.open_log()
    log.replay()
    return log


def _drop_indexes(ground: Ground) -> None:
    from ckptstore.index.catalog import Catalog
    from ckptstore.index.chunks import ChunkIndex

    Catalog.open(ground.catalog_path, ground.config.store).reset()
    index = ChunkIndex.open(ground.chunks_path, ground.config.store)
    index.reset()
    index.close()


def quarantine(backend: Backend, key: str) -> None:
    """Move an object to `quarantine/`; an absent one is fine."""
    if backend.size(key) is None:
        return
    if backend.durable_root is None:
        _copy(backend, key, QUARANTINE + key)
        backend.delete(key)
        return
    target = backend.durable_root / QUARANTINE / key
    make_directories(target.parent)
    os.replace(backend.durable_root / key, target)
    backend.sync_dirs([key, QUARANTINE + key])


def _keep_copy(backend: Backend, key: str) -> None:
    """A copy in `quarantine/` of a small object that is about to be replaced: its name is never free in between."""
    data = read_small(backend, key)
    if data is not None:
        backend.put(QUARANTINE + key, data)


def _copy(backend: Backend, source: str, target: str) -> None:
    """Copy an object over another, in pieces, and put it in place at once."""
    size = backend.size(source) or 0
    writer = backend.create(target, session=new_session_id(), replace=True)
    try:
        for start in range(0, size, 8 * MIB):
            writer.append([memoryview(backend.read(source, start, min(start + 8 * MIB, size)))])
        writer.finish()
    except (CkptStoreError, OSError):
        writer.discard()
        raise
    backend.sync_dirs([target])
