"""Rescuing chunks of damaged packs: the packs that `repair` removes, and what it copies first.

A readable copy is removed only after another one is durable and listed. The chunks of a damaged
pack are all those that any of its footers names; without a footer, those in this host's chunk
index. Each is read wherever it may lie, and copied. A copy in another pack replaces that only if it
was read, too. If storage does not answer, the pack stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ckptstore.core.ids import ChunkId, PackId
from ckptstore.core.model import PackEntry
from ckptstore.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptstore.log import entries
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.maintenance.check.fsck import Facts
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.packs import UNKNOWN
from ckptstore.maintenance.check.report import Kind
from ckptstore.maintenance.repair.chunk_recovery import (
    ChunkSource,
    Source,
    find_sources,
    read_source,
    records,
    write_packs,
)
from ckptstore.maintenance.repair.quarantine import copy_object, quarantine
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA
from ckptstore.objects.pages import decode_page
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.chunk_reader import keys_of, read_chunk_at
from ckptstore.repository.footers import read_chunk
from ckptstore.storage.contract import Storage


@dataclass(frozen=True, slots=True)
class CopyTwin:
    """Replace a damaged twin of a pack by the sound one."""

    pack: PackId
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SavePacks:
    """Copy verified chunks (`sources`) into new packs, register them, and move the packs `damaged`
    (by number) out of the log into quarantine.

    `lost` are needed chunks without a readable copy. The plan is valid while no packs were
    condemned since entry `fence`.
    """

    damaged: tuple[tuple[int, PackId], ...]
    sources: tuple[Source, ...]
    lost: tuple[ChunkId, ...]
    fence: int


def plan_packs(facts: Facts, mirrors: Sequence[Storage]) -> list[CopyTwin | SavePacks]:
    """Plan the actions for damaged packs and chunks. Chunks come before twins, which may be
    their source."""
    return _Rescue(facts, mirrors).plan()


class _Rescue:
    """The state of one plan."""

    def __init__(self, facts: Facts, mirrors: Sequence[Storage]) -> None:
        self._facts, self._mirrors = facts, mirrors
        self._storage = facts.offline_store.storage
        state = facts.contents.state
        self._numbers = {pack.id: number for number, pack in state.packs.items()}
        self._wrong = {
            name: keys for name in self._numbers if (keys := _wrong_objects(facts, name))
        }

    @cached_property
    def _donors(self) -> list[ChunkSource]:
        places: dict[ChunkId, list[tuple[str, PackEntry]]] = {}
        for name, remembered in self._facts.remembered.items():
            for key in self._keys(name) if name in self._numbers else ():
                for entry in remembered:
                    places.setdefault(entry.chunk, []).append((key, entry))
        return [ChunkSource(self._storage, places), *map(ChunkSource, self._mirrors)]

    def plan(self) -> list[CopyTwin | SavePacks]:
        copies: list[CopyTwin | SavePacks] = []
        damaged: set[PackId] = set()
        for name in sorted(self._wrong):
            try:
                if self._has_sound_twin(name):
                    source = min(set(self._keys(name)) - self._wrong[name])
                    copies += (CopyTwin(name, source, key) for key in sorted(self._wrong[name]))
                else:
                    self._find(name)
                    damaged.add(name)
            except Unavailable:
                # The readable chunks are unknown: the pack stays as it is.
                continue
        save = self._save(damaged)
        return [*([save] if save.damaged or save.sources else []), *copies]

    def _has_sound_twin(self, name: PackId) -> bool:
        """Whether a sound twin of a damaged object reads completely and has all chunks that the
        pack is known to hold."""
        sound = sorted(set(self._keys(name)) - self._wrong[name])
        table = self._donors[0].tables.get(sound[0]) if sound else None
        if table is None or self._chunks_of(name) - set(map(ChunkId, table["chunk"].tolist())):
            return False
        return all(self._reads(sound[0], chunk) for chunk in self._chunks_of(name))

    def _reads(self, key: str, chunk: ChunkId) -> bool:
        entry = next(entry for where, entry in self._donors[0].entries_of(chunk) if where == key)
        try:
            read_chunk_at(self._storage, [key], entry)
        except (Corrupt, NotFound):
            return False
        return True

    def _save(self, damaged: set[PackId]) -> SavePacks:
        facts = self._facts
        bad = {chunk.entry.chunk for chunk in facts.bad} | {
            chunk for name in damaged for chunk in self._chunks_of(name)
        }
        wanted = sorted(
            {chunk for chunk in bad if not self._is_held(chunk, damaged)} | set(facts.missing)
        )
        sources: dict[ChunkId, Source] = {}
        for chunk in wanted:
            try:
                sources |= find_sources(self._donors, [chunk])
            except Unavailable:
                continue
        lost = tuple(chunk for chunk in wanted if chunk not in sources and chunk in facts.needed)
        saved = tuple(self._named(sources[chunk]) for chunk in wanted if chunk in sources)
        return SavePacks(
            tuple((self._numbers[name], name) for name in sorted(damaged)),
            saved,
            lost,
            facts.contents.state.fence,
        )

    def _find(self, name: PackId) -> None:
        """Raises `Unavailable` if storage did not return a chunk of the pack."""
        find_sources(self._donors, self._chunks_of(name))

    def _is_held(self, chunk: ChunkId, damaged: set[PackId]) -> bool:
        """Whether a live pack that stays has a readable copy."""
        packs = self._facts.contents.state.packs
        places = self._facts.contents.inventory.places(chunk)
        stay = [
            place
            for place in places
            if place.pack not in damaged and packs[self._numbers[place.pack]].live
        ]
        try:
            read_chunk(self._storage, stay)
        except (Corrupt, NotFound, Unavailable):
            return False
        return True

    def _chunks_of(self, name: PackId) -> set[ChunkId]:
        """Every chunk that the pack is known to hold, by either of its footers or by the chunk
        index."""
        tables = (
            self._donors[0].tables[key] for key in self._keys(name) if key in self._donors[0].tables
        )
        listed = {ChunkId(chunk) for table in tables for chunk in table["chunk"].tolist()}
        return listed | {entry.chunk for entry in self._facts.remembered.get(name, ())}

    def _keys(self, name: PackId) -> tuple[str, ...]:
        return keys_of(
            name, metadata=self._facts.contents.state.packs[self._numbers[name]].metadata
        )

    def _named(self, source: Source) -> Source:
        if source.entry.kind != UNKNOWN:
            return source
        return replace(
            source, entry=source.entry._replace(kind=_kind_of(read_source(self._donors, source)))
        )


def _wrong_objects(facts: Facts, name: PackId) -> set[str]:
    """The damaged objects of a pack; those that storage did not return are left alone."""
    kinds = (Kind.PACK, Kind.TWIN, Kind.CHUNK)
    return {
        finding.key
        for finding in facts.report.findings
        if finding.pack == name and finding.kind in kinds and finding.key
    }


def _kind_of(metadata: memoryview) -> int:
    for kind, decode in ((PAGE, decode_page), (SCHEMA, decode_schema)):
        try:
            decode(bytes(metadata))
            return kind
        except Corrupt:
            continue
    return LAYOUT


def copy_twin(action: CopyTwin, offline_store: OfflineStore, log: Log) -> None:
    """Move the damaged twin to quarantine, and copy the sound one to its place."""
    if any(pack.id == action.pack for pack in log.state.packs.values()):
        quarantine(offline_store.storage, action.target)
        copy_object(offline_store.storage, action.source, action.target)


def save_packs(
    action: SavePacks, offline_store: OfflineStore, log: Log, mirrors: Sequence[Storage]
) -> None:
    """New packs first, then the log, then the damaged objects: a crash anywhere leaves the old
    state or the new.

    Raises `Conflict` if others condemned packs that the plan relies on, or use the damaged ones:
    plan again.
    """
    donors = [ChunkSource(offline_store.storage), *map(ChunkSource, mirrors)]
    with open_session(offline_store.storage, "repair") as session:
        closed = write_packs(donors, action.sources, session.id)
        state = log.replay()
        if state.fence != action.fence:
            raise Conflict(
                f"entry {state.fence} of the log condemned packs while the store was repaired; "
                "repeat the repair"
            )
        metadata_of = {
            number: state.packs[number].metadata
            for number, name in action.damaged
            if _is_listed(log, number, name)
        }
        condemned = frozenset(number for number in metadata_of if state.packs[number].live)
        if closed:
            log.append(
                entries.Register(session.id, state.n, state.fence, records(closed), condemned)
            )
        elif condemned:
            log.append(entries.Condemn(state.n, state.fence, condemned, ()))
    gone = {
        number: name
        for number, name in action.damaged
        if number in metadata_of and _is_listed(log, number, name)
    }
    if gone:
        log.append(entries.Delete(frozenset(gone)))
    for number, name in gone.items():
        for key in keys_of(name, metadata=metadata_of[number]):
            quarantine(offline_store.storage, key)


def _is_listed(log: Log, number: int, name: PackId) -> bool:
    return number in log.state.packs and log.state.packs[number].id == name
