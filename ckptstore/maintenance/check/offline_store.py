"""The view of fsck and repair on a store, from few files and never from an index: configuration,
and every entry of the log, even damaged, exchanged or missing ones, with its caches and tags.

`log.log` stops at the first problem; this module continues, and folds the state as far as it is
known. Each entry attests the hash and length of the one before, so of two that disagree the first
is wrong.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptstore.core.config import CHUNK_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, MIB, StoreConfig
from ckptstore.core.ids import CONFIG_KEY, StoreId, checkpoint_key, log_key, segment_key
from ckptstore.core.model import NO_BASE, CommitInfo
from ckptstore.core.process import Pool
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.index import open_log_place
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.queries import Queries
from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
from ckptstore.log.entries import (
    Commit,
    Entry,
    NewerEntry,
    Position,
    Reduced,
    decode_entry,
    origin,
)
from ckptstore.log.log import Log
from ckptstore.log.log_backend import decode_segment
from ckptstore.log.log_snapshots import decode_state
from ckptstore.log.state import State, apply, genesis
from ckptstore.maintenance.check import Finding, Kind, Severity, foreign
from ckptstore.maintenance.check.trees import Contents, misfits
from ckptstore.objects.codecs import RAW
from ckptstore.objects.documents import decode_config
from ckptstore.objects.pack import TENSOR
from ckptstore.repository.store_handle import (
    CATALOG_NAME,
    CHUNKS_NAME,
    StoreHandle,
    index_directory,
)
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from ckptstore.plugins.postgres.log import PostgresLog

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfflineStore:
    """A store as fsck sees it. `problem` describes a damaged `ckptstore.json`. Then `config` was
    inferred: right for every existing commit."""

    storage: Storage
    config: StoreConfig
    index_directory: Path
    problem: Finding | None = None
    database: "PostgresLog | None" = None

    def open_log(self) -> Log:
        """The log, for appending to it."""
        return Log(self.storage, self.config.store, self.config.generation, place=self.database)

    @property
    def suspect_packs(self) -> SuspectPacks:
        """The packs in which this host has seen damage."""
        return SuspectPacks(self.index_directory / DISTRUST_NAME)

    @property
    def catalog_path(self) -> Path:
        return self.index_directory / CATALOG_NAME

    @property
    def chunks_path(self) -> Path:
        return self.index_directory / CHUNKS_NAME

    def remembered(self) -> Position | None:
        """The last log entry that this host's catalog has seen."""
        return self._ask(lambda catalog: Position(*catalog.position()))

    def copies(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """The catalog's copies of log entries, or those in the database, as far as they exist."""
        if (log := self.database) is not None:
            return {n: data for n in numbers if (data := log.read(n)) is not None}
        found = self._ask(
            lambda catalog: {n: data for n in numbers if (data := catalog.entry(n)) is not None}
        )
        return found or {}

    def _ask(self, question: Callable[[Queries], T]) -> T | None:
        """The catalog's answer, or None if it cannot be read."""
        catalog = open_catalog(self.catalog_path, self.config.store)
        if catalog is None:
            return None
        try:
            return question(catalog)
        except CkptStoreError:
            return None
        finally:
            catalog.close()


def offline_store_of(handle: StoreHandle) -> OfflineStore:
    """The offline view of an opened store."""
    return OfflineStore(
        handle.storage, handle.config, handle.index_directory, database=handle.database
    )


@contextmanager
def open_offline_store(
    place: str | os.PathLike[str],
    *,
    index: str | None = None,
) -> Iterator[OfflineStore]:
    """The offline view of a store in any state.

    Raises `NotFound` if there is none, and `InvalidInput` for another kind of directory or a store
    of a newer format.
    """
    storage = open_storage(os.fspath(place))
    try:
        offline_store = _offline_store(storage)
        log = open_log_place(offline_store.config, storage, index)
        try:
            yield replace(offline_store, database=log)
        finally:
            if log is not None:
                log.database.close()
    finally:
        storage.close()


def _offline_store(storage: Storage) -> OfflineStore:
    data, problem = read_small(storage, CONFIG_KEY), None
    try:
        if data is None:
            raise NotFound(f"no store at {storage.url}: there is no {CONFIG_KEY}")
        config = decode_config(data, storage.url)
    except (Corrupt, InvalidInput, NotFound) as error:
        recovered = recover_config(storage, data or b"")
        if recovered is None:
            raise
        config = recovered
        step = "run `ckptstore repair --apply`, which writes it again"
        problem = Finding(Kind.CONFIG, str(error), step, key=CONFIG_KEY)
    directory = index_directory(storage, config.store, read_only=False)
    return OfflineStore(storage, config, directory, problem)


def recover_config(storage: Storage, damaged: bytes) -> StoreConfig | None:
    """What `ckptstore.json` must say so that every commit is read right; None if the store's
    identity is lost: it is what most entries of the log name. What the `damaged` file says counts
    where several values would do.

    Raises `Corrupt` if the entry is damaged that tells where the log is: who appended elsewhere
    would fork it. Raises `Unavailable` if storage does not return an entry."""
    entries = []
    for n in list_log(storage).entries:
        data = read_small(storage, log_key(n))
        with suppress(CkptStoreError):
            entries.append(decode_entry(data or b""))
    if not entries:
        return None
    store = Counter(entry.store for entry in entries).most_common(1)[0][0]
    generation = max(entry.generation for entry in entries if entry.store == store)
    chain = read_chain(storage, store, generation)
    state = chain.state
    since, place = state.moved or (0, "")
    if generation > max(since, 1) or any(
        b'"kind":"moved"' in (bad.data or b"") for bad in chain.bad
    ):
        raise Corrupt(
            f"{storage.url}: {CONFIG_KEY} is lost, and so is the entry that says where the log "
            "went; restore one of the two from a copy of the store"
        )
    contents = Contents(storage, state)
    compressed = any(
        ((table["kind"] == TENSOR) & (table["codec"] != RAW)).any()
        for table in contents.tables.values()
        if (table["base"] == NO_BASE).all()  # else `compact` has written the pack
    )
    said = re.search(rb'"chunk_bytes": ([0-9]{1,9})', damaged)
    fitting = _chunk_sizes(contents)
    likely = (int(said[1]) if said else 0, CHUNK_BYTES, *sorted(fitting))
    chunk_bytes = next((n for n in likely if n in fitting), CHUNK_BYTES)
    codec = "zstd" if compressed or b'"codec": "zstd"' in damaged else "raw"
    config = StoreConfig(store, chunk_bytes, codec, generation=generation)
    # With the log elsewhere, what lies in `log/` are copies.
    return config.moved(place, generation) if since == generation else config


def _chunk_sizes(contents: Contents) -> set[int]:
    """The chunk sizes that explain the chunk count of every leaf."""
    fitting = {
        CHUNK_BYTES_MIN << i for i in range((CHUNK_BYTES_MAX // CHUNK_BYTES_MIN).bit_length())
    }
    for _, document in contents.documents():
        for key, ref in document.trees:
            with suppress(CkptStoreError):
                fitting -= {n for n in fitting if any(misfits(contents.tree(key, ref, n)))}
    return fitting


ENTRY_BYTES_MAX = 256 * MIB
GAP_MAX = 1000
"""An entry further than this beyond the others is not part of this log, whatever its name says."""

_NAME = re.compile(r"log/(checkpoint-|segment-|)([0-9]{12})")
_SCRATCH = re.compile(r"log/scratch-[0-9a-f]{24}")
_READ_AHEAD = 16
_REPAIR = (
    "run `ckptstore repair`: it knows whether the entry can be made again, from a mirror "
    "with --from"
)


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that is missing (`data` is None) or wrong at `n`; `wanted` is the attested one."""

    n: int
    data: bytes | None
    problem: str
    wanted: Position | None


@dataclass(frozen=True, slots=True)
class BadCache:
    """A checkpoint or segment `key` that does not match this log's own entry `n`."""

    key: str
    n: int
    problem: str


@dataclass(frozen=True, slots=True)
class Chain:
    """The audited log. `state` is exact if `certain`; otherwise it lacks the effects of bad
    entries. `remembered` is the state at the entry known to be in this log, if that was reached.
    `unkept` has, by the number of a commit's entry, `unkept_of` it. `unknown` are foreign keys in
    `log/`."""

    state: State
    remembered: State
    unkept: dict[int, int]
    certain: bool
    head: int
    bad: tuple[BadEntry, ...]
    bad_caches: tuple[BadCache, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The names in `log/`: numbers of entries, checkpoints and segments, in order; `unknown` are
    other keys, and entries too far off."""

    entries: list[int]
    checkpoints: list[int]
    segments: list[int]
    unknown: list[str]


def list_log(storage: Storage) -> LogFiles:
    """List the names in `log/`."""
    files = LogFiles([], [], [], [])
    numbered = {"": files.entries, "checkpoint-": files.checkpoints, "segment-": files.segments}
    for key, _ in storage.list("log/"):
        found = _NAME.fullmatch(key)
        last = files.entries[-1] if files.entries else 0
        if found and (found[1] or 0 < int(found[2]) <= last + GAP_MAX):
            numbered[found[1]].append(int(found[2]))
        elif not _SCRATCH.fullmatch(key):
            files.unknown.append(key)
    return files


def read_chain(
    storage: Storage, store: StoreId, generation: int, *, remembered: Position | None = None
) -> Chain:
    """Examine every entry; `remembered` is an entry known to be in this log, for example by the
    catalog.

    Raises `Conflict` for an entry that only a newer ckptstore can read.
    """
    files = list_log(storage)
    last = max(files.entries, default=0)
    states, ends, bad_caches = _read_caches(storage, files, store, generation)
    witnesses = {n: state.position for n, state in states.items() if n <= last + GAP_MAX}
    if remembered and 0 < remembered.n <= last + GAP_MAX:
        witnesses.setdefault(remembered.n, remembered)
    head = max([last, *witnesses])
    cached = {end.n for end in ends.values()}
    state, certain = genesis(store, generation), True
    then, unkept = state, dict[int, int]()
    applied: dict[int, Position] = {}
    broken: list[BadEntry] = []
    for found in _audited(storage, store, head):
        if isinstance(found, BadEntry):
            broken.append(replace(found, wanted=found.wanted or witnesses.get(found.n)))
            continue
        certain = certain and found.n == state.n + 1
        state = apply(state, found)
        if isinstance(found.body, Commit):
            unkept[found.n] = unkept_of(found.body, found.body.schemas)
        if found.position == remembered:
            then = state
        if found.n in cached:
            applied[found.n] = found.position
        checkpoint = states.get(found.n)
        if not certain and checkpoint and checkpoint.position == found.position:
            state, certain = checkpoint, True
    bad_caches += (
        BadCache(key, end.n, "it does not end with this log's own entry")
        for key, end in ends.items()
        if applied.get(end.n) != end
    )
    unknown = tuple(files.unknown)
    return Chain(state, then, unkept, certain, head, tuple(broken), tuple(bad_caches), unknown)


def unkept_of(said: Commit | CommitInfo, schemas: Iterable[tuple[str, str]]) -> int:
    """A hash, of this process, of what an entry, or the catalog, says of a commit and a state does
    not keep."""
    if isinstance(said, CommitInfo):
        cast = tuple(said.cast.items())
    else:
        cast = said.cast if isinstance(said, Reduced) else ()
    sizes = said.logical_bytes, said.new_bytes, said.leaves
    return hash((said.message, sizes, frozenset(schemas), frozenset(cast)))


def log_findings(chain: Chain) -> Iterator[Finding]:
    """Invalid entries and caches. Pure."""
    for bad in chain.bad:
        state = "is missing" if bad.data is None else "is damaged"
        what = f"entry {bad.n} of the log {state}: {bad.problem}"
        yield Finding(Kind.ENTRY, what, _REPAIR, key=log_key(bad.n), entry=bad.n)
    for cache in chain.bad_caches:
        what = f"{cache.key}, a cache of the log up to entry {cache.n}, is ignored: {cache.problem}"
        step = "run `ckptstore repair --apply`, which removes it"
        yield Finding(Kind.CHECKPOINT, what, step, Severity.INDEX, cache.key, cache.n)
    yield from (foreign(key, "into a log") for key in chain.unknown)
    if not chain.certain:
        what = (
            "what the bad entries did is unknown: commits, tags and packs that only they name "
            "are not in what follows"
        )
        yield Finding(Kind.ENTRY, what, _REPAIR)


def ref_findings(state: State) -> Iterator[Finding]:
    """Tags that name no commit. Pure."""
    for name, commit in sorted(state.tags.items()):
        if commit not in state.commits:
            what = f"tag {name!r} names commit {commit[:12]}, which is not in the log"
            step = f"set it again: `ckptstore tag {name} REF`, or remove it: `ckptstore tag -d "
            yield Finding(Kind.REF, what, f"{step}{name}`")


def decode_at(n: int, data: bytes, store: StoreId) -> Entry:
    """The entry in the file `log/<n>` of `store`; raises `Corrupt`, or `NewerEntry`."""
    entry = decode_entry(data)
    if (entry.n, entry.store) != (n, store):
        raise Corrupt(
            f"the file holds entry {entry.n} of store {entry.store}; wanted entry {n} of store "
            f"{store}"
        )
    return entry


def read_small(storage: Storage, key: str) -> bytes | None:
    """The bytes of a small object; None if it is absent, damaged on the medium, or far too large
    for its kind. Raises `Unavailable` if storage does not return it: it may be sound."""
    try:
        data = storage.read(key, 0, ENTRY_BYTES_MAX + 1)
    except (Corrupt, NotFound):
        return None
    return data if len(data) <= ENTRY_BYTES_MAX else None


def _audited(storage: Storage, store: StoreId, head: int) -> Iterator[Entry | BadEntry]:
    """Every entry up to `head`, in order. Of two neighbors that disagree, the first is wrong."""
    before: Entry | BadEntry | None = None
    before_data: bytes | None = None
    keys = [log_key(n) for n in range(1, head + 1)]
    for n, (_, data) in enumerate(_read_many(storage, keys), 1):
        found = _examined(n, data, store)
        if isinstance(found, Entry):
            attested = Position(n - 1, found.prev_hash, found.prev_bytes)
            if isinstance(before, BadEntry):
                before = replace(before, wanted=attested)
            elif (got := before.position if before else origin(store)) != attested:
                problem = f"entry {n} wants before it the entry {attested}, got {got}"
                if before:
                    before = BadEntry(n - 1, before_data, problem, attested)
                else:
                    # No entry precedes entry 1, so a wrong attestation is its own fault.
                    found = BadEntry(n, None, problem, None)
        if before:
            yield before
        before, before_data = found, data
    if before:
        yield before


def _examined(n: int, data: bytes | None, store: StoreId) -> Entry | BadEntry:
    try:
        return decode_at(n, _there(data), store)
    except NewerEntry:
        raise
    except CkptStoreError as error:
        return BadEntry(n, data, str(error), None)


def _is_gone(storage: Storage, key: str) -> bool:
    try:
        return storage.size(key) is None
    except CkptStoreError:
        return False


def _there(data: bytes | None) -> bytes:
    if data is None:
        raise NotFound("it is missing, or lost on the medium")
    return data


def _read_caches(
    storage: Storage, files: LogFiles, store: StoreId, generation: int
) -> tuple[dict[int, State], dict[str, Position], list[BadCache]]:
    """The checkpoints' states, the last entries of checkpoints and segments by key, and the
    problems of invalid ones."""
    states, ends, bad = dict[int, State](), dict[str, Position](), list[BadCache]()
    numbers = {checkpoint_key(n): n for n in files.checkpoints}
    segments = {segment_key(n): n for n in files.segments}
    for key, data in _read_many(storage, [*numbers, *segments]):
        n = numbers.get(key) or segments[key]
        try:
            if key in segments:
                ends[key] = decode_segment(_there(data), n, store)[-1].position
                continue
            state = decode_state(_there(data), store, generation)
            if state.n != n:
                raise Corrupt(f"it is the state at entry {state.n}")
            states[n], ends[key] = state, state.position
        except (Corrupt, NotFound) as error:
            # Older ones are deleted as new ones are written.
            if not _is_gone(storage, key):
                bad.append(BadCache(key, n, str(error)))
    return states, ends, bad


def _read_many(storage: Storage, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    batch = _READ_AHEAD * 8

    def read(key: str) -> tuple[str, bytes | None]:
        return key, read_small(storage, key)

    with Pool(_READ_AHEAD) as pool:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            yield from pool.map(read, some)
