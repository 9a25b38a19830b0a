"""A PostgreSQL database as a store's index: connections, transactions that end in time, and what
its errors mean to the caller.

Each store has a schema of its own, `ckptstore_<store id>`, so one database holds many, and a role
without special rights will do that may create schemas in it. A transaction that gets no answer is
cut off from this side: nothing in the client library would ever end it.

The catalog in PostgreSQL: the tables that the log's entries change as they are appended, so it
is never behind.
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

from ckptstore.core.ids import CommitId, StoreId
from ckptstore.core.model import Schema
from ckptstore.core.redaction import redact, without
from ckptstore.core.threads import start
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.index.catalog import add_schema, add_shards
from ckptstore.index.catalog_file import cause
from ckptstore.index.queries import Queries, Rows, ShardInfo
from ckptstore.log.entries import Entry, Position

DEADLINE_S = 30.0
"""So long a question is repeated while the database is away, and a transaction may take."""

CONNECT_TIMEOUT_S = 5
_IDLE_S = 60
"""A client that went silent in a transaction keeps others waiting no longer."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REPEAT = ("40001", "40P01")
"""Serialization failure and deadlock: the transaction was rolled back, and is done again."""

T = TypeVar("T")


class Lost(Unavailable):
    """The connection ended, or the server is shutting down or starting: whether a COMMIT under way
    took place is unknown."""


