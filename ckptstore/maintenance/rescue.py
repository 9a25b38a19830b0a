"""Rescuing chunks of damaged packs: the packs that `repair` removes, and what it copies first.

A readable copy is removed only after another one is durable and listed. The chunks of a damaged
pack are all those that any of its footers names; without a footer, those in this host's chunk
index. Each is read wherever it may lie, and copied. A copy in another pack replaces that only if it
was read, too. If storage does not answer, the pack stays.

All possible sources of a chunk are tried: the damaged packs themselves, their twins, unlisted
packs, quarantined packs, and the packs of mirrors; then each of them with one bit flipped back.
None is trusted: a chunk counts only if its bytes match its id.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.forks import cached_property
from ckptstore.core.ids import ChunkId, PackId, SessionId, digest, new_session_id
from ckptstore.core.model import PackEntry
from ckptstore.core.text import count_text
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, NoSpace, NotFound, Unavailable
from ckptstore.log import entries
from ckptstore.log.log import Refused
from ckptstore.log.sessions import open_session
from ckptstore.maintenance.check import Kind
from ckptstore.maintenance.check.fsck import Facts
from ckptstore.maintenance.check.indexes import UNKNOWN
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.objects import codecs, patches
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
from ckptstore.repository.chunk_reader import (
    coalesce,
    keys_of,
    read_chunk_at,
    stored_patch_at,
    verify_at,
)
from ckptstore.repository.footers import Inventory, Table, read_table_at, verify_any
from ckptstore.repository.pack_writer import NewPatch, PackSet, new_chunk
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage
from ckptstore.storage.local_files import Directories, give_name

FLIP_BYTES_MAX = 16384
"""Larger objects are not tried bit by bit: it would take minutes."""

_PACK_FILE = re.compile(
    r"(quarantine/)?packs/[0-9a-f]{2}/([0-9a-f]{24}-[0-9]{1,7}-[0-9]{1,7})(\.2)?(~[0-9]+)?"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A location of a chunk: the object `key` of `storage`. That of a patch with the locations of
    its bases, `below`, stands for the whole chunk."""

    storage: Storage
    key: str
    entry: PackEntry
    below: "tuple[Source, ...]" = ()

    def is_patch(self) -> bool:
        return self.entry.codec == codecs.PATCH and not self.below

    @property
    def codec(self) -> int:
        """The codec to write the chunk with."""
        return codecs.RAW if self.below else self.entry.codec


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

    @property
    def tables(self) -> Mapping[str, FooterTable]:
        """The footers of all objects that look like packs, including twins and quarantined ones,
        by key; broken ones are left out."""
        return self._footers[0]

    @property
    def unanswered(self) -> Unavailable | None:
        """The error of a footer that storage did not return, if there is such a one."""
        return self._footers[1]

    @cached_property
    def _footers(self) -> tuple[Mapping[str, FooterTable], Unavailable | None]:
        tables: dict[str, FooterTable] = {}
        unanswered = None
        for prefix in ("packs/", "quarantine/packs/"):
            for key, _ in self.storage.list(prefix):
                try:
                    if _PACK_FILE.fullmatch(key):
                        tables[key] = _read_table(self.storage, key)
                except Unavailable as error:
                    unanswered = error
                except (Corrupt, NotFound):
                    continue
        return tables, unanswered

    @cached_property
    def _inventory(self) -> Inventory:
        return Inventory(Table(PackId(key), (key,), rows) for key, rows in self.tables.items())

    def places(self, chunk: ChunkId) -> Iterator[Source]:
        """The locations of `chunk` by the footers, and those remembered."""
        for place in self._inventory.places(chunk):
            yield Source(self.storage, place.keys[0], place.entry)
        for key, entry in self._remembered.get(chunk, ()):
            yield Source(self.storage, key, entry)


