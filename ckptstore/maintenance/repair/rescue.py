"""Rescuing chunks of damaged packs: the packs that `repair` removes, and what it copies first.

A readable copy is removed only after another one is durable and listed. The chunks of a damaged
pack are all those that any of its footers names; without a footer, those in this host's chunk
index. Each is read wherever it may lie, and copied. A copy in another pack replaces that only if it
was read, too. If storage does not answer, the pack stays.

All possible sources of a chunk are tried: the damaged packs themselves, their twins, unlisted
packs, quarantined packs, and the packs of mirrors; then each of them with one bit flipped back.
None is trusted: a chunk counts only if its bytes match its id.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, PackId, SessionId, digest
from ckptstore.core.model import PackEntry
from ckptstore.core.text import count_text
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, NotFound, Unavailable
from ckptstore.log import entries
from ckptstore.log.log import Log
from ckptstore.log.sessions import open_session
from ckptstore.maintenance.check.fsck import Facts
from ckptstore.maintenance.check.indexes import UNKNOWN
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.report import Kind
from ckptstore.maintenance.repair.recover import (
    FLIP_BYTES_MAX,
    copy_object,
    flipped,
    quarantine,
)
from ckptstore.objects import codecs
from ckptstore.objects.pack import (
    LAYOUT,
    PAGE,
    SCHEMA,
    TENSOR,
    TRAILER_BYTES,
    FooterTable,
    parse_footer,
    parse_trailer,
)
from ckptstore.objects.pages import decode_page
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.chunk_reader import coalesce, keys_of, read_chunk_at
from ckptstore.repository.footers import Inventory, read_chunk, read_table_at
from ckptstore.repository.pack_writer import ClosedPack, PackSet
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

_PACK_FILE = re.compile(
    r"(quarantine/)?packs/[0-9a-f]{2}/([0-9a-f]{24}-[0-9]{1,7}-[0-9]{1,7})(\.2)?(~[0-9]+)?"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A location of a chunk: the object `key` of source number `donor`."""

    donor: int
    key: str
    entry: PackEntry


class ChunkSource:
    """A directory with packs: this store or a mirror. Its log and index are not read;
    `remembered` has locations, by chunk, that no footer may name any more."""

    def __init__(
        self,
        storage: Storage,
        remembered: Mapping[ChunkId, Sequence[tuple[str, PackEntry]]] | None = None,
    ) -> None:
        self.storage = storage
        self._remembered = remembered or {}

    @cached_property
    def tables(self) -> Mapping[str, FooterTable]:
        """The footers of all objects that look like packs, including twins and quarantined ones,
        by key; broken ones are left out."""
        tables = {}
        for prefix in ("packs/", "quarantine/packs/"):
            for key, _ in self.storage.list(prefix):
                try:
                    if _PACK_FILE.fullmatch(key):
                        tables[key] = _read_table(self.storage, key)
                except CkptStoreError:
                    continue
        return tables

    @cached_property
    def _inventory(self) -> Inventory:
        return Inventory({}, {key: (PackId(key), table) for key, table in self.tables.items()})

    def entries_of(self, chunk: ChunkId) -> Iterator[tuple[str, PackEntry]]:
        """The locations of `chunk` by the footers, and those remembered."""
        yield from ((place.keys[0], place.entry) for place in self._inventory.places(chunk))
        yield from self._remembered.get(chunk, ())


def find_source(donors: Sequence[ChunkSource], chunk: ChunkId) -> Source | None:
    """The first location of `chunk` whose bytes match, or else match with one bit flipped back.
    Source 0 is the store itself.

    Raises `Unavailable` if the chunk is found nowhere and one of its locations did not answer: it
    may not be lost.
    """
    unanswered: Unavailable | None = None
    damaged: list[Source] = []
    for number, donor in enumerate(donors):
        for key, entry in donor.entries_of(chunk):
            source = Source(number, key, entry)
            try:
                read_chunk_at(donor.storage, [key], entry)
                return source
            except Corrupt:
                damaged.append(source)
            except NotFound:
                continue
            except Unavailable as error:
                unanswered = error
    for source in damaged:
        with suppress(Corrupt, NotFound):
            read_source(donors, source)
            return source
    if unanswered is not None:
        raise unanswered
    return None


def read_source(donors: Sequence[ChunkSource], source: Source) -> memoryview:
    """The raw bytes of the chunk, verified, if need be with one bit flipped back; raises `Corrupt`,
    `NotFound` or `Unavailable`."""
    storage, key, entry = donors[source.donor].storage, source.key, source.entry
    try:
        return read_chunk_at(storage, [key], entry)
    except Corrupt:
        if entry.codec == codecs.RAW and entry.stored_bytes <= FLIP_BYTES_MAX:
            stored = storage.read(key, entry.offset, entry.offset + entry.stored_bytes)
            for data in flipped(stored):
                if digest(data) == entry.chunk:
                    return memoryview(data)
        raise


