"""The catalog: the log folded into SQL tables for queries; opening, updating and replacing it.

Everything in it can be folded again from the log, or measured again. A catalog that is damaged, of
another store or of a newer ckptstore is replaced by an empty one; its position says so, and the
caller folds from there. Appending an entry takes no lock here. Threads and processes may share a
catalog. Folding holds the write lock for a limited time, and is skipped if the lock is busy.
"""

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from ckptstore.core.forks import survives_forks
from ckptstore.core.ids import StoreId
from ckptstore.errors import Corrupt
from ckptstore.index.catalog_fold import (
    Tables,
    add_schemas,
    add_statistics,
    fold_entries,
    fold_state,
    stamp,
)
from ckptstore.index.catalog_sqlite import (
    LOCK_TIMEOUT_S,
    calls,
    catalog_error,
    close_with,
    closer,
    inode,
    is_busy,
    is_current,
    prepare,
    remove,
)
from ckptstore.index.queries import Queries, Rows
from ckptstore.index.tables import CREATE
from ckptstore.log.entries import Entry, Position
from ckptstore.log.state import State

P = ParamSpec("P")

_SLICE = 500
UNUSABLE = (sqlite3.Error, ValueError)
"""Errors of a misbehaving database. SQLite returns the names and texts of a damaged file unchecked.
"""

_REVISION = re.compile(r"\d{4}")


