"""The log in PostgreSQL: an entry is a row, and the catalog's tables change in the same
transaction.

The transaction that numbers an entry holds a lock on the row of the last one; no sequence is used,
so there are no gaps. After its COMMIT each entry is copied to the store's own `log/`, from which a
lost database can be rebuilt. A database that is behind those copies, for example after a restore
from an older backup, refuses appends: they would fork the history.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, text

from ckptstore.errors import Corrupt, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.plugin.catalogs import (
    REVISION,
    Entry,
    Position,
    decode_entry,
    fold_entries,
    make_tables,
    migrate,
    stamp,
)
from ckptstore.plugin.model import StoreId, log_key
from ckptstore.plugin.storage import Storage
from ckptstore.plugins.postgres.database import Database, Lost, PostgresTables, at_once, quoted

_BATCH = 500
_PLACE = (
    "CREATE TABLE place (id SMALLINT PRIMARY KEY, token VARCHAR(32) NOT NULL, copied BIGINT "
    "NOT NULL)"
)

_LOCK = text(
    "WITH turn AS MATERIALIZED (SELECT pg_advisory_xact_lock(:store)) "
    "SELECT position.n, position.hash, position.bytes, place.copied FROM turn, position, place FOR "
    "UPDATE OF position, place"
)
"""The rows are what is locked. Waiters for a row may overtake each other; an advisory lock serves
them in order."""

_COMPARED = "compared with the copies"
"""Marks a connection, until it is lost, to a database that is not behind the copies."""

T = TypeVar("T")

_logger = logging.getLogger("ckptstore")


class PostgresLog:
    """A `LogBackend` in PostgreSQL."""

    is_local = False

    def __init__(self, database: Database, storage: Storage, store: StoreId) -> None:
        self.database = database
        self._storage, self._store = storage, store
        self._in_turn: Connection | None = None
        self._locked: _Locked | None = None
        self._copied = 0

    # -- making and checking --

    def make(self) -> str:
        """Create the store's schema, empty, and return the name of this place. Raises `Conflict` if
        it exists."""
        token = secrets.token_hex(16)

        def work(connection: Connection) -> None:
            connection.execute(text(f"CREATE SCHEMA {quoted(self.database.schema)}"))
            make_tables(connection)
            stamp(PostgresTables(connection), self._store)
            connection.execute(text(_PLACE))
            connection.execute(text("INSERT INTO place VALUES (1, :token, 0)"), {"token": token})

        self.database.write(work)
        return self._name(token)

    def drop(self) -> None:
        """Drop the store's schema: its log is elsewhere, or was never used."""
        self.database.write(
            lambda connection: connection.execute(
                text(f"DROP SCHEMA IF EXISTS {quoted(self.database.schema)} CASCADE")
            )
        )

    def name(self) -> str:
        """The name of this place in `ckptstore.json`. Raises `NotFound` if the database holds no
        log of this store."""
        return self._name(
            self.database.read(
                lambda connection: str(
                    connection.execute(text("SELECT token FROM place")).scalar_one()
                )
            )
        )

    def check(self, place: str) -> None:
        """Raise `InvalidInput` unless `place` names this database."""
        try:
            found = self.name()
        except NotFound as error:
            raise InvalidInput(
                f"the log of store {self._store} is in {place}, and {self.database.name} holds "
                "none of it; name that database, "
                f"or make the log again from its copies: `ckptstore migrate --restore-log`"
            ) from error
        if token_of(found) != token_of(place):
            raise InvalidInput(
                f"the log of store {self._store} is in {place}; {self.database.name} holds another "
                "log of the same store"
            )
        if (revision := self.revision()) != REVISION:
            raise InvalidInput(
                f"the tables in {self.database.name} are of revision {revision}; wanted "
                f"{REVISION}: run `ckptstore migrate`, "
                f"or install the ckptstore that made them"
            )

    def revision(self) -> str:
        """The revision of the tables."""
        return self.database.read(
            lambda connection: str(
                connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
            )
        )

    def migrate(self) -> None:
        """Migrate the tables to this version of ckptstore."""
        self.database.write(migrate)

    def fill(self, entries: Sequence[Entry]) -> None:
        """Fold entries of the store's own log that follow the last one here."""

        def work(connection: Connection) -> None:
            if not fold_entries(PostgresTables(connection), entries):
                raise Corrupt(
                    f"the entries from {entries[0].n} on do not follow on what is in "
                    f"{self.database.name}; run `ckptstore fsck`"
                )
            connection.execute(text("UPDATE place SET copied = :n"), {"n": entries[-1].n})

        if entries:
            self.database.write(work)

    def position(self) -> Position:
        """The position of the last entry."""
        return self.database.read(self._lock).position

    def copy_rest(self) -> None:
        """Ensure that every entry has its copy."""
        at = self.position().n
        if at and (last := self.read(at)) is not None:
            self._copy(0, at, last)

    def adopt(self, place: str) -> None:
        """Take the name `place`: this log was rebuilt from its copies."""
        self.database.write(
            lambda connection: connection.execute(
                text("UPDATE place SET token = :token"), {"token": token_of(place)}
            )
        )

    def _name(self, token: str) -> str:
        return f"{self.database.name}#{token}"

    # -- the log's place --

    def read(self, n: int) -> bytes | None:
        def work(connection: Connection) -> bytes | None:
            found = connection.execute(
                text("SELECT data FROM entries WHERE n = :n"), {"n": n}
            ).scalar()
            return None if found is None else bytes(found)

        return self._ask(work)

    def behind(self, n: int) -> Iterator[Entry]:
        if self._in_turn is not None and self._locked is not None and self._locked.position.n <= n:
            # No other process can have appended since.
            return
        while True:

            def work(connection: Connection, after: int = n) -> list[bytes]:
                sql = text("SELECT data FROM entries WHERE n > :n ORDER BY n LIMIT :limit")
                return [
                    bytes(row[0]) for row in connection.execute(sql, {"n": after, "limit": _BATCH})
                ]

            found = self._ask(work)
            yield from map(decode_entry, found)
            n += len(found)
            if len(found) < _BATCH:
                return

    def has(self, n: int) -> bool:
        return self.read(n) is not None

    def still_has(self, position: Position) -> bool:
        """True: an entry is only ever inserted behind the one that it names."""
        return True

    def create(self, entry: Entry, data: bytes) -> bool:
        in_turn, self._in_turn = self._in_turn, None
        locked, self._locked = self._locked, None
        if in_turn is None or locked is None:
            with self.database.transaction() as connection:
                copied = self._insert(connection, entry, self._lock(connection))
        else:
            try:
                with self.database.errors():
                    copied = self._insert(in_turn, entry, locked)
            except BaseException:
                in_turn.invalidate()  # lest it keep its lock from the next attempt
                raise
        if copied is None:
            return False
        self._copy(copied, entry.n, data)
        return True

    def settle(self, n: int) -> None:
        """Nothing: what can be read was committed."""

    def gathers(self, n: int) -> bool:
        """Never: many rows are one query."""
        return False

    def gather(self, n: int, newest: Sequence[Entry]) -> None:
        """No-op."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A transaction that locks the last entry; `create` ends it."""

        def lock(connection: Connection) -> None:
            self._locked = self._lock(connection)

        with self.database.transaction(lock) as connection:
            self._in_turn = connection
            try:
                yield
            finally:
                self._in_turn = self._locked = None

    def refresh(self) -> None:
        """No-op: a database caches no absent entries."""

    def _ask(self, work: Callable[[Connection], T]) -> T:
        if self._in_turn is not None:
            # Nothing was appended yet, so losing the lock does no harm.
            try:
                with self.database.errors():
                    return work(self._in_turn)
            except Lost:
                self._in_turn.invalidate()
                self._in_turn = None
        return self.database.read(work)

    def _insert(self, connection: Connection, entry: Entry, locked: "_Locked") -> int | None:
        """Insert and COMMIT. Returns the last entry copied before, or None if `entry` is not the
        next one.

        Others wait meanwhile, so it takes few round trips.
        """
        if locked.position != (entry.n - 1, entry.prev_hash, entry.prev_bytes):
            connection.rollback()
            return None
        self._check_not_behind(connection, entry.n)
        copied = max(locked.copied, self._copied)
        together = _with_copied(connection, copied if copied > locked.copied else None)
        tables = PostgresTables(connection)
        fold_entries(tables, [entry], at=locked.position, at_once=together)
        # Until the COMMIT is answered: another database may answer next time.
        connection.info.pop(_COMPARED, None)
        connection.commit()
        connection.info[_COMPARED] = True
        return copied

    def _lock(self, connection: Connection) -> "_Locked":
        """Prevent other appends until the transaction ends."""
        n, digest, size, copied = connection.execute(
            _LOCK, {"store": int(self._store[:15], 16)}
        ).one()
        return _Locked(Position(int(n), str(digest), int(size)), int(copied))

    # -- copies --

    def _check_not_behind(self, connection: Connection, n: int) -> None:
        """Raise `Corrupt` if entry `n`, absent from this database, has a copy; checked once per
        connection, because after a lost one another database may answer."""
        if _COMPARED in connection.info:
            return
        if self._storage.size(log_key(n)) is not None:
            raise Corrupt(
                f"{self.database.name} ends at entry {n - 1} of the log, but {self._storage.url} "
                f"has a copy of entry {n}: it was restored "
                "from an older backup, or is another database; run `ckptstore migrate "
                "--restore-log`"
            )

    def _copy(self, copied: int, n: int, data: bytes) -> None:
        """Copy entries `copied + 1` to `n`, the last of which is `data`. Failed copies are made
        with the next entry."""
        try:
            for m in range(copied + 1, n + 1):
                entry = data if m == n else self.read(m)
                if entry is None or (
                    not self._storage.put_new(log_key(m), entry)
                    and self._storage.read(log_key(m)) != entry
                ):
                    raise Corrupt(
                        f"{log_key(m)} in {self._storage.url} is no copy of entry {m} in "
                        f"{self.database.name}: a fork of the log"
                    )
                self._copied = m
        except (Unavailable, ReadOnly, NotFound) as error:
            _logger.warning(
                "entry %d is in %s but not copied yet: %s", n, self.database.name, error
            )


def token_of(place: str) -> str:
    """A token that identifies the database, independent of its URL."""
    return place.rpartition("#")[2]


@contextmanager
def _with_copied(connection: Connection, copied: int | None) -> Iterator[None]:
    """Like `at_once`, and also send the number of the last copied entry, if it is new."""
    with at_once(connection):
        yield
        if copied is not None:
            connection.execute(text("UPDATE place SET copied = :n"), {"n": copied})


class _Locked(NamedTuple):
    """The locked last entry, and the number of the last copied one."""

    position: Position
    copied: int