def _read_table(storage: Storage, key: str) -> FooterTable:
    """The footer of an object, if need be with one bit of its last bytes flipped back; raises
    `Corrupt`, `NotFound` or `Unavailable`."""
    try:
        return read_table_at(storage, key)
    except Corrupt:
        tail, size = storage.read_tail(key, FLIP_BYTES_MAX)
        nbytes = TRAILER_BYTES
        with suppress(Corrupt):  # otherwise the bit is in the trailer, and only that is tried
            nbytes += parse_trailer(tail[-TRAILER_BYTES:], size).footer_bytes
        if nbytes > len(tail):
            raise
        for data in flipped(tail[-nbytes:]):
            with suppress(Corrupt):
                trailer = parse_trailer(data[-TRAILER_BYTES:], size)
                footer = (tail[:-nbytes] + data)[-trailer.footer_bytes - TRAILER_BYTES :]
                return parse_footer(footer[:-TRAILER_BYTES], trailer)
        raise


def write_packs(
    donors: Sequence[ChunkSource], sources: Iterable[Source], session: SessionId
) -> list[ClosedPack]:
    """Copy chunks into new packs of `session`, durable on return and not yet listed by the log.
    A failure leaves nothing behind."""
    storage, threads = donors[0].storage, ThreadPool(1)
    packs = PackSet(storage, session, threads, codec=codecs.RAW)
    pack_writer = packs.pack_writer()
    ordered = sorted(sources, key=lambda s: (s.donor, s.key, s.entry.offset))
    try:
        for metadata in (False, True):
            part = [source for source in ordered if (source.entry.kind != TENSOR) is metadata]
            pack_writer = packs.pack_writer(metadata=metadata)
            for run in _runs(part):
                raws = [read_source(donors, source) for source in run]
                first = run[0].entry
                pack_writer.add(
                    [source.entry.chunk for source in run],
                    raws,
                    first.width,
                    first.kind,
                    codec=first.codec,
                    run_bytes=sum(map(len, raws)),
                )
                pack_writer.flush()
            packs.close(pack_writer)
        packs.wait()
    except BaseException:
        pack_writer.discard()
        packs.drop()
        raise
    finally:
        threads.close()
    return packs.closed


def _runs(sources: Sequence[Source]) -> Iterator[Sequence[Source]]:
    """Group ordered sources that are adjacent in one object, so that they stay together. A group
    has one codec, width and kind."""
    entries = [source.entry for source in sources]
    for some in coalesce(
        [entry.offset for entry in entries],
        [entry.offset + entry.stored_bytes for entry in entries],
        objects=[(s.donor, s.key, s.entry[4:7]) for s in sources],
        limit_bytes=RUN_BYTES,
    ):
        yield sources[some]


@dataclass(frozen=True, slots=True)
class CopyTwin:
    """Replace a damaged twin of a pack by the sound one."""

    pack: PackId
    source: str
    target: str

    def __str__(self) -> str:
        return f"copy {self.source} to {self.target}"

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        """Move the damaged twin to quarantine, and copy the sound one to its place."""
        packs = offline_store.open_log().replay().packs.values()
        if any(pack.id == self.pack for pack in packs):
            quarantine(offline_store.storage, self.target)
            copy_object(offline_store.storage, self.source, self.target)


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

    def __str__(self) -> str:
        text = f"write {count_text(len(self.sources), 'verified chunk')} into new packs"
        if self.damaged:
            text += f", and move {', '.join(name for _, name in self.damaged)} to quarantine/"
        if self.lost:
            lost = count_text(len(self.lost), "chunk")
            text += f"; {lost} that commits need could not be found"
        return text

    def apply(self, offline_store: OfflineStore, mirrors: Sequence[Storage]) -> None:
        """New packs first, then the log, then the damaged objects: a crash anywhere leaves the old
        state or the new.

        Raises `Conflict` if others condemned packs that the plan relies on, or use the damaged
        ones: plan again.
        """
        storage, log = offline_store.storage, offline_store.open_log()
        donors = [ChunkSource(storage), *map(ChunkSource, mirrors)]
        with open_session(storage, "repair") as session:
            closed = write_packs(donors, self.sources, session.id)
            state = log.replay()
            if state.fence != self.fence:
                raise Conflict(
                    f"entry {state.fence} of the log condemned packs while the store was repaired; "
                    "repeat the repair"
                )
            metadata = {n: state.packs[n].metadata for n, _ in self._listed(log)}
            condemned = frozenset(n for n in metadata if state.packs[n].live)
            if closed:
                records = tuple(pack.record for pack in closed)
                log.append(entries.Register(session.id, state.n, state.fence, records, condemned))
            elif condemned:
                log.append(entries.Condemn(state.n, state.fence, condemned, ()))
        gone = [(n, name) for n, name in self._listed(log) if n in metadata]
        if gone:
            log.append(entries.Delete(frozenset(n for n, _ in gone)))
        for n, name in gone:
            for key in keys_of(name, metadata=metadata[n]):
                quarantine(storage, key)

    def _listed(self, log: Log) -> list[tuple[int, PackId]]:
        packs = log.state.packs
        return [(n, name) for n, name in self.damaged if n in packs and packs[n].id == name]


