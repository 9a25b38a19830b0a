"""How are the chunks of a group coded into packs?

A strip of places at a time: the bases first, then what each commit has in their places, so that a
reader of one commit finds runs. Bases and the differences from them lie in one pack, which needs no
other. A chunk that does not shrink by 5 % stays where it is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ckptstore.core.ids import ChunkId, checksum
from ckptstore.core.model import NO_BASE, PackEntry
from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.log.log import Log
from ckptstore.log.state import Pack
from ckptstore.maintenance import Stores
from ckptstore.maintenance.compact.plan import ChunkSlot, choose_base
from ckptstore.maintenance.gc.mark import Keys, short_keys
from ckptstore.maintenance.mover import Writing, Written, fill, memory_for, packs_of
from ckptstore.objects import codecs
from ckptstore.objects.frames import Stored
from ckptstore.objects.pack import TENSOR, FooterTable
from ckptstore.repository import footers
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.pack_writer import OpenPack, PackWriter
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch, ThreadPool, shared

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORTH = 0.95
"""A chunk is stored anew if that takes at most this share of what it takes now, and as a difference
if that takes at most this share of what its planes take."""

SAMPLED_BYTES = 256 << 20
SAMPLED_PLACES = 8
"""After so many bytes, an estimate reads one place of so many."""


class Chunk(NamedTuple):
    """A chunk to code: its commit's number in the group, that of its leaf, how it is stored now,
    and the checksum of its raw bytes, which every copy of it has."""

    member: int
    id: ChunkId
    leaf: int
    stored_bytes: int
    checksum: bytes
    raw_bytes: int
    width: int


@dataclass(slots=True)
class Coded:
    """What was done, or would be: of `raw_bytes` of chunks that took `stored_bytes`, what they
    take after coding. `deltas` are those of the `chunks` that became differences."""

    chunks: float = 0
    deltas: float = 0
    raw_bytes: float = 0
    stored_bytes: float = 0
    coded_bytes: float = 0
    problems: list[str] = field(default_factory=list)

    def add(self, chunk: Chunk, coded_bytes: float, *, delta: bool, times: float = 1) -> None:
        self.chunks += times
        self.deltas += times * delta
        self.raw_bytes += chunk.raw_bytes * times
        self.stored_bytes += chunk.stored_bytes * times
        self.coded_bytes += coded_bytes * times

    @classmethod
    def total(cls, parts: "Iterable[Coded]") -> "Coded":
        """All of `parts` together."""
        found = cls()
        for part, name in product(parts, [each.name for each in fields(cls)]):
            setattr(found, name, getattr(found, name) + getattr(part, name))
        return found


class Candidates:
    """Which chunks may be coded: those that are stored whole, of which no difference was made, that
    no newest commit needs (`kept`), and that this run has not looked at since its last entry."""

    def __init__(self, objects: ObjectStore, log: Log, kept: Keys) -> None:
        self._objects, self._log, self._kept = objects, log, kept
        self._bases: dict[int, NDArray[np.uint64] | None] = {}
        """By pack, the offsets of what is a base; None if that is unknown."""
        self.done: set[ChunkId] = set()

    def foresee(self, ids: bytes) -> None:
        """Look for the bases in the packs of chunks, of which a bucket is asked for several at
        once; without this, `of` asks for one after the other."""
        numbers = set(np.unique(self._objects.located(ids)["pack"]).tolist())
        new = self._objects.listed(numbers - self._bases.keys())
        number_of = {pack.id: number for number, pack in new.items()}
        for pack, table in footers.load_tables(self._objects.storage, list(new.values())):
            if not isinstance(table, CkptStoreError):
                self._bases[number_of[pack.id]] = _bases_in(table)

    def of(self, strip: Sequence[ChunkSlot]) -> list[list[Chunk]]:
        """The different chunks to code of each place, by commit; as long and wide as the first."""
        ids = list(dict.fromkeys(chunk for place in strip for _, chunk in place.chunks))
        joined = b"".join(ids)
        where = self._objects.located(joined)
        fixed = np.isin(short_keys(joined), self._kept) | self._is_fixed(where)
        free = {
            chunk: row
            for chunk, *row in where[["chunk", "stored", "checksum", "raw", "width"]][
                ~fixed
            ].tolist()
            if chunk not in self.done
        }
        found = []
        for place in strip:
            first = {chunk: n for n, chunk in reversed(place.chunks) if chunk in free}
            chunks = sorted(Chunk(n, each, place.leaf, *free[each]) for each, n in first.items())
            found.append([each for each in chunks if each[5:] == chunks[0][5:]])
            for chunk in first:
                free.pop(chunk)
        return [chunks for chunks in found if chunks]

    def _is_fixed(self, where: "NDArray[np.void]") -> "NDArray[np.bool_]":
        """Which chunks are differences, patches, or the bases of differences."""
        fixed = np.isin(where["codec"], (codecs.DELTA, codecs.PATCH))
        packs = self._log.state.packs
        for number in np.unique(where["pack"]).tolist():
            if number not in self._bases:
                self._bases[number] = self._read_bases(packs[number]) if number in packs else None
            bases, there = self._bases[number], where["pack"] == number
            fixed |= there & (True if bases is None else np.isin(where["offset"], bases))
        return fixed

    def _read_bases(self, pack: Pack) -> "NDArray[np.uint64] | None":
        """The offsets of the bases in `pack`. None for one that others deleted meanwhile: they have
        just moved its chunks, which a later run may code."""
        try:
            table = footers.read_table(self._objects.storage, pack)
        except NotFound:
            if any(pack.id == listed.id for listed in self._log.replay().packs.values()):
                raise
            return None
        return _bases_in(table)


def _bases_in(table: FooterTable) -> "NDArray[np.uint64]":
    """The offsets of the bases in a pack."""
    bases = np.unique(table["base"][table["base"] != NO_BASE])
    return np.asarray(table["offset"][bases])


_Raw: TypeAlias = tuple[Chunk, memoryview]
"""A chunk and its raw bytes."""


@dataclass(slots=True)
class _Base:
    """The base of a place. The number of its record is None as long as it has none; `decoded` is
    what that comes back as, in memory of its own."""

    chunk: Chunk
    raw: memoryview
    planes: codecs.Sample
    record: int | None = None
    decoded: memoryview = NO_MEMORY


class Samples:
    """How to store the chunks of a strip, by samples: one for those that a commit has of one leaf,
    if their elements have one width."""

    def __init__(self) -> None:
        self._found: dict[tuple[int | None, int, int], codecs.Sample] = {}

    def of(self, chunk: Chunk, raw: memoryview, base: _Base | None = None) -> codecs.Sample:
        """What planes, or with `base` differences, would leave of chunks like this one."""
        key = chunk.member if base else None, chunk.leaf, chunk.width
        if key not in self._found:
            self._found[key] = codecs.sample(raw, chunk.width, base.raw if base else None)
        return self._found[key]

    def best(self, chunk: Chunk, raw: memoryview, base: _Base) -> tuple[int, codecs.Sample] | None:
        """How to store a chunk; None if what there is takes as little. Planes of all chunks of a
        place are alike."""
        codec, sampled = codecs.SPLIT_ZSTD, base.planes
        if chunk.id != base.chunk.id:
            delta = self.of(chunk, raw, base)
            if delta.share <= WORTH * sampled.share:
                codec, sampled = codecs.DELTA, delta
        return (codec, sampled) if _worth(chunk, sampled.share * len(raw)) else None


def _worth(chunk: Chunk, nbytes: float) -> bool:
    return nbytes <= WORTH * chunk.stored_bytes


class ToCode(NamedTuple):
    """A strip of a run to code: the different chunks of each place. Those of the commit of number
    `key` are bases if they can be. With it, `planned_bytes` more of all commits are done."""

    run: str
    key: int
    places: list[list[Chunk]]
    planned_bytes: int

    @property
    def stored_bytes(self) -> int:
        return sum(chunk.stored_bytes for chunks in self.places for chunk in chunks)


def code_strips(
    stores: Stores, threads: ThreadPool, given: Writing[Sequence[ToCode]]
) -> Written[Coded]:
    """Code some strips, each on one of `threads`."""
    (store,) = stores
    store.objects.sync(store.log.state)
    work, coded = shared(given.item), list[Coded]()

    def code() -> None:
        own = Coded()
        with packs.writing() as writer:
            coder = StripCoder(store.objects, writer, own)
            for strip in work:
                coder.code(strip.places, strip.key)
        coded.append(own)

    with packs_of(store, threads, given.session) as packs:
        threads.together([code] * min(threads.count, len(given.item)), work.stop)
    return Written(tuple(packs.closed), Coded.total(coded))


class StripCoder:
    """Codes strips on one thread, into packs of its own."""

    def __init__(self, objects: ObjectStore, writer: PackWriter, coded: Coded) -> None:
        self._objects, self._writer, self._coded = objects, writer, coded
        self._pack: OpenPack
        self._samples: Samples
        self._scratch = Scratch()

    def code(self, places: Sequence[Sequence[Chunk]], key: int) -> None:
        """Code the candidates of each place."""
        total = sum(chunk.raw_bytes for chunks in places for chunk in chunks)
        self._pack, self._samples = self._writer.pack_with_room(total), Samples()
        base_of = {
            chunk: base for chunks in places for base in [_base(chunks, key)] for chunk in chunks
        }
        with self._read(list(dict.fromkeys(base_of.values()))) as read:
            bases = {chunk: self._store_base(chunk, raw) for chunk, raw in read}
            self._pack.flush()
            for member in sorted({chunk.member for chunk in base_of}):
                self._code_member(
                    {
                        chunk: bases[base]
                        for chunk, base in base_of.items()
                        if chunk.member == member and base in bases and chunk.id != base.id
                    }
                )

    def _code_member(self, base_of: Mapping[Chunk, _Base]) -> None:
        """Code the chunks of one commit, each with the base of its place."""
        with self._read(list(base_of)) as read:
            for chunk, raw in read:
                self._store(chunk, raw, base_of[chunk])
            self._pack.flush()

    def _store_base(self, chunk: Chunk, raw: memoryview) -> _Base:
        """Store a base, if that is worth it."""
        base = _Base(chunk, raw, self._samples.of(chunk, raw))
        base.record = self._store(chunk, raw, base)
        return base

    def _store(self, chunk: Chunk, raw: memoryview, base: _Base) -> int | None:
        """Store a chunk, if that is worth it; the number of its record. If it is a difference, its
        base is written before, also where that makes it no smaller."""
        if (best := self._samples.best(chunk, raw, base)) is None:
            return None
        codec, sampled = best
        if codec == codecs.SPLIT_ZSTD:
            stored: Stored = codecs.encode_planes(raw, chunk.width, sampled)
            worth = _worth(chunk, len(stored))
            return self._append(chunk, codec, stored, base) if worth else None
        if base.record is None:
            used, whole = codecs.encode(codecs.SPLIT_ZSTD, base.raw, chunk.width)
            base.record = self._append(base.chunk, used, whole, base)
        entry = self._pack.entries[base.record]
        at = codecs.Base(entry.offset, entry.stored_bytes, entry.codec)
        stored = codecs.encode_delta(raw, base.raw, at, chunk.width, sampled)
        return self._append(chunk, codec, stored, base)

    def _append(self, chunk: Chunk, codec: int, stored: Stored, base: _Base) -> int:
        """Queue a coded chunk; the number of its record. Raises `Corrupt` unless it decodes to the
        chunk: whatever turned in memory since that was read, the old copy stays."""
        number = base.record if codec == codecs.DELTA and base.record is not None else NO_BASE
        is_base = chunk.id == base.chunk.id
        with self._scratch.lend(0 if is_base else chunk.raw_bytes) as lent:
            raw = memoryview(bytearray(chunk.raw_bytes)) if is_base else lent
            if number == NO_BASE:
                codecs.decode_into(codec, stored, raw, chunk.width)
            else:
                codecs.decode_delta(stored, base.decoded, raw, chunk.width)
            if checksum(raw) != chunk.checksum:
                raise Corrupt(
                    f"chunk {chunk.id.hex()[:12]} does not come back from what was made of it, "
                    "so it stays as it was; test this host's memory, and report it"
                )
        if is_base:
            base.decoded = raw
        entry = PackEntry(
            *(chunk.id, chunk.checksum, self._pack.offset, len(stored), chunk.raw_bytes),
            *(codec, chunk.width, TENSOR, number),
        )
        self._coded.add(chunk, len(stored), delta=number != NO_BASE)
        return self._pack.put(entry, stored)

    def _read(self, chunks: Sequence[Chunk]) -> AbstractContextManager[list[_Raw]]:
        """Raw bytes of those chunks that can be read, for the duration of a block."""
        return lend_raws(self._objects, chunks, self._scratch, self._coded.problems)


@contextmanager
def lend_raws(
    objects: ObjectStore, chunks: Sequence[Chunk], scratch: Scratch, problems: list[str]
) -> Iterator[list[_Raw]]:
    """Raw bytes of chunks, for the duration of a block, compared with their ids. Those that are
    damaged, or that a gc has taken away with their commits, are left out, and `problems` say
    why."""
    with memory_for(chunks, scratch) as rows:
        yield _filled(objects, rows, problems)


def _filled(objects: ObjectStore, rows: list[_Raw], problems: list[str]) -> list[_Raw]:
    """The rows whose memory could be filled."""
    try:
        fill(objects, rows, "being compacted", verify_ids=True)
        return rows
    except (Corrupt, NotFound) as error:
        if len(rows) == 1:
            problems.append(str(error))
            return []
        return [row for each in rows for row in _filled(objects, [each], problems)]


def estimate(
    objects: ObjectStore, places: Sequence[Sequence[Chunk]], key: int, coded: Coded
) -> None:
    """Add to `coded` what coding the candidates would do, by a sample of them."""
    sampled = places[:: 1 if coded.raw_bytes < SAMPLED_BYTES else SAMPLED_PLACES]
    total = sum(chunk.stored_bytes for chunks in places for chunk in chunks)
    known = sum(chunk.stored_bytes for chunks in sampled for chunk in chunks)
    scratch = Scratch()
    for chunks in sampled:
        base = _base(chunks, key)
        ordered = [base, *(chunk for chunk in chunks if chunk.id != base.id)]
        with lend_raws(objects, ordered, scratch, coded.problems) as read:
            if any(chunk == base for chunk, _ in read):
                _estimate_place(read, coded, total / known)


def _estimate_place(read: Sequence[_Raw], coded: Coded, times: float) -> None:
    """Add what coding the chunks of a place would do, so many times; the first is the base."""
    chunk, raw = read[0]
    samples, written = Samples(), False
    base = _Base(chunk, raw, samples.of(chunk, raw))
    for chunk, raw in read:
        if (best := samples.best(chunk, raw, base)) is None:
            continue
        delta = best[0] == codecs.DELTA
        coded.add(chunk, best[1].share * len(raw), delta=delta, times=times)
        if delta and not written:
            coded.add(base.chunk, min(base.planes.share, 1) * len(raw), delta=False, times=times)
        written = True


def _base(chunks: Sequence[Chunk], key: int) -> Chunk:
    chosen = choose_base([(chunk.member, chunk.id) for chunk in chunks], key)
    return next(chunk for chunk in chunks if chunk.id == chosen)
