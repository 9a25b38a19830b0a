"""Recovering chunks that their pack lost: find sources, and write what was found into new packs.

All possible sources are tried: the damaged packs themselves, their twins, unlisted packs,
quarantined packs, and the packs of mirrors. None is trusted: a chunk counts only if its bytes match
its id.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, SessionId, digest
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.maintenance.repair.repair_config import FLIP_BYTES_MAX, flipped_back
from ckptstore.objects import codecs
from ckptstore.objects.pack import (
    TENSOR,
    TRAILER_BYTES,
    FooterTable,
    entries,
    parse_footer,
    parse_trailer,
)
from ckptstore.repository.chunk_reader import coalesce, read_chunk_at
from ckptstore.repository.footers import read_table_at
from ckptstore.repository.pack_writer import ClosedPack, PackSet
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

_PACK_FILE = re.compile(
    r"(quarantine/)?packs/[0-9a-f]{2}/([0-9a-f]{24}-[0-9]{1,7}-[0-9]{1,7})(\.2)?(~[0-9]+)?"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A verified location of a chunk: the object `key` of source number `donor`; with `flip`,
    after flipping one bit back."""

    donor: int
    key: str
    entry: PackEntry
    flip: bool = False


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
        return dict(self._tables())

    @cached_property
    def _places(self) -> Mapping[ChunkId, list[tuple[str, int]]]:
        places: dict[ChunkId, list[tuple[str, int]]] = {}
        for key, table in self.tables.items():
            for row, chunk in enumerate(table["chunk"].tolist()):
                places.setdefault(ChunkId(chunk), []).append((key, row))
        return places

    def entries_of(self, chunk: ChunkId) -> Iterator[tuple[str, PackEntry]]:
        """The locations of `chunk` by the footers."""
        for key, row in self._places.get(chunk, ()):
            yield key, entries(self.tables[key][row : row + 1])[0]
        yield from self._remembered.get(chunk, ())

    def _tables(self) -> Iterator[tuple[str, FooterTable]]:
        for prefix in ("packs/", "quarantine/packs/"):
            for key, _ in self.storage.list(prefix):
                if _PACK_FILE.fullmatch(key) and (table := self._table(key)) is not None:
                    yield key, table

    def _table(self, key: str) -> FooterTable | None:
        try:
            return read_table_at(self.storage, key)
        except Corrupt:
            return _flipped_table(self.storage, key)
        except (NotFound, Unavailable):
            return None


def find_sources(donors: Sequence[ChunkSource], wanted: Iterable[ChunkId]) -> dict[ChunkId, Source]:
    """For each of `wanted`, the first location whose bytes matched. Source 0 is the store itself.

    Raises `Unavailable` if a chunk is found nowhere and one of its locations did not answer: it may
    not be lost.
    """
    found: dict[ChunkId, Source] = {}
    for chunk in wanted:
        if source := _source(donors, chunk):
            found[chunk] = source
    return found


def read_source(donors: Sequence[ChunkSource], source: Source) -> memoryview:
    """The raw bytes of the chunk, verified again; raises `Corrupt`, `NotFound` or `Unavailable`."""
    storage = donors[source.donor].storage
    if not source.flip:
        return read_chunk_at(storage, [source.key], source.entry)
    raw = _flipped_chunk(storage, source.key, source.entry)
    if raw is None:
        raise Corrupt(
            f"chunk {source.entry.chunk.hex()[:12]} in {source.key} changed while it was repaired; "
            "repeat the repair"
        )
    return memoryview(raw)


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
            runs = _runs([source for source in ordered if _is_metadata(source) is metadata])
            pack_writer = packs.pack_writer(metadata=metadata)
            for run in runs:
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


def records(closed: Iterable[ClosedPack]) -> tuple[PackRecord, ...]:
    return tuple(pack.record for pack in closed)


def _is_metadata(source: Source) -> bool:
    return source.entry.kind != TENSOR


def _source(donors: Sequence[ChunkSource], chunk: ChunkId) -> Source | None:
    tried: list[tuple[int, str, PackEntry]] = []
    unanswered: Unavailable | None = None
    for number, donor in enumerate(donors):
        for key, entry in donor.entries_of(chunk):
            try:
                read_chunk_at(donor.storage, [key], entry)
                return Source(number, key, entry)
            except (Corrupt, NotFound):
                tried.append((number, key, entry))
            except Unavailable as error:
                unanswered = error
    for number, key, entry in tried:
        if _flipped_chunk(donors[number].storage, key, entry) is not None:
            return Source(number, key, entry, flip=True)
    if unanswered is not None:
        raise unanswered
    return None


def _flipped_chunk(storage: Storage, key: str, entry: PackEntry) -> bytes | None:
    """A chunk that was stored raw, with its one flipped bit restored."""
    if entry.codec != codecs.RAW or entry.stored_bytes > FLIP_BYTES_MAX:
        return None
    try:
        stored = storage.read(key, entry.offset, entry.offset + entry.stored_bytes)
    except (Corrupt, NotFound, Unavailable):
        return None
    return flipped_back(
        stored, lambda candidate: candidate if digest(candidate) == entry.chunk else None
    )


def _flipped_table(storage: Storage, key: str) -> FooterTable | None:
    """The footer of a pack with one flipped bit in its last bytes."""
    try:
        tail, size = storage.read_tail(key, FLIP_BYTES_MAX)
    except (Corrupt, NotFound, Unavailable):
        return None

    def parse(candidate: bytes) -> FooterTable | None:
        try:
            trailer = parse_trailer(candidate[-TRAILER_BYTES:], size)
            return parse_footer(
                candidate[-trailer.footer_bytes - TRAILER_BYTES : -TRAILER_BYTES], trailer
            )
        except Corrupt:
            return None

    # Then the bit is in the trailer; no other place need be tried.
    try:
        trailer = parse_trailer(tail[-TRAILER_BYTES:], size)
    except Corrupt:
        return flipped_back(
            tail[-TRAILER_BYTES:], lambda candidate: parse(tail[:-TRAILER_BYTES] + candidate)
        )
    return flipped_back(tail[-trailer.footer_bytes - TRAILER_BYTES :], parse)


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
