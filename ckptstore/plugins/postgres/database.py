"""The catalog in PostgreSQL, and the connection to it: transactions with a time limit, and
translated errors.

Each store has its own schema, `ckptstore_<store id>`, so one database holds many stores. A role
needs only the right to create schemas. A transaction without an answer is cut off by this side,
because the client library would wait forever. The catalog's tables change in the same transaction
that appends an entry, so the catalog is never behind.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.plugin.catalogs import (
    Entry,
    Position,
    Queries,
    Rows,
    Tables,
    add_schemas,
    add_statistics,
)
from ckptstore.plugin.model import StoreId
from ckptstore.plugin.text import redact, without
from ckptstore.plugin.work import cached_property, pauses, start, survives_forks

DEADLINE_S = 30.0
"""How long a read is retried while the database is away, and the limit of a transaction."""

CONNECT_TIMEOUT_S = 5
_IDLE_S = 60
"""Limit after which the server ends the transaction of a silent client."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REPEAT = ("40001", "40P01")
"""Serialization failure and deadlock: the transaction was rolled back and is retried."""

T = TypeVar("T")


class Lost(Unavailable):
    """The connection ended, or the server is starting or stopping. The outcome of a COMMIT in
    progress is unknown."""


class Database:
    """The schema of one store in a database. Threads may share it; a forked child connects anew."""

    def __init__(self, url: str, store: StoreId) -> None:
        """Does not connect yet. Raises `InvalidInput` for a URL that is not PostgreSQL's."""
        self._url = _parse(url)
        self.deadline_s = DEADLINE_S
        self._store = store
        survives_forks(self)
        self.schema = f"ckptstore_{store}"

    def forked(self) -> None:
        """Connections of the parent stay with the parent."""
        if engine := vars(self).pop("_engine", None):
            engine.dispose(close=False)

    @property
    def name(self) -> str:
        """The location without credentials."""
        port = f":{self._url.port}" if self._url.port else ""
        return f"postgresql://{self._url.host or 'localhost'}{port}/{self._url.database or ''}"

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run the reads of `work` in one transaction, and retry on a new connection while the
        database is away."""
        return self.repeat(lambda: self._once(work))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which may run twice, in one transaction."""
        return self.read(work)

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Retry `attempt` until it does not raise `Lost`, or until the deadline."""
        deadline = time.monotonic() + self.deadline_s
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                return attempt()
            except Lost:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
        raise AssertionError("pauses do not end")

    @contextmanager
    def transaction(
        self, begin: Callable[[Connection], object] = lambda connection: None
    ) -> Iterator[Connection]:
        """A transaction that the block commits by `connection.commit()`; otherwise it rolls back.
        Errors are translated.

        `begin` is retried on a new connection while the database is away.
        """
        with ExitStack() as stack:
            yield self.repeat(lambda: stack.enter_context(self._begun(begin)))

    @contextmanager
    def _begun(self, begin: Callable[[Connection], object]) -> Iterator[Connection]:
        with self.errors(), self._connected() as connection:
            begin(connection)
            yield connection

    def close(self) -> None:
        if engine := vars(self).pop("_engine", None):
            engine.dispose()

    def _once(self, work: Callable[[Connection], T]) -> T:
        with self.errors(), self._connected() as connection:
            result = work(connection)
            connection.commit()
            return result

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        connection = self._engine.connect()
        try:
            with _ended_after(connection, self.deadline_s):
                yield connection
        except (SQLAlchemyError, Lost):
            # The connection may have been cut off in the middle of a statement.
            connection.invalidate()
            raise
        finally:
            with suppress(SQLAlchemyError):
                connection.close()

    @cached_property
    def _engine(self) -> Engine:
        """The pool of connections. Raises `InvalidInput` if its driver is not installed."""
        settings = {
            "search_path": self.schema,
            "idle_in_transaction_session_timeout": f"{_IDLE_S}s",
        }
        arguments = {
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "connect_timeout": min(CONNECT_TIMEOUT_S, max(int(self.deadline_s), 2)),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        try:
            return create_engine(
                self._url,
                connect_args=arguments,
                isolation_level="READ COMMITTED",
                pool_size=4,
                max_overflow=8,
                pool_recycle=600,
                # Otherwise psycopg would query the server about it on every connection.
                use_native_hstore=False,
            )
        except (ImportError, SQLAlchemyError) as error:
            raise InvalidInput(
                f"cannot use {self.name}: {error}; install ckptstore[postgresql]"
            ) from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate the library's errors within the block."""
        try:
            yield
        except DBAPIError as error:
            raise self._failure(error) from error
        except SQLAlchemyError as error:
            raise Unavailable(
                f"{self.name} does not work as expected: {self._told(error)}; repeat the call"
            ) from error

    def _failure(self, error: DBAPIError) -> CkptStoreError:
        code = str(getattr(error.orig, "sqlstate", None) or "") or _refused(str(error.orig))
        told = f"{self.name}: {self._told(error.orig or error)}"
        if not code and type(error.orig).__name__ in ("DataError", "ProgrammingError"):
            return InvalidInput(f"{told}; PostgreSQL cannot store this")
        if not code or code in _REPEAT or code.startswith(("08", "57P")):
            return Lost(f"{told}; check the database, then repeat")
        if code in ("3F000", "42P01"):
            return NotFound(f"{told}; there is no log of store {self._store} in this database")
        if code == "3D000":
            return InvalidInput(f"{told}; create the database first")
        if code.startswith("28"):
            return InvalidInput(f"{told}; check user, password and the server's access rules")
        if code == "42501":
            return ReadOnly(
                f"{told}; get the right to create schemas in this database (GRANT CREATE ON "
                "DATABASE), or to write to this one"
            )
        if code.startswith("22"):
            return InvalidInput(f"{told}; PostgreSQL cannot store this")
        if code in ("23505", "42P06"):
            return Conflict(f"{told}; another process was faster")
        return Unavailable(f"{told} ({code}); check the database, then repeat")

    def _told(self, error: BaseException) -> str:
        password = frozenset([str(self._url.password)] if self._url.password else [])
        return without(" ".join(str(error).split()), password)