class Database:
    """The schema of one store in a database. Threads may share it; a forked child connects anew."""

    def __init__(self, url: str, store: StoreId) -> None:
        """Connects to nothing yet. Raises `InvalidInput` for a URL that is none of PostgreSQL's."""
        self._url = _parse(url)
        self._deadline_s = DEADLINE_S
        self._store = store
        self._engine: Engine | None = None
        self._pid = 0
        self.schema = f"ckptstore_{store}"

    @property
    def name(self) -> str:
        """Where it is, without who we are there."""
        port = f":{self._url.port}" if self._url.port else ""
        return f"postgresql://{self._url.host or 'localhost'}{port}/{self._url.database or ''}"

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` reads in a transaction of its own; again with another connection while the
        database is away."""
        return self.repeat(lambda: self._once(work))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Do `work`, which may be done twice, in a transaction of its own."""
        return self.read(work)

    def repeat(self, attempt: Callable[[], T]) -> T:
        """The result of the first `attempt` that does not end in `Lost`, until the deadline."""
        deadline, pause_s = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except Lost:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def transaction(
        self, begin: Callable[[Connection], object] = lambda connection: None
    ) -> Iterator[Connection]:
        """A transaction that the block commits by `connection.commit()`; anything else rolls back.
        Its errors come out as ours.

        What `begin` does first is done again with another connection while the database is away.
        """
        with ExitStack() as stack:
            yield self.repeat(lambda: stack.enter_context(self._begun(begin)))

    @contextmanager
    def _begun(self, begin: Callable[[Connection], object]) -> Iterator[Connection]:
        with self.errors(), self._connected() as connection:
            begin(connection)
            yield connection

    def close(self) -> None:
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()
        self._engine = None

    def _once(self, work: Callable[[Connection], T]) -> T:
        with self.errors(), self._connected() as connection:
            result = work(connection)
            connection.commit()
            return result

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        connection = self._pool().connect()
        try:
            with _ended_after(connection, self._deadline_s):
                yield connection
        except (SQLAlchemyError, Lost):
            connection.invalidate()  # it may have been cut off in the middle of something
            raise
        finally:
            with suppress(SQLAlchemyError):
                connection.close()

    def _pool(self) -> Engine:
        if self._engine is None or self._pid != os.getpid():
            if self._engine is not None:
                self._engine.dispose(close=False)  # the parent's connections stay the parent's
            settings = {
                "search_path": self.schema,
                "idle_in_transaction_session_timeout": f"{_IDLE_S}s",
            }
            arguments = {
                "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
                "connect_timeout": min(CONNECT_TIMEOUT_S, max(int(self._deadline_s), 2)),
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
            }
            try:
                self._engine = create_engine(
                    self._url,
                    connect_args=arguments,
                    isolation_level="READ COMMITTED",
                    pool_size=4,
                    max_overflow=8,
                    pool_recycle=600,
                    # which would ask the server about it on every connection
                    use_native_hstore=False,
                )
            except (ImportError, SQLAlchemyError) as error:
                raise InvalidInput(
                    f"cannot use {self.name}: {error}; install ckptstore[postgresql]"
                ) from error
            self._pid = os.getpid()
        return self._engine

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Within, the library's errors come out as ours."""
        try:
            yield
        except DBAPIError as error:
            raise self._failure(error) from error
        except SQLAlchemyError as error:
            raise Unavailable(
                f"{self.name} does not do as it should: {self._told(error)}; repeat the call"
            ) from error

    def _failure(self, error: DBAPIError) -> CkptStoreError:
        code = str(getattr(error.orig, "sqlstate", None) or "") or _refused(str(error.orig))
        told = f"{self.name}: {self._told(cause(error))}"
        if not code and type(error.orig).__name__ in ("DataError", "ProgrammingError"):
            return InvalidInput(f"{told}; PostgreSQL cannot store this")
        if not code or code in _REPEAT or code.startswith(("08", "57P")):
            return Lost(f"{told}; see to the database, then repeat")
        if code in ("3F000", "42P01"):
            return NotFound(f"{told}; there is no log of store {self._store} in this database")
        if code == "3D000":
            return InvalidInput(f"{told}; make the database first")
        if code.startswith("28"):
            return InvalidInput(f"{told}; see to user and password, and to who may connect")
        if code == "42501":
            return ReadOnly(
                f"{told}; get the right to create schemas in this database (GRANT CREATE ON "
                "DATABASE), or to write to this one"
            )
        if code.startswith("22"):
            return InvalidInput(f"{told}; PostgreSQL cannot store this")
        if code in ("23505", "42P06"):
            return Conflict(f"{told}; somebody else was faster")
        return Unavailable(f"{told} ({code}); see to the database, then repeat")

    def _told(self, error: BaseException) -> str:
        password = frozenset([str(self._url.password)] if self._url.password else [])
        return without(" ".join(str(error).split()), password)


def _refused(said: str) -> str:
    """The code of a final refusal to connect, which the driver tells in words only; nothing for
    what may pass, such as a start."""
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
    """Within, statements are sent without waiting for each other's answers, of which there must be
    none to read.

    Over a network whoever holds a lock keeps the others waiting for each round trip.
    """
    import psycopg  # an extra, which the engine has found

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
    """A schema's name in SQL."""
    return f'"{schema}"'


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError for a port that is no number
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
    """Cut the connection off if the block has not ended by then."""
    raw = connection.connection.driver_connection
    assert raw is not None
    # A descriptor of our own: the connection's may be closed, and be another file's, when the time
    # is up.
    try:
        watched = socket.socket(fileno=os.dup(raw.fileno()))
    except (
        Exception
    ) as error:  # the driver has an error of its own for a connection that ended in the pool
        raise Lost("the connection had ended; repeat") from error
    timer = threading.Timer(seconds, _cut, [watched])
    timer.daemon = True
    try:
        start(timer, "no thread can be started that limits how long the database may take")
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


class PostgresCatalog:
    """What `Catalog` is for a file."""

    in_memory = False

    def __init__(self, database: Database) -> None:
        self._database = database

    def position(self) -> Position:
        return self.queries().position()

    def queries(self) -> Queries:
        return Queries(self._ask)

    def fold(self, entries: Iterable[Entry]) -> bool:
        """Nothing: an entry was folded when it was appended."""
        return True

    def missing_schemas(self) -> list[str]:
        return self.queries().missing_schemas()

    def add_schema(self, schema_id: str, schema: Schema) -> bool:
        return self._database.write(lambda connection: add_schema(connection, schema_id, schema))

    def add_shards(self, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
        return self._database.write(lambda connection: add_shards(connection, commit, boxes))

    def reset(self) -> None:
        """Nothing: the tables are as sound as the log beside them."""

    def close(self) -> None:
        self._database.close()

    def _ask(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._database.read(
            lambda connection: connection.execute(text(sql), values).fetchall()
        )
