"""The catalog: the log folded into SQL tables for queries; opening, updating and replacing it.

Everything in it can be folded again from the log. A catalog that is damaged, of another store or of
a newer ckptstore is replaced by an empty one; its position says so, and the caller folds from
there. Appending an entry takes no lock here. Threads and processes may share a catalog. Folding
holds the write lock for a limited time, and is skipped if the lock is busy.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.exc import DBAPIError

from ckptstore.core.ids import CommitId, StoreId
from ckptstore.core.model import Schema
from ckptstore.errors import Corrupt
from ckptstore.index import catalog_file, sqlite_file
from ckptstore.index.catalog_file import UNUSABLE, CatalogFile, cause
from ckptstore.index.catalog_fold import CatalogFold, leaf_rows
from ckptstore.index.catalog_sqlite import is_busy
from ckptstore.index.queries import KINDS, Queries, Rows, ShardInfo
from ckptstore.index.tables import commits, leaves, position, schemas, shards
from ckptstore.log.entries import Entry, Position

P = ParamSpec("P")
Within: TypeAlias = AbstractContextManager[object]

_SLICE = 500
_POSITION = select(position.c.n, position.c.hash, position.c.bytes)
_UNFILLED = select(schemas.c.number).where(
    schemas.c.id == bindparam("key"), schemas.c.leaves.is_(None)
)
_FILLED = (
    update(schemas).where(schemas.c.number == bindparam("key")).values(leaves=bindparam("count"))
)
_LEAVES = insert(leaves)
_COMMIT = select(commits.c.n).where(commits.c.id == bindparam("key"))
_SHARDS = insert(shards)
_SHARDED = select(shards.c.n).where(shards.c.n == bindparam("key")).limit(1)
_KIND = {kind: number for number, kind in enumerate(KINDS)}


class Catalog:
    """The catalog of one store on this host. Use `open` to get one."""

    def __init__(self, path: Path | None, store: StoreId) -> None:
        self._path, self._store = path, store
        self.lock = threading.RLock()
        self._file: CatalogFile | None = None
        sqlite_file.survive_forks(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], store: StoreId) -> "Catalog":
        """Open the catalog of `store` at `path`: migrate an older one, or start empty if none is
        usable.

        If none can be written, it is kept in memory.
        """
        catalog = cls(Path(path).absolute(), store)
        catalog._opened()
        return catalog

    @classmethod
    def temporary(cls, store: StoreId) -> "Catalog":
        """An empty catalog in memory."""
        return cls(None, store)

    @property
    def in_memory(self) -> bool:
        """Whether it is lost when the process ends."""
        with self.lock:
            return self._opened().in_memory

    def position(self) -> Position:
        """The last folded entry. Later entries can be folded next."""
        return self.queries().position()

    def queries(self) -> Queries:
        """Queries on the file that is open now. Answers are as of its position or later, even if
        the path is replaced.

        They raise `Corrupt` once this catalog has closed that file.
        """
        with self.lock:
            return Queries(partial(self._ask, self._opened()))

    def fold(self, entries: Iterable[Entry]) -> bool:
        """Fold consecutive `entries`; entries already in the tables are skipped.

        False if they do not follow `position()` or the tables could not be written: read the
        position again later, or go on without.
        """
        remaining = iter(entries)
        while part := list(islice(remaining, _SLICE)):
            if not self._write(fold_entries, part):
                return False
        return True

    def missing_schemas(self) -> list[str]:
        """The schemas that commits name and whose leaves are missing."""
        return self.queries().missing_schemas()

    def add_schema(self, schema_id: str, schema: Schema) -> bool:
        """Add the leaves of a schema that commits name. Idempotent. False if the tables could not
        be written."""
        return self._write(add_schema, schema_id, schema)

    def add_shards(self, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
        """Add the boxes of a multi-rank commit. Idempotent. False if the tables could not be
        written."""
        return self._write(add_shards, commit, boxes)

    def reset(self) -> None:
        """Start again with empty tables: for `reindex`, and for a catalog ahead of its log."""
        with self.lock:
            self.close()
            if self._path:
                sqlite_file.remove(self._path)

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self.lock:
            if self._file:
                self._file.close()
                self._file = None

    def _write(
        self, work: Callable[Concatenate[Connection, P], bool], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Run `work` in one transaction. A catalog found to be damaged is replaced by an empty
        one."""
        with self.lock:
            try:
                with _transaction(self._opened().connection) as connection:
                    return work(connection, *args, **kwargs)
            except UNUSABLE as error:
                if not is_busy(cause(error)):
                    self.reset()
                return False

    def _ask(self, file: CatalogFile, sql: str, values: Mapping[str, Any]) -> Rows:
        with self.lock:
            if file is not self._file:
                raise Corrupt(
                    f"the catalog {self._path or 'in memory'} was closed or replaced while it was "
                    "asked; ask again"
                )
            try:
                return catalog_file.ask(file.connection, sql, values)
            except Corrupt:
                self.reset()
                raise

    def _opened(self) -> CatalogFile:
        """The file at the path, opened if necessary."""
        if self._file and self._file.replaced():
            self.close()
        if self._file is None:
            self._file = CatalogFile(self._path, self._store)
        return self._file

    def forked(self) -> None:
        """Leave the parent's connection open: closing it would checkpoint its write-ahead log."""
        if self._file:
            _abandoned.append(self._file)
            self._file = None


