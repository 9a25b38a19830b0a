"""A store's parts, found and opened: config, storage, log, catalog, chunks. Without torch, so that queries start fast.

A store exists when its `ckptstore.json` does; it is created exclusively, so of two processes that make one store at once, one makes it
and the other opens it.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.core.config import CHUNK_BYTES, StoreConfig, check_chunk_bytes, check_codec
from ckptstore.core.ids import CONFIG_KEY, StoreId, new_store_id, parse_chunk_id
from ckptstore.core.model import Schema
from ckptstore.core.places import cache_directory, is_network_filesystem
from ckptstore.engine.reserve import ensure_reserve
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.history.entries import Position
from ckptstore.history.log import Log
from ckptstore.index.queries import Queries, open_catalog
from ckptstore.objects.backend import Backend, open_backend
from ckptstore.objects.config import decode_config, encode_config

if TYPE_CHECKING:
    from ckptstore.index.catalog import Catalog
    from ckptstore.objects.store import ObjectStore

logger = logging.getLogger("ckptstore")

CATALOG_NAME = "catalog.sqlite"
CHUNKS_NAME = "chunks.lmdb"


def init_store(
    place: str | os.PathLike[str], *, chunk_bytes: int = CHUNK_BYTES, codec: str = "raw", storage_options: dict[str, Any] | None = None
) -> StoreConfig:
    """Make an empty store at `place`.

    Raises `Conflict` if there is one already, `InvalidInput` for a directory that holds something else, `ReadOnly` or `Unavailable` if it
    cannot be written.
    """
    config = StoreConfig(new_store_id(), check_chunk_bytes(chunk_bytes), check_codec(codec))
    backend = open_backend(os.fspath(place), storage_options=storage_options)
    try:
        if not _is_store(backend):
            _refuse_foreign(backend)
            if backend.put_new(CONFIG_KEY, encode_config(config)):
                ensure_reserve(backend)
                return config
        raise Conflict(f"{backend.url} is a store already; open it, or choose another directory")
    finally:
        backend.close()


class Opening:
    """One process's view of a store. Threads may share it."""

    def __init__(self, place: str | os.PathLike[str], *, read_only: bool = False, storage_options: dict[str, Any] | None = None) -> None:
        self.backend = open_backend(os.fspath(place), read_only=read_only, storage_options=storage_options)
        self.url = self.backend.url
        self.config = _read_config(self.backend)
        self.read_only = read_only
        self.log = Log(self.backend, self.config.store, self.config.generation)

    def check_writable(self) -> None:
        """Raise `ReadOnly` unless this handle may write to the store."""
        if self.read_only:
            raise ReadOnly(f"{self.url} was opened read-only; open it without read_only=True to change it")
        if unknown := self.config.unknown_write_features:
            raise ReadOnly(
                f"{self.url} needs {', '.join(sorted(unknown))} to be written, which this ckptstore does not know: install a newer one"
            )

    @cached_property
    def index_directory(self) -> Path:
        """Where this host keeps its indexes."""
        return index_directory(self.backend, self.config.store, read_only=self.read_only)

    @cached_property
    def objects(self) -> "ObjectStore":
        """The store's chunks, with this host's chunk index."""
        from ckptstore.index.chunks import ChunkIndex
        from ckptstore.objects.store import ObjectStore

        return ObjectStore(self.backend, ChunkIndex.open(self.index_directory / CHUNKS_NAME, self.config.store), self.log)

    @cached_property
    def catalog(self) -> "Catalog":
        """The catalog, for folding; queries go through `queries`."""
        from ckptstore.index.catalog import Catalog

        return Catalog.open(self.index_directory / CATALOG_NAME, self.config.store)

    def warm(self) -> None:
        """Open the indexes and bring them up to the log now, so that the first commit does not pay for it."""
        self.objects.sync(self.log.replay())
        self.follow()

    def queries(self) -> Queries:
        """The catalog's read side, as of the head of the log.

        A catalog that is there and up to date is read without SQLAlchemy. One that cannot be brought up to date, because it is locked or
        its disk is full, is replaced by one in memory for this call; one that turns out to be damaged is made anew.
        """
        quick = open_catalog(self.index_directory / CATALOG_NAME, self.config.store) if "catalog" not in self.__dict__ else None
        if quick is not None:
            queries = quick.or_else(self._made_anew)
            if self._is_head(queries.position()):
                return queries
            quick.close()
        return self._queries_at_head().or_else(self._made_anew)

    def _queries_at_head(self) -> Queries:
        self.follow()
        if self._is_head(self.catalog.position()):
            return self.catalog.queries()
        return self._fold_in_memory()

    def _made_anew(self, error: Corrupt) -> Queries:
        """A catalog is derived, so its damage is no one's loss: begin again with an empty one and fold the log."""
        logger.warning("the catalog of %s is made anew: %s", self.url, error)
        self.catalog.reset()
        return self._queries_at_head()

    def follow(self, schemas: Mapping[str, Schema] | None = None) -> None:
        """Fold into the catalog what the log has beyond it. `schemas` are at hand, by chunk id in hex; others are read from the store.

        Raises `Corrupt` only for a damaged log: a catalog that does not belong to it is made anew, one that cannot be written stays behind,
        and so does any when storage does not answer. What was appended to the log stays acknowledged.
        """
        try:
            try:
                self._fold(schemas or {})
            except Corrupt as error:
                self.log.replay()  # a broken log is not the catalog's fault, and `repair` may need what it remembers
                logger.warning("the catalog of %s is made anew: %s", self.url, error)
                self.catalog.reset()
                self._fold(schemas or {})
        except Unavailable as error:
            logger.warning("the catalog of %s stays behind: %s", self.url, error)

    def _fold(self, schemas: Mapping[str, Schema]) -> None:
        self.catalog.fold(self.log.read_entries(*self.catalog.position()))
        self._add_schemas(self.catalog, schemas)

    def _add_schemas(self, catalog: "Catalog", at_hand: Mapping[str, Schema]) -> None:
        """The leaves of schemas that commits name. One that cannot be read has none in the catalog; `fsck` reports it."""
        from ckptstore.objects.schema import decode_schema

        for schema_id in catalog.missing_schemas():
            with suppress(NotFound, Corrupt):
                schema = at_hand.get(schema_id) or decode_schema(self.objects.read_metadata(parse_chunk_id(schema_id)))
                catalog.add_schema(schema_id, schema)

    def _fold_in_memory(self) -> Queries:
        from ckptstore.index.catalog import Catalog

        catalog = Catalog.temporary(self.config.store)
        catalog.fold(self.log.read_entries())
        self._add_schemas(catalog, {})
        return catalog.queries()

    def _is_head(self, position: Position) -> bool:
        """Whether nothing follows `position` in the log, and the log has it. Raises `Corrupt` if an entry is missing right behind it."""
        if self.log.head_after(position.n + 1):
            self.log.check_no_gap(position.n)
            return False
        return not self.log.head_after(position.n) and self.log.has(position)

    def close(self) -> None:
        """Close what was opened; idempotent."""
        for name in ("objects", "catalog"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()
        self.log.close()
        self.backend.close()


def index_directory(backend: Backend, store: StoreId, *, read_only: bool) -> Path:
    """Where this host keeps the indexes of `store`: in it if it is on a local disk that may be written to, else in the cache directory."""
    root = backend.durable_root
    if root is not None and not read_only and not is_network_filesystem(root) and os.access(root, os.W_OK):
        return root / "index"
    return cache_directory() / store


def _read_config(backend: Backend) -> StoreConfig:
    if not _is_store(backend):
        raise NotFound(
            f"no store at {backend.url}: there is no {CONFIG_KEY}; make one with `ckptstore init {backend.url}`, or check the path"
        )
    return decode_config(backend.read(CONFIG_KEY), backend.url)


def _is_store(backend: Backend) -> bool:
    """Whether there is a store. Raises `Corrupt` for one that lost its `ckptstore.json`: a new one there would bury its commits."""
    if backend.size(CONFIG_KEY) is not None:
        return True
    if next(backend.list("log/"), None):
        raise Corrupt(f"{backend.url} has a log and no {CONFIG_KEY}: it was a store and lost that file; `ckptstore repair` writes it again")
    return False


def _refuse_foreign(backend: Backend) -> None:
    root = backend.durable_root
    if root is None or not root.is_dir():
        return
    ours = {"packs", "commits", "log", "sessions", "index", "tmp", "reserve"}
    foreign = sorted(entry.name for entry in root.iterdir() if entry.name not in ours)
    if foreign:
        raise InvalidInput(
            f"{root} is no store and holds {len(foreign)} other entries ({', '.join(foreign[:3])}…); choose an empty or a new directory"
        )