class Catalog:
    """The catalog of one store on this host. Use `open` to get one."""

    def __init__(self, path: Path | None, store: StoreId) -> None:
        self._path, self._store = path, store
        self._file: CatalogFile | None = None
        survives_forks(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], store: StoreId) -> "Catalog":
        """Open the catalog of `store` at `path`: migrate an older one, or start empty if none is
        usable.

        If none can be written, it is kept in memory.
        """
        catalog = cls(Path(path).absolute(), store)
        with catalog.using():
            catalog._opened()
        return catalog

    @classmethod
    def temporary(cls, store: StoreId) -> "Catalog":
        """An empty catalog in memory."""
        return cls(None, store)

    def position(self) -> Position:
        """The last folded entry. Later entries can be folded next."""
        return self.queries().position()

    def queries(self) -> Queries:
        """Queries on the file that is open now. Answers are as of its position or later, even if
        the path is replaced.

        They raise `Corrupt` once this catalog has closed that file.
        """
        with self.using():
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

    def fill(self, state: State, entries: Iterable[Entry]) -> bool:
        """Write `state` and the entries up to it into empty tables. Needs no fold, so it works if
        folding fails. False as `fold`."""
        led_to_it = list(takewhile(lambda entry: entry.n <= state.n, entries))
        return self._write(fold_state, state, led_to_it)

    def missing_schemas(self) -> list[str]:
        """The schemas that commits name and that were not added yet."""
        return self.queries().missing_schemas()

    def add_schemas(self, found: Mapping[str, bytes]) -> bool:
        """Add encoded schemas that commits name, by id. Idempotent. False if the tables could not
        be written."""
        return self._write(add_schemas, found)

    def add_statistics(self, found: Mapping[bytes, bytes]) -> bool:
        """Add measured statistics of chunks, by key. Idempotent. False if the tables could not be
        written."""
        return self._write(add_statistics, found)

    def reset(self) -> None:
        """Start again with empty tables: for `reindex`, and for a catalog ahead of its log. In
        memory, if the file cannot be removed."""
        with self.using():
            self.close()
            if self._path:
                try:
                    remove(self._path)
                except OSError:
                    self._path = None

    def in_memory(self) -> bool:
        """Whether the tables could not be written to a file, and are lost with this process."""
        with self.using():
            return self._opened().in_memory

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self.using():
            if self._file:
                self._file.close()
                self._file = None

    def _write(
        self, work: Callable[Concatenate[Tables, P], bool], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Run `work` in one transaction. A catalog found to be damaged is replaced by an empty
        one."""
        with self.using():
            try:
                with _transaction(self._opened().connection) as tables:
                    return work(tables, *args, **kwargs)
            except UNUSABLE as error:
                if not is_busy(error):
                    self.reset()
                return False

    def _ask(self, file: "CatalogFile", sql: str, values: Mapping[str, Any]) -> Rows:
        with self.using():
            if file is not self._file:
                raise Corrupt(
                    f"the catalog {self._path or 'in memory'} was closed or replaced while it was "
                    "asked; ask again"
                )
            try:
                return SqliteTables(file.connection).rows(sql, values)
            except UNUSABLE as error:
                told = catalog_error(error, str(self._path or "in memory"))
                if isinstance(told, Corrupt):
                    self.reset()
                raise told from error

    def _opened(self) -> "CatalogFile":
        """The file at the path, opened if necessary."""
        if self._file and self._file.replaced():
            self.close()
        if self._file is None:
            self._file = CatalogFile(self._path, self._store)
        return self._file

    @contextmanager
    def using(self) -> Iterator[None]:
        """Use the connection only within this block. Nothing in the block may wait for another
        lock, because a fork waits until the block ends."""
        with self._lock, calls.one():
            yield

    def forked(self) -> None:
        """Leave the parent's connection open: closing it would checkpoint its write-ahead log."""
        self._lock = threading.RLock()
        if self._file:
            _abandoned.append(self._file)
            self._file = None


_abandoned: "list[CatalogFile]" = []
"""Connections of the parent process, never closed here."""


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[Tables]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield SqliteTables(connection)
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


class CatalogFile:
    """A connection to the catalog of `store` at `path`, or in memory if `path` is None or
    unusable."""

    def __init__(self, path: Path | None, store: StoreId) -> None:
        self._file: tuple[Path, int] | None = None
        if path and _prepare(path, store):
            there = inode(path)
            # The disk may also fail between the two calls.
            with suppress(*UNUSABLE):
                self.connection = _connect(path)
                self._file = path, there
        if self._file is None:
            self.connection = _fill(_connect(None), store)
        self.close = closer(self.connection)
        close_with(self, self.close)

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def replaced(self) -> bool:
        """Whether the path leads to another file now."""
        return self._file is not None and inode(self._file[0]) != self._file[1]


def _prepare(path: Path, store: StoreId) -> bool:
    """Ensure that the catalog of `store` is at `path`; False if that is impossible."""
    try:
        return prepare(
            path,
            lambda exclusive: _usable(path, store, migrate=exclusive),
            lambda new: _fill(_connect(new, journal="DELETE"), store).close(),
        )
    except (OSError, sqlite3.Error):
        return False


def _usable(path: Path, store: StoreId, *, migrate: bool) -> bool:
    """Whether the file is a current catalog of `store`; with `migrate`, after migrating it.

    Raises if that cannot be told now.
    """
    try:
        connection = _connect(path)
        try:
            return is_current(SqliteTables(connection).rows, store) or (
                migrate and _migrated(path, connection, store)
            )
        finally:
            connection.close()
    except UNUSABLE as error:
        if is_busy(error):
            raise
        return False


def _migrated(path: Path, connection: sqlite3.Connection, store: StoreId) -> bool:
    """Whether tables of an older revision were migrated; tables of a newer or foreign one are left
    alone."""
    ask = SqliteTables(connection).rows
    if [row[0] for row in ask("SELECT store FROM position", {})] != [store]:
        return False
    # Alembic takes an unknown revision for a command (`-1` goes one back), and stops the process
    # over others.
    if not all(
        _REVISION.fullmatch(str(row[0]))
        for row in ask("SELECT version_num FROM alembic_version", {})
    ):
        return False
    # Needed once per release; SQLAlchemy and Alembic take 0.4 s to import.
    from ckptstore.index.tables import migrate_file

    return migrate_file(partial(_connect, path)) and is_current(ask, store)


def _connect(path: Path | None, *, journal: str = "") -> sqlite3.Connection:
    """One connection for all threads, which serialize their use; transactions are begun
    explicitly."""
    journal = journal or _journal(path)
    connection = sqlite3.connect(
        str(path or _MEMORY), timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in (f"journal_mode={journal}", "synchronous=NORMAL", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
    except UNUSABLE:
        connection.close()
        raise
    return connection


_WRITTEN_BYTES = 4096


def _journal(path: Path | None) -> str:
    """The kind of SQLite's journal for a catalog at `path`.

    With a write-ahead log SQLite maps a file, in which it first writes one byte of each
    `_WRITTEN_BYTES`. Where blocks are smaller, others would have none, and a full disk would end
    the process.
    """
    if path is None:
        return "WAL"
    try:
        return "WAL" if os.statvfs(path.parent).f_frsize >= _WRITTEN_BYTES else "DELETE"
    except OSError:
        return "WAL"


_MEMORY = ":memory:"


def _fill(connection: sqlite3.Connection, store: StoreId) -> sqlite3.Connection:
    """Create the tables of an empty catalog."""
    connection.execute("BEGIN IMMEDIATE")
    make_tables(connection, store)
    connection.execute("COMMIT")
    return connection


class SqliteTables(Tables):
    """The tables behind a connection that begins its transactions explicitly."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._connection.execute(sql, values).fetchall()

    def change(self, sql: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._connection.executemany(sql, rows)


def make_tables(connection: sqlite3.Connection, store: StoreId) -> None:
    """Create the tables of an empty catalog within a transaction."""
    for statement in CREATE.split(";"):
        connection.execute(statement)
    stamp(SqliteTables(connection), store)
