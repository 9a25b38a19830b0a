"""Recovering chunks that their pack lost: find sources, and write what was found into new packs.

All possible sources are tried: the damaged packs themselves, their twins, unlisted packs,
quarantined packs, and the packs of mirrors. None is trusted: a chunk counts only if its bytes match
its id.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, PackId, SessionId, pack_key
from ckptstore.core.model import PackEntry
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.objects.pack import TENSOR, FooterTable
from ckptstore.repository.footer_index import Inventory, read_chunk_at
from ckptstore.repository.footers import read_table_at
from ckptstore.repository.pack_writer import ClosedPack, OpenPack, PackWriter
from ckptstore.storage.contract import Storage

_PACK_FILE = re.compile(
    r"(quarantine/)?packs/[0-9a-f]{2}/([0-9a-f]{24}-[0-9]{1,7}-[0-9]{1,7})(\.2)?(~[0-9]+)?"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A verified location of a chunk: the object `key` of source number `donor`."""

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
                        tables[key] = read_table_at(self.storage, key)
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
    """The first location of `chunk` whose bytes match. Source 0 is the store itself.

    Raises `Unavailable` if the chunk is found nowhere and one of its locations did not answer: it
    may not be lost.
    """
    unanswered: Unavailable | None = None
    for number, donor in enumerate(donors):
        for key, entry in donor.entries_of(chunk):
            try:
                read_chunk_at(donor.storage, key, entry)
                return Source(number, key, entry)
            except (Corrupt, NotFound):
                continue
            except Unavailable as error:
                unanswered = error
    if unanswered is not None:
        raise unanswered
    return None


def read_source(donors: Sequence[ChunkSource], source: Source) -> memoryview:
    """The raw bytes of the chunk, verified again; raises `Corrupt`, `NotFound` or `Unavailable`."""
    return read_chunk_at(donors[source.donor].storage, source.key, source.entry)


def write_packs(
    donors: Sequence[ChunkSource], sources: Iterable[Source], session: SessionId
) -> list[ClosedPack]:
    """Copy chunks into new packs of `session`, durable on return and not yet listed by the log.
    A failure leaves nothing behind."""
    storage = donors[0].storage
    closed: list[ClosedPack] = []

    def close(pack: OpenPack) -> None:
        closed.append(pack.close())

    parts = {
        metadata: [source for source in sources if (source.entry.kind != TENSOR) is metadata]
        for metadata in (False, True)
    }
    numbers, pack_bytes = itertools.count(), storage.capabilities.pack_bytes
    for metadata, part in parts.items():
        pack_writer = PackWriter(
            storage, session, numbers, close, pack_bytes=pack_bytes, metadata=metadata
        )
        try:
            for run in _runs(part):
                raws = [read_source(donors, source) for source in run]
                first = run[0].entry
                pack_writer.add(
                    [s.entry.chunk for s in run],
                    raws,
                    first.width,
                    first.kind,
                    codec=first.codec,
                    run_bytes=sum(map(len, raws)),
                )
                pack_writer.flush()
            pack_writer.close_with(close)
        except BaseException:
            pack_writer.discard()
            raise
    storage.sync_dirs([pack_key(pack.record.id) for pack in closed])
    return closed


def _runs(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Group sources that are adjacent in one object, up to `RUN_BYTES`, so that they stay
    together."""
    ordered = sorted(sources, key=lambda s: (s.donor, s.key, s.entry.offset))
    run = ordered[:1]
    for before, source in pairwise(ordered):
        old, new = before.entry, source.entry
        follows = (
            (before.donor, before.key) == (source.donor, source.key)
            and old.offset + old.stored_bytes == new.offset
            and (old.codec, old.width, old.kind) == (new.codec, new.width, new.kind)
        )
        if not follows or sum(s.entry.raw_bytes for s in run) + new.raw_bytes > RUN_BYTES:
            yield run
            run = []
        run.append(source)
    if run:
        yield run
