"""The catalog's SQLite file: open it, migrate it, or replace an unusable one as a whole."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, StaticPool, TextClause, create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ckptstore.core.ids import StoreId
from ckptstore.index import tables
from ckptstore.index.catalog_sqlite import REVISION, catalog_error, is_busy, is_current
from ckptstore.index.queries import Rows
from ckptstore.index.sqlite_file import LOCK_TIMEOUT_S, inode, prepare
from ckptstore.log.entries import origin

UNUSABLE = (SQLAlchemyError, ValueError)
"""Errors of a misbehaving database. SQLite returns the names and texts of a damaged file unchecked.
"""

_REVISION = re.compile(r"\d{4}")


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

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def replaced(self) -> bool:
        """Whether the path leads to another file now."""
        return self._file is not None and inode(self._file[0]) != self._file[1]

    def close(self) -> None:
        _close(self.connection)


def ask(connection: Connection, sql: str, values: Mapping[str, Any]) -> Rows:
    """Run a query of `index.queries`."""
    try:
        return connection.execute(_text(sql), values).fetchall()
    except UNUSABLE as error:
        raise catalog_error(cause(error), str(connection.engine.url.database)) from error


def cause(error: BaseException) -> BaseException:
    """The database's own error behind an SQLAlchemy error."""
    return (error.orig if isinstance(error, DBAPIError) else None) or error


def migrate(connection: Connection) -> None:
    """Migrate the tables to `REVISION` from any revision, or from none."""
    # The import costs 0.25 s and is needed once per release.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migrations() -> Path:
    """The location of Alembic's scripts: inside an installed package, or beside it in a
    checkout."""
    package = Path(__file__).parents[1]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def _prepare(path: Path, store: StoreId) -> bool:
    """Ensure that the catalog of `store` is at `path`; False if that is impossible."""
    try:
        return prepare(
            path,
            lambda exclusive: _usable(path, store, migrate=exclusive),
            lambda new: _close(_fill(_connect(new, journal="DELETE"), store)),
        )
    except (OSError, SQLAlchemyError):
        return False


def _usable(path: Path, store: StoreId, *, migrate: bool) -> bool:
    """Whether the file is a current catalog of `store`; with `migrate`, after migrating it.

    Raises if that cannot be told now.
    """
    try:
        connection = _connect(path)
        try:
            return is_current(lambda sql, values: _rows(connection, sql, values), store) or (
                migrate and _migrated(connection, store)
            )
        finally:
            _close(connection)
    except UNUSABLE as error:
        if is_busy(cause(error)):
            raise
        return False


def _migrated(connection: Connection, store: StoreId) -> bool:
    """Whether tables of an older revision were migrated; tables of a newer or foreign one are left
    alone."""
    from alembic.util import CommandError

    if [row[0] for row in _rows(connection, "SELECT store FROM position", {})] != [store]:
        return False
    # Alembic takes an unknown revision for a command (`-1` goes one back), and stops the process
    # over others.
    if not all(
        _REVISION.fullmatch(str(row[0]))
        for row in _rows(connection, "SELECT version_num FROM alembic_version", {})
    ):
        return False
    try:
        migrate(connection)
    except CommandError:
        return False
    return is_current(lambda sql, values: _rows(connection, sql, values), store)


def _connect(path: Path | None, *, journal: str = "WAL") -> Connection:
    """One connection for all threads, which serialize their use; transactions are begun
    explicitly."""
    engine = create_engine(
        URL.create("sqlite", database=str(path) if path else None),
        isolation_level="AUTOCOMMIT",
        poolclass=StaticPool,
        connect_args={"timeout": LOCK_TIMEOUT_S, "check_same_thread": False},
    )
    connection = engine.connect()
    try:
        for pragma in (f"journal_mode={journal}", "synchronous=NORMAL", "temp_store=MEMORY"):
            connection.exec_driver_sql(f"PRAGMA {pragma}")
    except UNUSABLE:
        _close(connection)
        raise
    return connection


def _fill(connection: Connection, store: StoreId) -> Connection:
    """Create the tables of an empty catalog."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    make_tables(connection, store)
    connection.exec_driver_sql("COMMIT")
    return connection


def make_tables(connection: Connection, store: StoreId) -> None:
    """Create the tables of an empty catalog within a transaction."""
    tables.metadata.create_all(connection, checkfirst=False)
    start = origin(store)
    connection.execute(tables.revision.insert(), {"version_num": REVISION})
    connection.execute(
        tables.position.insert(),
        {"id": 1, "store": store, "n": start.n, "hash": start.hash, "bytes": start.bytes},
    )


def _close(connection: Connection) -> None:
    connection.close()
    connection.engine.dispose()


def _rows(connection: Connection, sql: str, values: Mapping[str, Any]) -> Rows:
    return connection.execute(_text(sql), values).fetchall()


@lru_cache(maxsize=256)
def _text(sql: str) -> TextClause:
    return text(sql)
