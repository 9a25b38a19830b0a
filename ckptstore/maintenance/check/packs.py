"""fsck's third level: every listed pack exists, has the right size and two readable footers, and
the chunk index agrees; and orphans."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from ckptstore.core.ids import ChunkId, PackId, pack_key, pack_session, twin_key
from ckptstore.core.model import PackEntry
from ckptstore.core.text import bytes_text
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.chunks.lmdb_salvage import remains
from ckptstore.log.fold import Pack, State
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.report import Finding, Kind, Severity
from ckptstore.objects.pack import TENSOR, FooterTable
from ckptstore.repository.footer_index import keys_of
from ckptstore.repository.footers import read_table_at
from ckptstore.storage.contract import Storage

_PACK = re.compile(
    r"packs/([0-9a-f]{2})/(([0-9a-f]{24})-(0|[1-9][0-9]{0,6})-(0|[1-9][0-9]{0,6}))(\.2)?"
)
_DOCUMENT = re.compile(r"commits/([0-9a-f]{24})-([0-9a-f]{64})")
UNKNOWN = -1
"""The kind of a metadata chunk known only to the chunk index; the chunk itself tells its kind."""

_HEAL = "run `ckptstore repair`: what verifies is saved; --from names a mirror that has the rest"


def unreadable(state: State, problems: Mapping[PackId, Exception]) -> Iterator[Finding]:
    """Packs without a readable footer: their content is unknown. Pure."""
    listed = {pack.id: pack for pack in state.packs.values()}
    for name, error in problems.items():
        what = (
            f"pack {name} ({bytes_text(listed[name].bytes)}, {listed[name].chunks} chunks) "
            f"cannot be read: {error}"
        )
        yield (
            _unanswered(what, name)
            if isinstance(error, Unavailable)
            else Finding(Kind.PACK, what, _HEAL, key=pack_key(name), pack=name)
        )


def _unanswered(what: str, name: PackId) -> Finding:
    """Storage did not return an object: its bytes may be sound, so `repair` leaves it alone (it
    has no key here)."""
    return Finding(Kind.PACK, what, "check the storage, then run fsck again", pack=name)


def pack_findings(storage: Storage, pack: Pack, table: FooterTable) -> Iterator[Finding]:
    """The problems of one pack with at least one readable footer, `table`."""
    if len(table) != pack.chunks:
        yield _object(
            pack, pack_key(pack.id), f"has {len(table)} chunks; the log says {pack.chunks}"
        )
    for key in keys_of(pack.id, metadata=pack.metadata):
        try:
            size = storage.size(key)
        except Corrupt as error:
            yield _object(pack, key, f"is damaged: {error}")
            continue
        if size is None:
            yield _object(pack, key, "is missing")
        elif size != pack.bytes:
            yield _object(pack, key, f"has {size} bytes; the log says {pack.bytes}")
        else:
            yield from _footer_findings(storage, pack, key, table)


def _footer_findings(
    storage: Storage, pack: Pack, key: str, table: FooterTable
) -> Iterator[Finding]:
    try:
        if read_table_at(storage, key).tobytes() != table.tobytes():
            yield _object(pack, key, "lists other chunks than its twin")
    except (Corrupt, NotFound) as error:
        yield _object(pack, key, f"has a footer that cannot be read: {error}")
    except Unavailable as error:
        yield _unanswered(str(error), pack.id)


def _object(pack: Pack, key: str, what: str) -> Finding:
    """A problem of one object. The twin of a metadata pack still serves, so nothing is lost yet."""
    if pack.metadata:
        step = "run `ckptstore repair --apply`, which copies the sound twin over it"
        return Finding(Kind.TWIN, f"{key} {what}", step, key=key, pack=pack.id)
    return Finding(Kind.PACK, f"{key} {what}", _HEAL, key=key, pack=pack.id)


def orphan_findings(storage: Storage, present: Callable[[], State]) -> Iterator[Finding]:
    """Objects that no log entry names: left by stopped writers, being written now, or foreign.
    They are listed before `present` reads the state, so newly committed ones are excluded."""
    listed = {prefix: list(storage.list(prefix)) for prefix in ("packs/", "commits/")}
    state = present()
    packs = {pack.id for pack in state.packs.values()}
    for key, size in listed["packs/"]:
        found = _PACK.fullmatch(key)
        if not found or key not in (pack_key(PackId(found[2])), twin_key(PackId(found[2]))):
            yield Finding(
                Kind.FOREIGN,
                f"{key} is nothing that belongs there",
                "delete it if it is yours",
                Severity.NOTE,
                key,
            )
        elif found[2] not in packs:
            yield _orphan(key, size, state.closed(pack_session(PackId(found[2]))))
    for key, size in listed["commits/"]:
        named = _DOCUMENT.fullmatch(key)
        if not named:
            yield Finding(
                Kind.FOREIGN,
                f"{key} is nothing that belongs there",
                "delete it if it is yours",
                Severity.NOTE,
                key,
            )
        elif named[2] not in state.commits:
            yield _orphan(key, size, named[1] in state.over or named[1] in state.ended)


def _orphan(key: str, size: int, closed: bool) -> Finding:
    next_step = (
        "run `ckptstore gc`, which deletes it"
        if closed
        else "nothing: its writer may be at work; else gc will find it dead"
    )
    return Finding(
        Kind.ORPHAN,
        f"{key} ({bytes_text(size)}) is named by no entry of the log",
        next_step,
        Severity.NOTE,
        key,
    )


def index_findings(
    offline_store: OfflineStore, state: State, tables: Mapping[PackId, FooterTable]
) -> Iterator[Finding]:
    """Chunks that this host's chunk index places where the footers do not have them. An unknown
    chunk is only looked up again later."""
    if not os.path.exists(offline_store.chunks_path):
        return
    index = ChunkIndex.open(offline_store.chunks_path, offline_store.config.store)
    try:
        listed = {
            number: tables[pack.id] for number, pack in state.packs.items() if pack.id in tables
        }
        for number in sorted(index.indexed() & listed.keys()):
            name = state.packs[number].id
            # Others may rebuild the index between two looks; only an error before and after a look
            # at its packs counts.
            if all(_disagrees(index, number, name, listed) for _ in range(2)):
                lost, wrong = _compared(index, number, listed)
                what = (
                    f"the chunk index has {lost} chunks of pack {name} nowhere and {wrong} in "
                    "the wrong place"
                )
                yield Finding(
                    Kind.CHUNK_INDEX, what, "run `ckptstore reindex`", Severity.INDEX, pack=name
                )
    finally:
        index.close()


def remembered(
    offline_store: OfflineStore, state: State, names: Collection[PackId | None]
) -> dict[PackId, list[PackEntry]]:
    """The chunk index's knowledge of packs; metadata has the kind `UNKNOWN`. Does not open the
    index."""
    packs = {number: pack for number, pack in state.packs.items() if pack.id in names}
    found: dict[PackId, list[PackEntry]] = {}
    for ids, rows in (
        remains(offline_store.chunks_path, offline_store.config.store) if packs else ()
    ):
        for number in packs.keys() & set(rows["pack"].tolist()):
            mine, kind = rows["pack"] == number, UNKNOWN if packs[number].metadata else TENSOR
            columns = [
                rows[mine][field].tolist()
                for field in ("offset", "stored", "raw", "codec", "width")
            ]
            columns += [[kind] * len(columns[0]), [0] * len(columns[0])]
            entries = [
                PackEntry(ChunkId(chunk), *place)
                for chunk, *place in zip(ids[mine].tolist(), *columns, strict=True)
            ]
            found.setdefault(packs[number].id, []).extend(entries)
    return found


def _disagrees(
    index: ChunkIndex, number: int, name: PackId, listed: Mapping[int, FooterTable]
) -> bool:
    return any(_compared(index, number, listed)) and index.pack_ids([number]) == {number: name}


def _compared(index: ChunkIndex, number: int, listed: Mapping[int, FooterTable]) -> tuple[int, int]:
    """The number of a pack's chunks that the index lacks, and that it places wrongly."""
    table = listed[number]
    where = index.get_many(table["chunk"].tobytes())
    found, mine = where["found"] == 1, where["pack"] == number
    right = np.logical_and.reduce(
        [where[name] == table[name] for name in ("offset", "stored", "raw", "codec")]
    )
    wrong = int((found & mine & ~right).sum())
    for other in np.unique(where["pack"][found & ~mine]).tolist():
        # Other chunks, of unlisted packs, are looked up again later.
        if other in listed:
            rows = found & (where["pack"] == other)
            places = set(
                zip(listed[other]["chunk"].tolist(), listed[other]["offset"].tolist(), strict=True)
            )
            wrong += len(
                set(zip(table["chunk"][rows].tolist(), where["offset"][rows].tolist(), strict=True))
                - places
            )
    return int((~found).sum()), wrong
