"""The view of fsck and repair on a store: storage and identity from as few files as possible,
never from an index."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.core.config import CHUNK_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, StoreConfig
from ckptstore.core.ids import CONFIG_KEY, log_key
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.open_log import open_log_place
from ckptstore.index.queries import Queries
from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
from ckptstore.log.entries import Position, decode_entry
from ckptstore.log.log import Log
from ckptstore.maintenance.check import Finding, Kind
from ckptstore.maintenance.check.log import list_log, read_chain, read_small
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
from ckptstore.storage.contract import Storage
from ckptstore.storage.registry import open_storage

if TYPE_CHECKING:
    from ckptstore.index.postgres_log import PostgresLog

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
        """The catalog's copies of log entries, as far as it has them."""
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
    read_only: bool = False,
    storage_options: dict[str, Any] | None = None,
    index: str | None = None,
) -> Iterator[OfflineStore]:
    """The offline view of a store in any state.

    Raises `NotFound` if there is none, and `InvalidInput` for another kind of directory or a store
    of a newer format.
    """
    storage = open_storage(os.fspath(place), read_only=read_only, storage_options=storage_options)
    try:
        offline_store = _offline_store(storage, read_only=read_only)
        log = open_log_place(offline_store.config, storage, index)
        try:
            yield replace(offline_store, database=log)
        finally:
            if log is not None:
                log.database.close()
    finally:
        storage.close()


def _offline_store(storage: Storage, *, read_only: bool) -> OfflineStore:
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
    directory = index_directory(storage, config.store, read_only=read_only)
    return OfflineStore(storage, config, directory, problem)


def recover_config(storage: Storage, damaged: bytes) -> StoreConfig | None:
    """What `ckptstore.json` must say so that every commit is read right; None if the store's
    identity is lost: it is what most entries of the log name. What the `damaged` file says counts
    where several values would do."""
    entries = []
    for n in list_log(storage).entries:
        with suppress(CkptStoreError):
            entries.append(decode_entry(read_small(storage, log_key(n)) or b""))
    if not entries:
        return None
    store = Counter(entry.store for entry in entries).most_common(1)[0][0]
    generation = max(entry.generation for entry in entries if entry.store == store)
    contents = Contents(storage, read_chain(storage, store, generation).state)
    compressed = any(
        ((table["kind"] == TENSOR) & (table["codec"] != RAW)).any()
        for table in contents.tables.values()
    )
    said = re.search(rb'"chunk_bytes": ([0-9]{1,9})', damaged)
    fitting = _chunk_sizes(contents)
    likely = (int(said[1]) if said else 0, CHUNK_BYTES, *sorted(fitting))
    chunk_bytes = next((n for n in likely if n in fitting), CHUNK_BYTES)
    codec = "zstd" if compressed or b'"codec": "zstd"' in damaged else "raw"
    return StoreConfig(store, chunk_bytes, codec, generation=generation)


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