def find_source(donors: Sequence[ChunkSource], chunk: ChunkId) -> Source | None:
    """The first location of `chunk` whose bytes match, or else match with one bit flipped back.

    Raises `Unavailable` if the chunk is found nowhere, and one of its locations or any footer did
    not answer: it may not be lost.
    """
    unanswered: Unavailable | None = None
    damaged: list[Source] = []
    for source in _places(donors, chunk):
        try:
            verify_at(source.storage, [source.key], source.entry)
            return source
        except Corrupt:
            damaged.append(source)
        except NotFound:
            continue
        except Unavailable as error:
            unanswered = error
    for source in damaged:
        with suppress(Corrupt, NotFound):
            read_patch(source) if source.is_patch() else read_source(source)
            return source
    unanswered = unanswered or next(filter(None, (donor.unanswered for donor in donors)), None)
    if unanswered is not None:
        raise unanswered
    return None


def find_whole(donors: Sequence[ChunkSource], chunk: ChunkId, tried: set[ChunkId]) -> Source | None:
    """A location of the bytes of `chunk`, or of a patch whose bases are found so: a mirror may have
    made its patch of another base than the store. `tried` are chunks that were looked for.

    Raises `Unavailable` as `find_source`.
    """
    tried.add(chunk)
    for source in _places(donors, chunk):
        with suppress(Corrupt, NotFound):
            if source.is_patch():
                bases = read_patch(source).bases
                below = [find_whole(donors, b, tried) for b in bases if b not in tried]
                if len(found := [each for each in below if each]) < len(bases):
                    continue
                source = replace(source, below=tuple(found))
            read_source(source)
            return source
    if unanswered := next(filter(None, (donor.unanswered for donor in donors)), None):
        raise unanswered
    return None


def _places(donors: Sequence[ChunkSource], chunk: ChunkId) -> list[Source]:
    """Those of `chunk`, a whole one first: it needs no other."""
    places = [source for donor in donors for source in donor.places(chunk)]
    return sorted(places, key=lambda place: place.entry.depth)


def read_patch(source: Source) -> NewPatch:
    """The patch at a location, verified by its own checksum, if need be with one bit flipped back;
    raises `Corrupt`, `NotFound` or `Unavailable`."""
    storage, key, entry = source.storage, source.key, source.entry
    try:
        stored = bytes(stored_patch_at(storage, [key], entry).stored)
    except Corrupt:
        damaged = storage.read(key, entry.offset, entry.offset + entry.stored_bytes)
        mended = next((data for data in flipped(damaged) if _is_patch(data)), None)
        if mended is None:
            raise
        stored = mended
    bases = patches.head_of(stored).bases
    return NewPatch(entry.chunk, entry.checksum, entry.raw_bytes, entry.width, bases, stored)


def _is_patch(stored: bytes) -> bool:
    try:
        patches.head_of(stored)
    except Corrupt:
        return False
    return True


def read_source(source: Source) -> memoryview:
    """The raw bytes of a chunk that is no patch, verified, if need be with one bit flipped back;
    raises `Corrupt`, `NotFound` or `Unavailable`."""
    storage, key, entry = source.storage, source.key, source.entry
    if source.below:
        stored = read_patch(replace(source, below=())).stored
        bases = list(map(read_source, source.below))
        made = patches.made_of(stored, entry.width, entry.raw_bytes, bases)
        if digest(made) != entry.chunk:
            raise Corrupt(f"chunk {entry.chunk.hex()[:12]} in {key} is not what its patch makes")
        return made
    try:
        return read_chunk_at(storage, [key], entry)
    except Corrupt:
        if entry.codec == codecs.RAW and entry.stored_bytes <= FLIP_BYTES_MAX:
            stored = storage.read(key, entry.offset, entry.offset + entry.stored_bytes)
            mended = _mended(bytes(stored or b""), entry.chunk)
            if mended is not None:
                return memoryview(mended)
        raise


@lru_cache(maxsize=64)
def _mended(stored: bytes, chunk: ChunkId) -> bytes | None:
    """`stored` with the one bit flipped back that makes it `chunk`, if there is one. Each round of
    a repair asks again for what stays damaged, and the search takes a digest for each bit."""
    return next((data for data in flipped(stored) if digest(data) == chunk), None)


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


