"""Put in place, read and replace the file of a catalog, with the standard library alone, so that
commands need not import SQLAlchemy.

Replacing the file and the first look at it are serialized by a lock on `<path>.lock`: the journal
of one process must never be applied to a file that another process has just put there.
"""

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from ckptstore.core import forks
from ckptstore.core.forks import Condition, halts_for_forks
from ckptstore.core.ids import StoreId
from ckptstore.core.paths import is_plain, make_index_directory, write_file
from ckptstore.core.process import file_lock
from ckptstore.errors import Corrupt, Unavailable
from ckptstore.index.queries import Ask, Queries, Rows

REVISION = "0006"
"""The revision of `migrations/` that these queries and `tables` require."""

_BUSY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}


class _Calls:
    """The calls of SQLite in progress in this process. None is at a fork: a child would inherit
    locks within SQLite that nobody releases, and wait for them for ever."""

    def __init__(self) -> None:
        self.forked()
        halts_for_forks(self, turn=2)

    def forked(self) -> None:
        self._changed, self._halting = Condition(), False
        self._inside: set[int] = set()

    def halt(self) -> None:
        self._changed.acquire()
        self._halting = True
        self._changed.wait_for(lambda: self._inside <= {threading.get_ident()}, _FORK_TIMEOUT_S)

    def go_on(self) -> None:
        self._halting = False
        self._changed.notify_all()
        self._changed.release()

    @contextmanager
    def one(self, *, waits: bool = True) -> Iterator[None]:
        """A block with one call of SQLite, or several that wait for nothing else; blocks nest.
        Without `waits`, it does not wait for a fork to end: for calls by the garbage collector,
        which may run on the thread that forks."""
        me = threading.get_ident()
        if me in self._inside:
            yield
            return
        try:
            with self._changed:
                if waits:
                    self._changed.wait_for(lambda: not self._halting)
                self._inside.add(me)
            yield
        finally:
            # In C: an interrupt may end anything that is written in Python.
            self._inside.discard(me)
            with self._changed:
                self._changed.notify_all()


_FORK_TIMEOUT_S = 30.0
"""So that a fork does not wait for ever for a disk that does not answer."""

calls = _Calls()
"""Every call of SQLite is made within `calls.one()`."""


def closer(connection: sqlite3.Connection) -> Callable[[], None]:
    """A function that closes a connection, on any thread."""

    def close() -> None:
        with calls.one(waits=False):
            connection.close()

    return close


def close_with(owner: object, close: Callable[[], None]) -> None:
    """Close when `owner` is garbage, unless it was closed before. sqlite3's connections are part of
    a cycle: garbage collection alone would keep the file open for long, and close it during a fork.
    """
    weakref.finalize(owner, close).atexit = False


def open_catalog(path: str | PathLike[str], store: StoreId) -> Queries | None:
    """Queries on the catalog of `store` at `path`, or None if there is no readable one. Threads may
    share them."""
    try:
        with calls.one():
            connection = _connect(Path(path))
    except (sqlite3.Error, UnicodeError):
        return None
    lock = forks.lock()

    def ask(sql: str, values: Mapping[str, Any]) -> Rows:
        try:
            with lock, calls.one():
                return connection.execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise catalog_error(error, str(path)) from error

    close = closer(connection)
    try:
        if is_current(ask, store):
            queries = Queries(ask, close)
            close_with(queries, close)
            return queries
    except (Corrupt, Unavailable):
        pass
    close()
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
    if not _is_plain_database(path):
        raise sqlite3.OperationalError(f"{path} is no regular file, or one beside it is none")
    place = path.absolute().as_uri()
    connection = sqlite3.connect(
        f"{place}?mode=ro", uri=True, timeout=5, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if not isinstance(error, sqlite3.OperationalError) or not path.exists():
            raise
        if wal.exists() and wal.stat().st_size:
            raise
        return sqlite3.connect(
            f"{place}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )
    return connection


LOCK_TIMEOUT_S = 2.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")


def prepare(
    path: Path,
    usable: Callable[[bool], bool],
    fill: Callable[[Path], None],
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> bool:
    """Ensure that a usable file is at `path`; False if the lock is busy.

    `usable` looks at the file; its argument says whether it may change it. Otherwise `fill` makes
    a new one out of an empty file. Raises `OSError` if the directory cannot be written.
    """
    make_index_directory(path.parent)
    for exclusive in (False, True):
        with file_lock(beside(path, ".lock"), timeout_s=timeout_s, exclusive=exclusive) as held:
            if held and _is_plain_database(path) and usable(exclusive):
                return True
            if held and exclusive:
                new = beside(path, ".new")
                _unlink(new)
                # SQLite gives its other files the permissions of this one.
                write_file(new, b"")
                fill(new)
                _unlink(path)
                new.rename(path)
                return True
    return False


def remove(path: Path) -> None:
    """Delete the file, so that the next process to open it creates it anew."""
    with file_lock(beside(path, ".lock"), timeout_s=LOCK_TIMEOUT_S) as held:
        if held:
            _unlink(path)


def inode(path: Path) -> int:
    """The file's inode number, 0 if there is none: tells whether it was replaced."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _is_plain_database(path: Path) -> bool:
    """Whether SQLite, which follows links, writes to no file elsewhere when it opens `path`."""
    others = (beside(path, suffix) for suffix in _SUFFIXES if suffix)
    return is_plain(path) and all(is_plain(other) or not os.path.lexists(other) for other in others)


def _unlink(path: Path) -> None:
    for suffix in _SUFFIXES:
        beside(path, suffix).unlink(missing_ok=True)