def _refused(said: str) -> str:
    """The code of a final refusal to connect, which the driver reports only in words; empty for
    temporary ones, such as a start."""
    if "FATAL" not in said:
        return ""
    if re.search(r'database "[^"]*" does not exist', said):
        return "3D000"
    return (
        "28000"
        if re.search(
            r'authentication failed|no pg_hba\.conf entry|role "[^"]*" does not exist', said
        )
        else ""
    )


@contextmanager
def at_once(connection: Connection) -> Iterator[None]:
    """Send statements within the block without waiting for their results, which must not be read.

    Over a network, the holder of a lock makes others wait for each round trip.
    """
    # An optional dependency, already found by the engine.
    import psycopg

    raw = connection.connection.driver_connection
    if not isinstance(raw, psycopg.Connection) or not psycopg.Pipeline.is_supported():
        yield
        return
    try:
        with raw.pipeline():
            yield
    except psycopg.Error as error:
        raise DBAPIError.instance(None, None, error, psycopg.Error) from error


def quoted(schema: str) -> str:
    """A schema's name, quoted for SQL."""
    return f'"{schema}"'


def _parse(url: str) -> URL:
    # A port that is no number raises ValueError.
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InvalidInput(
            f"index={redact(url)!r} is no URL; wanted postgresql+psycopg://USER@HOST/DATABASE"
        ) from error
    if parsed.get_backend_name() != "postgresql":
        raise InvalidInput(
            f"index={redact(url)!r}: wanted postgresql+psycopg://USER@HOST/DATABASE, since nothing "
            "else can hold a log"
        )
    return parsed.set(drivername="postgresql+psycopg")


@contextmanager
def _ended_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Cut off the connection if the block takes longer."""
    raw = connection.connection.driver_connection
    assert raw is not None
    # A duplicated descriptor: the connection's may be closed and reused by another file when the
    # time is up.
    # The driver has a separate error for a connection that ended in the pool.
    try:
        watched = socket.socket(fileno=os.dup(raw.fileno()))
    except Exception as error:
        raise Lost("the connection was closed; repeat") from error
    timer = threading.Timer(seconds, _cut, [watched])
    timer.daemon = True
    try:
        start(timer, "no thread can be started to limit the time of a transaction")
    except Unavailable:
        watched.close()
        raise
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        watched.close()


def _cut(watched: socket.socket) -> None:
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)


class PostgresTables(Tables):
    """The catalog's tables, behind a connection within a transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._connection.execute(text(sql), values).fetchall()

    def change(self, sql: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._connection.execute(text(sql), rows)


class PostgresCatalog:
    """The PostgreSQL counterpart of `Catalog`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def position(self) -> Position:
        return self.queries().position()

    def queries(self) -> Queries:
        return Queries(self._ask)

    def fold(self, entries: Iterable[Entry]) -> bool:
        """No-op: entries are folded when they are appended."""
        return True

    def missing_schemas(self) -> list[str]:
        return self.queries().missing_schemas()

    def add_schemas(self, found: Mapping[str, bytes]) -> bool:
        return self._database.write(lambda there: add_schemas(PostgresTables(there), found))

    def add_statistics(self, found: Mapping[bytes, bytes]) -> bool:
        return self._database.write(lambda there: add_statistics(PostgresTables(there), found))

    def reset(self) -> None:
        """No-op: the tables are as trustworthy as the log beside them."""

    def close(self) -> None:
        self._database.close()

    def _ask(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._database.read(lambda connection: PostgresTables(connection).rows(sql, values))
