"""Read-only catalog queries with the standard library alone, so that commands need not import
SQLAlchemy."""

import sqlite3
import threading
import weakref
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ckptstore.core.ids import StoreId
from ckptstore.errors import Corrupt, Unavailable
from ckptstore.index.queries import Ask, Queries, Rows

REVISION = "0003"
"""The revision of `migrations/` that these queries and `tables` require."""

_BUSY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}


def open_catalog(path: str | PathLike[str], store: StoreId) -> Queries | None:
    """Queries on the catalog of `store` at `path`, or None if there is no readable one. Threads may
    share them."""
    try:
        connection = _connect(Path(path))
    except (sqlite3.Error, UnicodeError):
        return None
    lock = threading.Lock()

    def ask(sql: str, values: Mapping[str, Any]) -> Rows:
        try:
            with lock:
                return connection.execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise catalog_error(error, str(path)) from error

    try:
        if is_current(ask, store):
            queries = Queries(ask, connection.close)
            # sqlite3's connections are part of a cycle: garbage collection alone would keep the
            # file open for long.
            weakref.finalize(queries, connection.close).atexit = False
            return queries
    except (Corrupt, Unavailable):
        pass
    connection.close()
    return None


def is_current(ask: Ask, store: StoreId) -> bool:
    """Whether a catalog is of `store` and of the revision that these queries require."""
    revisions, stores = (
        ask("SELECT version_num FROM alembic_version", {}),
        ask("SELECT store FROM position", {}),
    )
    return [row[0] for row in revisions] == [REVISION] and [row[0] for row in stores] == [store]


def catalog_error(error: BaseException, place: str) -> Corrupt | Unavailable:
    """Translate an error of SQLite for the caller."""
    if is_busy(error):
        return Unavailable(
            f"the catalog {place} did not answer: {error}; repeat the call, or free its disk"
        )
    return Corrupt(f"the catalog {place} is damaged: {error}; run `ckptstore reindex`")


def is_busy(error: BaseException) -> bool:
    """Whether the database is merely locked or out of space, and not damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY


def _connect(path: Path) -> sqlite3.Connection:
    """Connect read-only. In a directory without write permission, a catalog that nobody has open is
    read as it is."""
    place = path.absolute().as_uri()
    connection = sqlite3.connect(
        f"{place}?mode=ro", uri=True, timeout=5, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if not path.exists() or (wal.exists() and wal.stat().st_size):
            raise
        return sqlite3.connect(
            f"{place}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )
    return connection