_abandoned: list[CatalogFile] = []
"""Connections of the parent process, never closed here."""


@contextmanager
def _transaction(connection: Connection) -> Iterator[Connection]:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        with suppress(DBAPIError):
            connection.exec_driver_sql("ROLLBACK")
        raise


def fold_entries(
    connection: Connection,
    entries: Sequence[Entry],
    *,
    at: Position | None = None,
    at_once: Callable[[Connection], Within] = nullcontext,
) -> bool:
    """Fold `entries` within a transaction; False if they do not follow the position, which is `at`
    if the caller knows it.

    `at_once` wraps statements whose results nobody needs.
    """
    at = at or Position(*connection.execute(_POSITION).one())
    new = [entry for entry in entries if entry.n > at.n]
    if not new:
        return True
    if (new[0].n - 1, new[0].prev_hash, new[0].prev_bytes) != at:
        return False
    folding = CatalogFold(connection)
    for entry in new:
        folding.add(entry)
    with at_once(connection):
        folding.finish(new[-1])
    return True


def add_schema(connection: Connection, schema_id: str, schema: Schema) -> bool:
    """Add the leaves of a schema within a transaction."""
    number = connection.execute(_UNFILLED, {"key": schema_id}).scalar()
    if number is not None:
        kinds = map(_KIND.__getitem__, schema.kinds)
        columns = zip(
            schema.paths, kinds, schema.dtypes, schema.shapes, schema.aliases, strict=True
        )
        if rows := list(leaf_rows(number, columns)):
            connection.execute(_LEAVES, rows)
        connection.execute(_FILLED, {"key": number, "count": len(schema)})
    return True


def add_shards(connection: Connection, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
    """Add the boxes of a commit within a transaction."""
    n = connection.execute(_COMMIT, {"key": commit}).scalar()
    if n is not None and boxes and not connection.execute(_SHARDED, {"key": n}).first():
        connection.execute(
            _SHARDS, [_shard_row(n, number, box) for number, box in enumerate(boxes)]
        )
    return True


def _shard_row(n: int, number: int, box: ShardInfo) -> dict[str, Any]:
    offsets, lengths = (",".join(map(str, numbers)) for numbers in (box.offsets, box.lengths))
    return {
        "n": n,
        "number": number,
        "path": box.path,
        "rank": box.rank,
        "offsets": offsets,
        "lengths": lengths,
    }