def write_packs(storage: Storage, sources: Iterable[Source], session: SessionId) -> PackSet:
    """Copy chunks into new packs of `session` in `storage`, durable on return and not yet listed by
    the log: whoever lists none of them drops them. A failure leaves nothing behind."""
    threads = ThreadPool(1)
    packs = PackSet(storage, session, threads, codec=codecs.RAW)
    ordered = sorted(sources, key=lambda each: (each.storage.url, each.key, each.entry.offset))
    try:
        for metadata in (False, True):
            some = [source for source in ordered if (source.entry.kind != TENSOR) == metadata]
            with packs.writing(metadata=metadata) as writer:
                for run in _runs(some):
                    if run[0].is_patch():
                        writer.add_patches(list(map(read_patch, run)))
                        writer.flush()
                        continue
                    chunks = [new_chunk(each.entry.chunk, read_source(each)) for each in run]
                    first, nbytes = run[0].entry, sum(len(chunk.raw) for chunk in chunks)
                    codec = run[0].codec
                    writer.add(chunks, first.width, first.kind, codec=codec, run_bytes=nbytes)
                    writer.flush()
        packs.wait()
    except BaseException:
        packs.drop()
        raise
    finally:
        threads.close()
    return packs


def _runs(sources: Sequence[Source]) -> Iterator[Sequence[Source]]:
    """Group ordered sources that are adjacent in one object, so that they stay together. A group
    has one codec, width and kind."""
    entries = [source.entry for source in sources]
    for some in coalesce(
        [entry.offset for entry in entries],
        [entry.offset + entry.stored_bytes for entry in entries],
        objects=[
            # A patch that is made whole takes much more memory than its bytes.
            (each.storage.url, each.key, each.codec, each.entry.width, each.entry.kind)
            + ((each.entry.chunk,) if each.below else ())
            for each in sources
        ],
        limit_bytes=RUN_BYTES,
    ):
        yield sources[some]


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

    def apply(self, offline_store: OfflineStore) -> None:
        """New packs first, then the log, then the damaged objects: a crash anywhere leaves the old
        state or the new.

        Raises `Conflict` if others condemned packs that the plan relies on, or use the damaged
        ones: plan again.
        """
        storage, log = offline_store.storage, offline_store.open_log()
        with open_session(storage, "repair") as session:
            packs = write_packs(storage, self.sources, session.id)
            state = log.replay()
            if state.fence != self.fence:
                packs.drop()
                raise Conflict(
                    f"entry {state.fence} of the log condemned packs while the store was repaired; "
                    "repeat the repair"
                )
            damaged = {n: state.packs[n] for n, _ in self.damaged if n in state.packs}
            condemned = frozenset(n for n, pack in damaged.items() if pack.live)
            now, records = (state.n, state.fence), tuple(pack.record for pack in packs.closed)
            try:
                if records:
                    log.append(entries.Register(session.id, *now, records, condemned))
                elif condemned:
                    log.append(entries.Condemn(*now, condemned, ()))
            except (Refused, NoSpace):  # after any other error the entry may be there
                packs.drop()
                raise
        gone = frozenset(damaged.keys() & set(log.state.packs))
        if gone:
            log.append(entries.Delete(gone))
        for n in gone:
            for key in keys_of(damaged[n]):
                quarantine(storage, key)


def plan_rescue(facts: Facts, mirrors: Sequence[Storage]) -> SavePacks:
    """Plan to save the chunks of damaged packs, and missing ones; an empty plan without damage."""
    return _Rescue(facts, mirrors).plan()


