"""This host's catalog and chunk index: compared with the log and the footers, asked what they
remember of damaged packs, and rebuilt."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.core.ids import PackId, parse_chunk_id
from ckptstore.core.model import CommitInfo, PackEntry
from ckptstore.errors import CkptStoreError, NoSpace, Unavailable
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.chunks.records import remains
from ckptstore.index.queries import PackInfo, Queries
from ckptstore.log.entries import Commit
from ckptstore.log.state import State, apply, genesis
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.check import Finding, Kind, Severity
from ckptstore.maintenance.check.offline_store import Chain, OfflineStore, unkept_of
from ckptstore.maintenance.check.trees import Contents
from ckptstore.objects.pack import TENSOR, FooterTable
from ckptstore.repository.chunk_reader import located_entries
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROOM_BYTES = 1 << 20
"""A disk with less is full, for an index that could not be written."""

_LOOKS = 5
"""How often the catalog is checked again while others change it."""

_PLACE = ["chunk", "checksum", "offset", "stored", "raw", "codec"]

UNKNOWN = -1
"""The kind of a metadata chunk known only to the chunk index; the chunk itself tells its kind."""


@dataclass(frozen=True, slots=True)
class Reindexed:
    """The content of the new indexes. The log lists the `unreadable` packs, but neither of their
    footers can be read."""

    entries: int
    commits: int
    packs: int
    unreadable: int


def reindex(handle: StoreHandle, *, progress: Progress = silent) -> Reindexed:
    """Discard this host's catalog and chunk index and rebuild them from log and footers. Readers
    and writers may continue meanwhile.

    Raises `Corrupt` for a broken log: `repair` it first. Raises `NoSpace` or `Unavailable` if the
    new indexes could not be written.
    """
    progress("log", 0, 0)
    state = handle.log.replay()
    progress("catalog", 0, state.n)
    handle.catalog.reset()
    handle.follow()
    progress("chunk index", 0, len(state.packs))
    handle.objects.index.reset()
    handle.objects.sync(state, thorough=True)
    _check_written(handle, state)
    indexed = handle.objects.index.indexed() & set(state.packs)
    # A gc takes a pack from the log before it deletes the object: what it took meanwhile is not
    # lost.
    lost = (set(state.packs) & set(handle.log.replay().packs)) - indexed
    return Reindexed(state.n, len(state.commits), len(indexed), len(lost))


def _check_written(handle: StoreHandle, state: State) -> None:
    """Raise if a new index could not be written: this process has it in memory, the next one would
    not."""
    folded = _folded(handle, state)
    if folded and handle.objects.index.whole_on_disk:
        return
    place = handle.index_directory
    try:
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        raise Unavailable(
            f"{place} does not answer: {error}; see to its disk, then repeat"
        ) from error
    full = free_bytes < _ROOM_BYTES
    raise (NoSpace if full else Unavailable)(
        f"the {'chunk index' if folded else 'catalog'} of {handle.url} could not be written to "
        f"{place}, where {free_bytes} bytes are free; the store is sound and answers from its log; "
        f"{'free some' if full else 'see to the rights there and to the disk'}, then repeat"
    )


def _folded(handle: StoreHandle, state: State) -> bool:
    """Whether the catalog has the log up to `state`, for the next process as well."""
    from ckptstore.index.catalog import Catalog

    catalog = handle.catalog
    try:
        kept = not isinstance(catalog, Catalog) or not catalog.in_memory()
        return kept and catalog.position().n >= state.n
    except Unavailable:
        return False


def drop_indexes(offline_store: OfflineStore) -> None:
    """Empty both indexes; the next process that opens the store fills them."""
    # Its import of SQLAlchemy is slow; programs that never check or repair need not wait for it.
    from ckptstore.index.catalog import Catalog

    Catalog.open(offline_store.catalog_path, offline_store.config.store).reset()
    index = ChunkIndex.open(offline_store.chunks_path, offline_store.config.store)
    index.reset()
    index.close()


def catalog_findings(
    offline_store: OfflineStore, chain: Chain, contents: Contents
) -> list[Finding]:
    """Differences between this host's catalog and the log up to the same entry. Reads what the log
    has got since `chain` was read."""
    found: list[str] = []
    # Unlike Path.exists, false for a damaged inode, whose file is recreated.
    for _ in range(_LOOKS if os.path.exists(offline_store.catalog_path) else 0):
        stamp = _stamp(offline_store.catalog_path)
        found = list(_catalog_problems(offline_store, chain, contents))
        # Others may replace the catalog, or create it.
        if not found or _stamp(offline_store.catalog_path) == stamp:
            break
    return [
        Finding(Kind.CATALOG, f"the catalog {what}", "run `ckptstore reindex`", Severity.INDEX)
        for what in found
    ]


def _catalog_problems(
    offline_store: OfflineStore, chain: Chain, contents: Contents
) -> Iterator[str]:
    """Compare a snapshot of the catalog with the state of the log at its position."""
    catalog = open_catalog(offline_store.catalog_path, offline_store.config.store)
    if catalog is None:
        yield "cannot be read, or is of another store or version"
        return
    try:
        with catalog.one_moment():
            state = _state_at(catalog.position().n, offline_store, chain)
            yield from differences(catalog, state, chain.unkept)
            yield from _other_schemas(catalog, contents)
    except CkptStoreError as error:
        yield str(error)
    finally:
        catalog.close()


def _state_at(n: int, offline_store: OfflineStore, chain: Chain) -> State:
    """The state after entry `n`, from the nearest one that is known. Of entries on the way,
    `chain` gets what it keeps of commits."""
    first = genesis(offline_store.config.store, offline_store.config.generation)
    near = (each for each in (first, chain.remembered, chain.state) if each.n <= n)
    state = max(near, key=lambda each: each.n)
    behind = offline_store.open_log().read_entries(*state.position) if state.n < n else ()
    for entry in takewhile(lambda entry: entry.n <= n, behind):
        state = apply(state, entry)
        if isinstance(entry.body, Commit):
            chain.unkept[entry.n] = unkept_of(entry.body, entry.body.schemas)
    return state


def _stamp(path: Path) -> tuple[int, ...]:
    """Detects changes of the file at `path` and of its write-ahead log."""
    stamps: list[int] = []
    for name in (path, path.with_name(path.name + "-wal")):
        with suppress(OSError):
            status = os.stat(name)
            stamps += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(stamps)


def differences(catalog: Queries, state: State, unkept: Mapping[int, int]) -> Iterator[str]:
    """What the catalog says otherwise than the state at its position. `unkept` has what the state
    does not keep, by the number of a commit's entry."""
    wanted = sorted(state.commits, key=lambda commit: state.commits[commit].age, reverse=True)
    for info, commit in zip_longest(catalog.each(forgotten=True), wanted):
        if info is None or info.id != commit:
            yield f"has other commits than the log: wanted {commit or 'no more'}, got {info!r}"
            break
        if differs := _difference(info, state, unkept):
            yield f"says of commit {commit[:12]} what the log does not: {differs}"
            break
    tags = {name: commit for name, commit in state.tags.items() if commit in state.commits}
    packs = [
        PackInfo(n, pack.id, pack.bytes, pack.chunks, pack.metadata, not pack.live)
        for n, pack in sorted(state.packs.items())
    ]
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("position", catalog.position(), state.position),
        ("tags", {tag.name: tag.commit for tag in catalog.tags()}, tags),
        ("packs", catalog.packs(), packs),
    )
    for name, got, right in asked:
        if got != right:
            yield f"has other {name} than the log: {_first_difference(got, right)}"


