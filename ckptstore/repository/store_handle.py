"""How does one process open a store: config, storage, log, catalog, chunks?

Imports no torch, so that queries start fast.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.core.forks import cached_property
from ckptstore.core.ids import StoreId, parse_chunk_id
from ckptstore.core.paths import (
    is_network_filesystem,
    local_cache_directory,
    make_directories,
    rights,
)
from ckptstore.errors import (
    CkptStoreError,
    Corrupt,
    InvalidInput,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.index import open_log_place
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.queries import Other, Queries
from ckptstore.log.entries import Position, check_follows, decode_entry, kind_of
from ckptstore.log.log import Log
from ckptstore.repository.init_store import place_text, read_config
from ckptstore.repository.memory_budget import PatchMemory
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from ckptstore.index.catalog import Catalog
    from ckptstore.plugins.postgres.database import PostgresCatalog
    from ckptstore.repository.chunk_store import ObjectStore

logger = logging.getLogger("ckptstore")

CATALOG_NAME = "catalog.sqlite"
CHUNKS_NAME = "chunks.lmdb"
STATE_NAME = "state"
READ_CACHE_NAME = "read"

_SCHEMAS_AT_ONCE = 512
"""Schemas that are held in memory on their way to the catalog."""


class StoreHandle:
    """One process's view of a store. Threads may share it."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        read_only: bool = False,
        storage_options: dict[str, Any] | None = None,
        direct_io: bool | None = None,
        index: str | None = None,
        of_several: bool = False,
        read_cache_bytes: int = 0,
        patch_memory_bytes: int | None = None,
    ) -> None:
        self._read_cache_bytes = read_cache_bytes
        self.patch_memory = PatchMemory(patch_memory_bytes)
        self.storage = open_storage(
            place_text(place),
            read_only=read_only,
            storage_options=storage_options,
            direct_io=direct_io,
        )
        self.url = self.storage.url
        # What opens the same store the same way elsewhere: a URL may have options, and secrets,
        # which `url` for people has not.
        self.place = os.fspath(place) if self.storage.capabilities.local_root is None else self.url
        self.config = read_config(self.storage)
        self.read_only = read_only
        self._closed = self._has_its_end = False
        self.database = open_log_place(self.config, self.storage, index, of_several)
        self.log = Log(
            self.storage,
            self.config.store,
            self.config.generation,
            place=self.database,
            memory=self._memory(),
            with_config=True,
        )

    def check_writable(self, *, asks_storage: bool = True) -> None:
        """Raise `ReadOnly` unless this handle may write to the store, `InvalidInput` once it was
        closed, `NotFound` if the store is gone, `Corrupt` if the log has lost its end: what is
        appended there would bury commits that were acknowledged. Storage may hang: without
        `asks_storage` it is not looked at."""
        if self._closed:
            raise InvalidInput(f"{self.url} was closed; open it again")
        if self.read_only:
            raise ReadOnly(
                f"{self.url} was opened read-only; open it without read_only=True to change it"
            )
        if unknown := self.config.unknown_write_features:
            raise ReadOnly(
                f"{self.url} needs {', '.join(sorted(unknown))} to be written, which this "
                "ckptstore does not know: install a newer one"
            )
        if not asks_storage:
            return
        self._check_in_place()
        if not self._has_its_end and (lost := self._lost_end()):
            raise Corrupt(lost)
        self._has_its_end = True

    def is_gone(self) -> bool:
        """Whether no store is at this place, not even another one."""
        try:
            read_config(self.storage)
        except NotFound:
            return True
        except CkptStoreError:
            return False
        return False

    def _check_in_place(self) -> None:
        """Refuse a directory that was moved away: the next commit would create it again, with
        that commit alone."""
        if self.storage.capabilities.local_root is None:
            return
        if self.log.state.n:
            self.log.check_head()
            self.log.check_config()
        elif read_config(self.storage).store != self.config.store:
            raise Corrupt(
                f"{self.url} is another store than it was when it was opened; open it again"
            )

    def _lost_end(self) -> str | None:
        """The error text for a log that ends before entries that the catalog beside it has; else
        None.

        A catalog elsewhere on this host proves nothing: it may belong to a newer copy of this
        store.
        """
        root = self.storage.capabilities.local_root
        if self.database is not None or root is None or self.index_directory != root / "index":
            return None
        catalog = open_catalog(self.index_directory / CATALOG_NAME, self.config.store)
        if catalog is None:
            return None
        try:
            remembered = catalog.position().n  # first: others may append meanwhile
            head = self.log.replay(refresh=True).position
            data = catalog.entry(head.n + 1) if head.n < remembered else None
            if data is None:
                return None
            check_follows(decode_entry(data), head, self.config.store)
        except CkptStoreError:
            return None
        finally:
            catalog.close()
        return (
            f"the log of {self.url} ends at entry {head.n}, and the catalog beside it knows the "
            f"entries up to {remembered}, which continue "
            "it: they were acknowledged and are lost from log/; `ckptstore repair --apply` puts "
            "them back from the catalog; if the store "
            f"was set back on purpose, `ckptstore reindex` takes the log as it is"
        )

    def _memory(self) -> Path | None:
        """Where this host caches the log's state: only for a database, and for storage with slow
        requests."""
        slow = self.storage.capabilities.slow_requests or self.database is not None
        return self.index_directory / STATE_NAME if slow else None

    @cached_property
    def index_directory(self) -> Path:
        """Where this host keeps the store's indexes."""
        return index_directory(self.storage, self.config.store, read_only=self.read_only)

    @cached_property
    def objects(self) -> "ObjectStore":
        """The store's chunks, with this host's chunk index."""
        from ckptstore.index.chunks import ChunkIndex
        from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
        from ckptstore.repository.chunk_store import ObjectStore
        from ckptstore.storage.read_cache import ReadCache

        chunks = ChunkIndex.open(self.index_directory / CHUNKS_NAME, self.config.store)
        cached = self._read_cache_bytes > 0 and self.storage.capabilities.slow_requests
        cache = (
            ReadCache(self.index_directory / READ_CACHE_NAME, self._read_cache_bytes)
            if cached
            else None
        )
        return ObjectStore(
            self.storage,
            chunks,
            self.log,
            SuspectPacks(self.index_directory / DISTRUST_NAME),
            cache,
        )

    @cached_property
    def catalog(self) -> "Catalog | PostgresCatalog":
        """The catalog, for folding; queries use `queries`."""
        if self.database is not None:
            from ckptstore.plugins.postgres.database import PostgresCatalog

            return PostgresCatalog(self.database.database)
        from ckptstore.index.catalog import Catalog

        return Catalog.open(self.index_directory / CATALOG_NAME, self.config.store)

    def wait_at_most(self, deadline_s: float) -> None:
        """From now on, stop waiting for a bucket or a database after `deadline_s`."""
        self.storage.deadline_s = min(self.storage.deadline_s, deadline_s)
        if self.database is not None:
            database = self.database.database
            database.deadline_s = min(database.deadline_s, deadline_s)

    def warm(self) -> None:
        """Open the indexes and bring them up to date with the log, so that the first commit does
        not pay for it."""
        self.objects.sync(self.log.replay())
        self.follow()

    def queries(self) -> Queries:
        """The catalog's read side, as of the head of the log.

        An up-to-date catalog is read without SQLAlchemy. If a catalog cannot be updated or read,
        because it is locked or its disk is full, this call uses one in memory. A damaged catalog is
        rebuilt. One in PostgreSQL always matches the log.
        """
        if self.database is not None:
            self.follow()
            return self.catalog.queries()
        quick = (
            open_catalog(self.index_directory / CATALOG_NAME, self.config.store)
            if "catalog" not in self.__dict__
            else None
        )
        if quick is not None:
            queries = quick.or_else(self._instead)
            if self._is_head(queries.position()):
                return queries
            quick.close()
        return self._queries_at_head()

    def _queries_at_head(self) -> Queries:
        self.log.replay()
        if lost := self._lost_end():
            logger.warning("%s", lost)
            return self._fold_in_memory()
        self.follow()
        return self._folded(self._instead)

    def _folded(self, other: Other) -> Queries:
        """The catalog, or `other`, if it could be folded up to the head of the log; else one in
        memory."""
        queries = self.catalog.queries().or_else(other)
        return queries if self._is_head(queries.position()) else self._fold_in_memory()

    def _instead(self, error: Corrupt | Unavailable) -> Queries:
        """Answer from the log, which the catalog is derived from: a damaged one is rebuilt; one
        whose disk is full, or that is locked, is left alone."""
        if isinstance(error, Unavailable):
            logger.warning("the catalog of %s stays behind: %s", self.url, error)
            return self._fold_in_memory()
        logger.warning("the catalog of %s is made anew: %s", self.url, error)
        self.catalog.reset()
        self.follow()
        return self._folded(lambda _: self._fold_in_memory())

    def follow(self) -> None:
        """Fold new log entries into the catalog.

        Raises `Corrupt` only if the log is damaged or has lost its end. A catalog that does not
        belong to the log is rebuilt. A catalog stays behind if it cannot be written, if storage is
        unavailable; `queries` then answers from the log. Log entries stay acknowledged.
        """
        try:
            try:
                self._fold()
            except Corrupt as error:
                # a broken log is not the catalog's fault, and `repair` may need what it remembers
                self.log.replay()
                if lost := self._lost_end():
                    raise Corrupt(lost) from error
                logger.warning("the catalog of %s is made anew: %s", self.url, error)
                self.catalog.reset()
                self._fold()
        except Unavailable as error:
            logger.warning("the catalog of %s stays behind: %s", self.url, error)

    def _fold(self) -> None:
        """Fold the entries that the catalog lacks."""
        from ckptstore.index.catalog import Catalog

        catalog = self.catalog
        if isinstance(catalog, Catalog):
            position = catalog.position()
            known = self.log.known_behind(position)
            folded = catalog.fold(self.log.read_entries(*position) if known is None else known)
            # A catalog that turns out to be damaged is replaced by an empty one.
            if not folded and not catalog.position().n:
                self._fold_anew(catalog)
        self._add_schemas(catalog)

    def _fold_anew(self, catalog: "Catalog") -> None:
        """Fold the whole log into an empty catalog. It is filled from the log's state instead if
        an entry does not fold, which is a fault of this program."""
        from ckptstore.index.catalog import Catalog

        if catalog.fold(self.log.read_entries()):
            return
        trial = Catalog.temporary(self.config.store)
        if trial.fold(self.log.read_entries()):
            return  # the file is locked, or its disk is full
        entry = next(entry for entry in self.log.read_entries() if not trial.fold([entry]))
        logger.error(
            "%s: entry %d of the log (%s) does not fold into the catalog, which is made from the "
            "state of the log instead; the log and the commits are sound: please report it with "
            "the output of `ckptstore fsck`",
            *(self.url, entry.n, kind_of(entry.body)),
        )
        catalog.fill(self.log.replay(), self.log.read_entries())

    def _add_schemas(self, catalog: "Catalog | PostgresCatalog") -> None:
        """Add the schemas that commits name. An unreadable one is missing in the catalog; `fsck`
        reports it."""
        missing = catalog.missing_schemas()
        for start in range(0, len(missing), _SCHEMAS_AT_ONCE):
            if found := self._readable(missing[start : start + _SCHEMAS_AT_ONCE]):
                catalog.add_schemas(found)

    def _readable(self, schemas: Sequence[str]) -> dict[str, bytes]:
        """Those of `schemas` that can be read, encoded."""
        chunks = {schema: parse_chunk_id(schema) for schema in schemas}
        try:
            read = self.objects.read_metadata_many(chunks.values())
            return {schema: read[chunk] for schema, chunk in chunks.items()}
        except (NotFound, Corrupt):
            found = {}
            for schema, chunk in chunks.items():
                with suppress(NotFound, Corrupt):
                    found[schema] = self.objects.read_metadata(chunk)
            return found

    def _fold_in_memory(self) -> Queries:
        from ckptstore.index.catalog import Catalog

        catalog = Catalog.temporary(self.config.store)
        self._fold_anew(catalog)
        if not catalog.position().n and self.log.head_after(0):
            raise Corrupt(f"no catalog can be made of the log of {self.url}, see the errors before")
        self._add_schemas(catalog)
        return catalog.queries()

    def _is_head(self, position: Position) -> bool:
        """Whether `position` is the head of the log. Raises `Corrupt` if the entry right after
        it is missing."""
        if self.log.head_after(position.n + 1):
            self.log.check_no_gap(position.n)
            return False
        return not self.log.head_after(position.n) and self.log.has(position)

    def keep_statistics(self, found: Mapping[bytes, bytes]) -> None:
        """Store measured statistics by key in the catalog, if that can be written."""
        if found and not self.read_only:
            self.catalog.add_statistics(found)

    def close(self) -> None:
        """Close everything that was opened; idempotent. Open snapshots can still be read, but
        nothing can be written."""
        self._closed = True
        for name in ("objects", "catalog"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()
        self.log.close()
        if self.database is not None:
            self.database.database.close()
        self.storage.close()


def index_directory(storage: Storage, store: StoreId, *, read_only: bool) -> Path:
    """Where this host keeps the indexes of `store`.

    In the store itself if that is a writable local disk, else in a local cache directory, under
    the store's id. A store whose path is not Unicode uses the cache directory too, because LMDB
    cannot open such a path; so does one whose `index` is a link, which is not followed.
    """
    root = storage.capabilities.local_root
    if (
        root is not None
        and not read_only
        and _is_unicode(root)
        and not is_network_filesystem(root)
        and os.access(root, os.W_OK)
        and not (root / "index").is_symlink()
    ):
        return root / "index"
    return _like(root, local_cache_directory() / store)


def _is_unicode(path: Path) -> bool:
    try:
        return bool(os.fspath(path).encode())
    except UnicodeEncodeError:
        return False


def _like(root: Path | None, directory: Path) -> Path:
    """`directory`, created with no more permissions than the store at `root`, because an index
    reveals the content."""
    if root is not None:
        with suppress(OSError):
            make_directories(directory.parent)
            directory.mkdir(mode=rights(root), exist_ok=True)
    return directory