class _Rescue:
    """The state of one plan."""

    def __init__(self, facts: Facts, mirrors: Sequence[Storage]) -> None:
        self._facts = facts
        self._packs = {pack.id: (n, pack) for n, pack in facts.contents.state.packs.items()}
        places: dict[ChunkId, list[tuple[str, PackEntry]]] = {}
        for name, remembered in facts.remembered.items():
            for key in self._keys(name) if name in self._packs else ():
                for entry in remembered:
                    places.setdefault(entry.chunk, []).append((key, entry))
        storage = facts.offline_store.storage
        self._donors = [ChunkSource(storage, places), *map(ChunkSource, mirrors)]

    def plan(self) -> SavePacks:
        facts = self._facts
        damaged: set[PackId] = set()
        found: dict[ChunkId, Source | None] = {}
        for name in self._suspects():
            # Without an answer the readable chunks are unknown: the pack stays as it is.
            with suppress(Unavailable):
                found |= {
                    chunk: find_source(self._donors, chunk) for chunk in self._chunks_of(name)
                }
                damaged.add(name)
        bad = {chunk.entry.chunk for chunk in facts.bad} | found.keys()
        wanted = {chunk for chunk in bad if not self._is_held(chunk, damaged)} | facts.missing
        for chunk in wanted - found.keys():
            with suppress(Unavailable):
                found[chunk] = find_source(self._donors, chunk)
        found = self._with_bases(found, damaged)
        wanted |= found.keys() - bad
        lacking = {chunk for chunk in wanted if found.get(chunk) is None}
        instead, lost = self._instead_of(lacking)
        sources = [source for chunk in sorted(wanted) if (source := found.get(chunk))]
        sources += [source for _, source in sorted(instead.items())]
        return SavePacks(
            tuple((self._packs[name][0], name) for name in sorted(damaged)),
            tuple(map(self._named, sources)),
            tuple(sorted(lost)),
            facts.contents.state.fence,
        )

    def _instead_of(self, lacking: set[ChunkId]) -> tuple[dict[ChunkId, Source], set[ChunkId]]:
        """Whole copies of chunks that commits name and that are patches of some that are nowhere;
        and those of `lacking` that are lost, because a commit needs them all the same."""
        contents = self._facts.contents
        needed_by = contents.dependents(lacking)
        instead: dict[ChunkId, Source] = {}
        lost = set[ChunkId]()
        users = contents.named(needed_by.keys())
        # Others are patches of those that are made of least.
        for user in sorted(users, key=lambda each: len(self._made_of(each, lacking))):
            needed = self._made_of(user, lacking | instead.keys()) - instead.keys()
            if lacking.isdisjoint(needed):
                continue
            with suppress(Unavailable):
                if source := find_whole(self._donors, user, set()):
                    instead[user] = source
                    continue
            lost.update(needed_by[user])
        return instead, lost & self._facts.needed

    def _made_of(self, chunk: ChunkId, stop: Set[ChunkId]) -> set[ChunkId]:
        """A chunk, and what it is a patch of, up to those of `stop`."""
        found, left, bases = set[ChunkId](), [chunk], self._facts.contents.bases
        while left:
            if (at := left.pop()) not in found:
                found.add(at)
                left += bases.get(at, ()) if at not in stop else ()
        return found

    def _suspects(self) -> set[PackId]:
        """The listed packs with damage; those that storage did not return are left alone."""
        kinds = (Kind.PACK, Kind.TWIN, Kind.CHUNK)  # what was unread has no key
        return {
            finding.pack
            for finding in self._facts.report.findings
            if finding.pack in self._packs and finding.kind in kinds and finding.key
        }

    def _is_held(self, chunk: ChunkId, damaged: set[PackId]) -> bool:
        """Whether a live pack that stays has a readable copy."""
        stay = [
            place
            for place in self._facts.contents.inventory.places(chunk)
            if place.pack not in damaged and self._packs[place.pack][1].live
        ]
        try:
            verify_any(self._donors[0].storage, stay)
        except CkptStoreError:
            return False
        return True

    def _with_bases(
        self, found: dict[ChunkId, Source | None], damaged: set[PackId]
    ) -> dict[ChunkId, Source | None]:
        """What was found, with the bases that patches among it need and no pack that stays has. A
        patch without its base is not found."""
        found, left = dict(found), list(found.values())
        bases: dict[ChunkId, tuple[ChunkId, ...]] = {}
        while left:
            source = left.pop()
            if source is None or not source.is_patch():
                continue
            bases[source.entry.chunk] = read_patch(source).bases
            for base in bases[source.entry.chunk]:
                if base not in found and not self._is_held(base, damaged):
                    found[base] = None
                    with suppress(Unavailable):
                        found[base] = find_source(self._donors, base)
                    left.append(found[base])
        lost = {chunk for chunk, source in found.items() if source is None}
        users: dict[ChunkId, list[ChunkId]] = {}
        for chunk, its in bases.items():
            for base in its:
                users.setdefault(base, []).append(chunk)
        spread = list(lost)
        while spread:
            for user in users.get(spread.pop(), ()):
                if found[user] is not None:
                    found[user] = None
                    spread.append(user)
        return found

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
        return keys_of(self._packs[name][1])

    def _named(self, source: Source) -> Source:
        """`source` with the kind of its chunk, which the chunk index does not know."""
        if source.entry.kind != UNKNOWN:
            return source
        data, found = bytes(read_source(source)), LAYOUT
        for kind, decode in ((PAGE, decode_page), (SCHEMA, decode_schema)):
            try:
                decode(data)
                found = kind
                break
            except Corrupt:
                continue
        return replace(source, entry=source.entry._replace(kind=found))