def _other_schemas(catalog: Queries, contents: Contents) -> Iterator[str]:
    for name in catalog.schemas():
        schema = catalog.schema(name)
        # A schema that the store does not give is a separate finding.
        with suppress(CkptStoreError):
            if schema != contents.schema(parse_chunk_id(name)):
                yield f"has another schema {name[:12]} than the store"


def _difference(info: CommitInfo, state: State, unkept: Mapping[int, int]) -> str:
    """The first thing that the catalog says of a commit and the log does not."""
    row = state.commits[info.id]
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("number", info.n, row.n),
        ("session", info.session, row.session),
        ("content", info.content, row.content),
        ("run", info.run, row.run),
        ("step", info.step, row.step),
        ("time", info.time_ns, row.time_ns),
        ("parents", info.parents, tuple(map(state.in_place_of, row.parents))),
        # As text, because a metric may be NaN.
        ("metrics", str(sorted(info.metrics.items())), str(sorted(row.metrics))),
        ("thinned", info.thinned, row.thinned),
        ("forgotten", info.forgotten, row.soft > 0),
        ("rest", unkept_of(info, info.schemas.items()), unkept.get(row.n)),
    )
    found = (f"{name} {got}, wanted {wanted}" for name, got, wanted in asked if got != wanted)
    return next(found, "")