def plan_packs(facts: Facts, mirrors: Sequence[Storage]) -> list[CopyTwin | SavePacks]:
    """Plan the actions for damaged packs and chunks. Chunks come before twins, which may be
    their source."""
    return _Rescue(facts, mirrors).plan()


class _Rescue:
    """The state of one plan."""

    def __init__(self, facts: Facts, mirrors: Sequence[Storage]) -> None:
        self._facts, self._storage = facts, facts.offline_store.storage
        self._packs = facts.contents.state.packs
        self._numbers = {pack.id: number for number, pack in self._packs.items()}
        places: dict[ChunkId, list[tuple[str, PackEntry]]] = {}
        for name, remembered in facts.remembered.items():
            for key in self._keys(name) if name in self._numbers else ():
                for entry in remembered:
                    places.setdefault(entry.chunk, []).append((key, entry))
        self._donors = [ChunkSource(self._storage, places), *map(ChunkSource, mirrors)]

    def plan(self) -> list[CopyTwin | SavePacks]:
        copies: list[CopyTwin | SavePacks] = []
        damaged: set[PackId] = set()
        for name in sorted(self._numbers):
            if not (wrong := self._wrong_objects(name)):
                continue
            try:
                if sound := self._sound_twin(name, wrong):
                    copies += (CopyTwin(name, sound, key) for key in sorted(wrong))
                else:
                    for chunk in self._chunks_of(name):
                        find_source(self._donors, chunk)
                    damaged.add(name)
            except Unavailable:
                # The readable chunks are unknown: the pack stays as it is.
                continue
        save = self._save(damaged)
        return [*([save] if save.damaged or save.sources else []), *copies]

    def _wrong_objects(self, name: PackId) -> set[str]:
        """The damaged objects of a pack; those that storage did not return are left alone."""
        kinds = (Kind.PACK, Kind.TWIN, Kind.CHUNK)
        return {
            finding.key
            for finding in self._facts.report.findings
            if finding.pack == name and finding.kind in kinds and finding.key
        }

    def _sound_twin(self, name: PackId, wrong: set[str]) -> str:
        """The twin of a damaged object that reads completely and has all chunks that the pack is
        known to hold, or an empty text."""
        sound, wanted = min(set(self._keys(name)) - wrong, default=""), self._chunks_of(name)
        table = self._donors[0].tables.get(sound)
        if table is None or wanted - set(map(ChunkId, table["chunk"].tolist())):
            return ""
        try:
            read_table_at(self._storage, sound)  # as it is stored, no bit flipped back
            for chunk in wanted:
                places = self._donors[0].entries_of(chunk)
                read_chunk_at(self._storage, [sound], next(e for key, e in places if key == sound))
        except (Corrupt, NotFound):
            return ""
        return sound

    def _save(self, damaged: set[PackId]) -> SavePacks:
        facts = self._facts
        bad = {chunk.entry.chunk for chunk in facts.bad}
        bad.update(chunk for name in damaged for chunk in self._chunks_of(name))
        wanted = {chunk for chunk in bad if not self._is_held(chunk, damaged)} | facts.missing
        sources, lost = list[Source](), list[ChunkId]()
        for chunk in sorted(wanted):
            try:
                source = find_source(self._donors, chunk)
            except Unavailable:
                source = None
            if source is not None:
                sources.append(self._named(source))
            elif chunk in facts.needed:
                lost.append(chunk)
        gone = tuple((self._numbers[name], name) for name in sorted(damaged))
        return SavePacks(gone, tuple(sources), tuple(lost), facts.contents.state.fence)

    def _is_held(self, chunk: ChunkId, damaged: set[PackId]) -> bool:
        """Whether a live pack that stays has a readable copy."""
        stay = [
            place
            for place in self._facts.contents.inventory.places(chunk)
            if place.pack not in damaged and self._packs[self._numbers[place.pack]].live
        ]
        try:
            read_chunk(self._storage, stay)
        except CkptStoreError:
            return False
        return True

    def _chunks_of(self, name: PackId) -> set[ChunkId]:
        """Every chunk that the pack is known to hold, by either of its footers or by the chunk
        index."""
        tables = self._donors[0].tables
        listed = {
            ChunkId(chunk)
            for key in self._keys(name)
            if key in tables
            for chunk in tables[key]["chunk"].tolist()
        }
        return listed | {entry.chunk for entry in self._facts.remembered.get(name, ())}

    def _keys(self, name: PackId) -> tuple[str, ...]:
        return keys_of(name, metadata=self._packs[self._numbers[name]].metadata)

    def _named(self, source: Source) -> Source:
        """`source` with the kind of its chunk, which the chunk index does not know."""
        if source.entry.kind != UNKNOWN:
            return source
        data, found = bytes(read_source(self._donors, source)), LAYOUT
        for kind, decode in ((PAGE, decode_page), (SCHEMA, decode_schema)):
            try:
                decode(data)
                found = kind
                break
            except Corrupt:
                continue
        return replace(source, entry=source.entry._replace(kind=found))