def flipped(data: bytes | None) -> Iterator[bytes]:
    """`data` with each of its bits flipped; nothing for more than `FLIP_BYTES_MAX`."""
    candidate = bytearray(data if data is not None and len(data) <= FLIP_BYTES_MAX else b"")
    for i in range(len(candidate)):
        for bit in range(8):
            candidate[i] ^= 1 << bit
            yield bytes(candidate)
            candidate[i] ^= 1 << bit


def quarantine(storage: Storage, key: str) -> None:
    """Move an object to `quarantine/`, where it is durable before the original is removed; an
    absent one is ignored."""
    if storage.size(key) is None:
        return
    with suppress(NotFound):  # a gc has deleted it meanwhile
        storage.sync_dirs([_keep(storage, key)])
    storage.delete(key)
    storage.sync_dirs([key])


def replace_object(storage: Storage, key: str, data: bytes) -> None:
    """Write an object after keeping the old one in `quarantine/`. Its name is never free in
    between: a writer could take it, and what ends here leaves the bytes that the next repair
    needs."""
    if storage.size(key) is not None:
        with suppress(NotFound):
            storage.sync_dirs([_keep(storage, key)])
    storage.put(key, data)


def copy_object(storage: Storage, source: str, target: str) -> None:
    """Copy an object in pieces to an unused name, and put it in place atomically. Raises `NotFound`
    for an absent one."""
    if (size := storage.size(source)) is None:
        raise NotFound(f"there is no {source} in {storage.url}")
    writer = storage.create(target, session=new_session_id())
    try:
        for start in range(0, size, 8 * MIB):
            writer.append([memoryview(storage.read(source, start, min(start + 8 * MIB, size)))])
        writer.finish()
    except (CkptStoreError, OSError):
        writer.discard()
        raise
    storage.sync_dirs([target])


def _keep(storage: Storage, key: str) -> str:
    """Give an object a second name in `quarantine/`, or copy it if storage has no second names."""
    names = _free_names(storage, key)
    if (root := storage.capabilities.local_root) is None:
        copy_object(storage, key, name := next(names))
        return name
    directories = Directories(str(root), fsync=False)
    for name in names:
        try:
            directories.having(name, partial(give_name, str(root), key, name))
        except FileExistsError:
            continue
        except OSError:
            copy_object(storage, key, name)
        return name
    raise AssertionError("an unused name always exists")


def _free_names(storage: Storage, key: str) -> Iterator[str]:
    for n in itertools.count():
        name = f"quarantine/{key}~{n}" if n else f"quarantine/{key}"
        if storage.size(name) is None:
            yield name