def _first_difference(got: Any, wanted: Any) -> str:
    if isinstance(got, list) and len(got) == len(wanted):
        got, wanted = next(pair for pair in zip(got, wanted, strict=True) if pair[0] != pair[1])
    return f"wanted {wanted!s:.300}, got {got!s:.300}"


def index_findings(
    offline_store: OfflineStore, state: State, tables: Mapping[PackId, FooterTable]
) -> Iterator[Finding]:
    """Chunks that this host's chunk index places where the footers do not have them. An unknown
    chunk is only looked up again later."""
    if not os.path.exists(offline_store.chunks_path):
        return
    listed = {n: tables[pack.id] for n, pack in state.packs.items() if pack.id in tables}
    doubtful = _doubtful(offline_store, listed)
    index = ChunkIndex.open(offline_store.chunks_path, offline_store.config.store)
    try:
        for number in sorted(index.indexed() & listed.keys()):
            name, doubted = state.packs[number].id, b"".join(doubtful.get(number, ()))
            # Others may rebuild the index between two looks; only an error before and after a look
            # at its packs counts.
            looks = (_compared(index, number, listed, doubted) for _ in range(2))
            if all(any(look) and index.pack_ids([number]) == {number: name} for look in looks):
                lost, wrong = _compared(index, number, listed, doubted)
                yield Finding(
                    Kind.CHUNK_INDEX,
                    f"the chunk index has {lost} chunks of pack {name} nowhere and {wrong} in the "
                    "wrong place",
                    "run `ckptstore reindex`",
                    Severity.INDEX,
                    pack=name,
                )
    finally:
        index.close()


def _doubtful(
    offline_store: OfflineStore, listed: Mapping[int, FooterTable]
) -> dict[int, list[bytes]]:
    """The chunks that the index may place in packs whose footers lack them, by the pack. A commit
    would rely on such a chunk, which may be nowhere: its pack was replaced by another. Rows that
    the index no longer uses are among them."""
    keys = [_keys(table["chunk"], number) for number, table in listed.items()]
    known = np.sort(np.concatenate([*keys, np.full(1, np.iinfo(np.uint64).max, np.uint64)]))
    found: dict[int, list[bytes]] = {}
    for rows in remains(offline_store.chunks_path, offline_store.config.store):
        wanted = _keys(rows["chunk"], rows["pack"])
        for row in rows[known[np.searchsorted(known, wanted)] != wanted]:
            if int(row["pack"]) in listed:
                found.setdefault(int(row["pack"]), []).append(row["chunk"].tobytes())
    return found


def _keys(chunks: "NDArray[np.void]", packs: "NDArray[np.uint32] | int") -> "NDArray[np.uint64]":
    """A number for each chunk in its pack, which another has once in some 10^19."""
    words: NDArray[np.uint64] = np.ascontiguousarray(chunks).view("<u8").reshape(-1, 4)[:, 0]
    return words ^ (np.asarray(packs, np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _compared(
    index: ChunkIndex, number: int, listed: Mapping[int, FooterTable], doubted: bytes
) -> tuple[int, int]:
    """The number of a pack's chunks that the index lacks, and of those, and of the `doubted` ones,
    that it places wrongly."""
    table = listed[number]
    where = index.get_many(table["chunk"].tobytes() + doubted)
    found, wrong = where["found"] == 1, 0
    # Other chunks, of unlisted packs, are looked up again later.
    for other in listed.keys() & set(where["pack"][found].tolist()):
        rows = found & (where["pack"] == other)
        wrong += len(set(where[_PLACE][rows].tolist()) - set(listed[other][_PLACE].tolist()))
    return int((~found[: len(table)]).sum()), wrong


def remembered(
    offline_store: OfflineStore, state: State, names: Collection[PackId | None]
) -> dict[PackId, list[PackEntry]]:
    """The chunk index's knowledge of packs; metadata has the kind `UNKNOWN`. Does not open the
    index."""
    packs = {number: pack for number, pack in state.packs.items() if pack.id in names}
    found: dict[PackId, list[PackEntry]] = {}
    path, store = offline_store.chunks_path, offline_store.config.store
    for rows in remains(path, store) if packs else ():
        for number in packs.keys() & set(rows["pack"].tolist()):
            pack = packs[number]
            kind = UNKNOWN if pack.metadata else TENSOR
            found.setdefault(pack.id, []).extend(
                entry._replace(kind=kind) for entry in located_entries(rows[rows["pack"] == number])
            )
    return found
