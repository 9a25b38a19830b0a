"""The tables of the catalog: the log folded into rows, and the schemas of its commits.

Portable between SQLite and PostgreSQL. Rows of a commit carry the number `n` of its log entry,
which is shorter than its id. Times and byte counts are 64-bit; a metric that is NaN is stored as
NULL.

`fold_entries` is `log.state.apply` in SQL. Statements are built once, and rows are gathered over
many entries. A commit costs a dozen short statements, whatever the history, and a thousand commits
little more. Rows of packs are updated only where they change: a commit may reuse all packs, but few
of them are condemned.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    bindparam,
    delete,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import INTEGER

from ckptstore.core.ids import CommitId, StoreId
from ckptstore.core.model import PackRecord
from ckptstore.index.catalog_sqlite import REVISION
from ckptstore.log.entries import (
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Position,
    Register,
    Tag,
    Undelete,
    encode_entry,
    origin,
)

metadata = MetaData()

# SQLite uses a column of exactly this type as its row id, and then needs no other index.
_Number = BigInteger().with_variant(INTEGER(), "sqlite")


def _key(name: str, type_: Any = _Number) -> Column[Any]:
    """A column of the primary key, which the caller gives."""
    return Column(name, type_, primary_key=True, autoincrement=False)


def _value(
    name: str,
    type_: Any = BigInteger,
    *,
    unique: bool | None = None,
    index: bool | None = None,
    default: str | None = None,
) -> Column[Any]:
    """A column that is never NULL."""
    start = None if default is None else text(default)
    return Column(name, type_, nullable=False, unique=unique, index=index, server_default=start)


position = Table(
    "position",
    metadata,
    _key("id", SmallInteger),
    _value("store", String(32)),
    _value("n"),
    _value("hash", String(64)),
    _value("bytes"),
)
"""One row: the last folded entry. `n` is 0 before the first."""

commits = Table(
    "commits",
    metadata,
    _key("n"),
    _value("id", String(64), unique=True),
    _value("content", String(64)),
    _value("session", String(24)),
    _value("run", Text),
    Column("step", BigInteger),
    _value("message", Text),
    _value("time_ns"),
    _value("logical_bytes"),
    _value("new_bytes"),
    _value("leaves"),
    _value("forgotten", default="0"),
    Index("commits_by_run", "run", "n"),
    Index("commits_by_step", "run", "step", "n"),
)
"""Commits that were not purged; `forgotten` is the entry that forgot one, or 0."""

parents = Table(
    "parents",
    metadata,
    _key("n"),
    _key("position", Integer),
    _value("parent", String(64)),
    sqlite_with_rowid=False,
)

metrics = Table(
    "metrics",
    metadata,
    _key("n"),
    _key("name", Text),
    Column("value", Double),
    Index("metrics_by_value", "name", "value", "n"),
    sqlite_with_rowid=False,
)

tags = Table(
    "tags",
    metadata,
    _key("name", Text),
    _value("commit_id", String(64), index=True),
    sqlite_with_rowid=False,
)

packs = Table(
    "packs",
    metadata,
    _key("number"),
    _value("id", Text),
    _value("bytes"),
    _value("chunks"),
    _value("metadata", Boolean),
    _value("condemned", Boolean, default="false"),
    Index(
        "packs_condemned",
        "number",
        sqlite_where=text("condemned"),
        postgresql_where=text("condemned"),
    ),
)
"""Packs that the log lists, including condemned ones."""

schemas = Table(
    "schemas",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    _value("id", String(64), unique=True),
    Column("data", LargeBinary),
    Index(
        "schemas_missing",
        "number",
        sqlite_where=text("data IS NULL"),
        postgresql_where=text("data IS NULL"),
    ),
)
"""Schemas that commits name; `data` is canonical JSON, and NULL until it was added."""

commit_trees = Table(
    "commit_trees",
    metadata,
    _key("n"),
    _key("key", Text),
    _value("schema", index=True),
    sqlite_with_rowid=False,
)

entries = Table(
    "entries",
    metadata,
    _key("n"),
    _value("data", LargeBinary),
)
"""The bytes of the log's entries. `repair` restores a lost entry from them if its successor attests
them."""

statistics = Table(
    "statistics",
    metadata,
    _key("key", LargeBinary),
    _value("data", LargeBinary),
    sqlite_with_rowid=False,
)
"""What was measured of chunks (`core.statistics`)."""

revision = Table(
    "alembic_version",
    metadata,
    _value("version_num", String(32)),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's own table: the revision of `migrations/` of these tables."""


def make_tables(connection: Connection, store: StoreId) -> None:
    """Create the tables of an empty catalog within a transaction."""
    metadata.create_all(connection, checkfirst=False)
    start = origin(store)
    connection.execute(revision.insert(), {"version_num": REVISION})
    connection.execute(
        position.insert(),
        {"id": 1, "store": store, "n": start.n, "hash": start.hash, "bytes": start.bytes},
    )


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


_INSERTED = (entries, commits, parents, metrics, packs, commit_trees, tags)
_INSERT = {table: insert(table) for table in (*_INSERTED, schemas)}
_DELETE_TAG = delete(tags).where(tags.c.name == bindparam("key"))
# Worded as the condition of the index `packs_condemned`; otherwise SQLite would not use it.
_CONDEMNED = select(packs.c.number).where(text("condemned"))
_CONDEMN = (
    update(packs).where(packs.c.number == bindparam("key")).values(condemned=bindparam("value"))
)
_DELETE_PACK = delete(packs).where(packs.c.number == bindparam("key"))
_FORGET = (
    update(commits).where(commits.c.id == bindparam("key")).values(forgotten=bindparam("value"))
)
_SCHEMA = select(schemas.c.number).where(schemas.c.id == bindparam("key"))
_SCHEMAS_OF = select(commit_trees.c.schema).where(commit_trees.c.n == bindparam("key"))
_USES = select(commit_trees.c.n).where(commit_trees.c.schema == bindparam("key")).limit(1)
_COMMIT = select(commits.c.n).where(commits.c.id == bindparam("key"))
_PURGE = tuple(
    delete(table).where(table.c.n == bindparam("key"))
    for table in (commits, parents, metrics, commit_trees)
)
_DROP_SCHEMA = delete(schemas).where(schemas.c.number == bindparam("key"))
_ADD_SCHEMA = (
    update(schemas).where(schemas.c.id == bindparam("key")).values(data=bindparam("value"))
)
_ADD_STATISTICS = text("INSERT INTO statistics VALUES (:key, :data) ON CONFLICT DO NOTHING")
_SET_POSITION = update(position).values(
    n=bindparam("new_n"), hash=bindparam("new_hash"), bytes=bindparam("new_bytes")
)

_POSITION = select(position.c.n, position.c.hash, position.c.bytes)

Within: TypeAlias = AbstractContextManager[object]


class CatalogFold:
    """A batch of entries in one transaction. `finish` writes the gathered rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[Table, list[dict[str, Any]]] = defaultdict(list)
        self._tags: dict[str, CommitId | None] = {}
        self._schemas: dict[str, int] = {}
        self._condemned = {number for (number,) in connection.execute(_CONDEMNED)}

    def add(self, entry: Entry) -> None:
        """Fold the next entry."""
        body, n = entry.body, entry.n
        self._rows[entries].append({"n": n, "data": encode_entry(entry)})
        match body:
            case Commit():
                self._commit(body, n, entry.time_ns)
            case Tag():
                self._tags[body.name] = body.commit
                self._set_condemned(body.reused, False)
            case Forget():
                self._set_forgotten(body.commits, n)
            case Undelete():
                self._set_forgotten(body.commits, 0)
                self._set_condemned(body.reused, False)
            case Condemn():
                self._set_condemned(body.packs, True)
                self._purge(body.purge)
            case Register():
                self._list(body.packs)
                self._set_condemned(body.condemn, True)
            case Delete():
                self._each(_DELETE_PACK, body.packs)
                self._condemned -= body.packs

    def finish(self, last: Entry) -> None:
        """Write the gathered rows; the catalog's position is `last` afterwards."""
        self._flush()
        self._connection.execute(
            _SET_POSITION, {"new_n": last.n, "new_hash": last.hash, "new_bytes": last.bytes}
        )

    def _commit(self, body: Commit, n: int, time_ns: int) -> None:
        self._rows[commits].append(
            {
                "n": n,
                "id": body.commit,
                "content": body.content,
                "session": body.session,
                "run": body.run,
                "step": body.step,
                "message": body.message,
                "time_ns": time_ns,
                "logical_bytes": body.logical_bytes,
                "new_bytes": body.new_bytes,
                "leaves": body.leaves,
            }
        )
        self._rows[parents].extend(
            {"n": n, "position": i, "parent": parent} for i, parent in enumerate(body.parents)
        )
        self._rows[metrics].extend(
            {"n": n, "name": name, "value": None if math.isnan(x) else x}
            for name, x in body.metrics
        )
        self._rows[commit_trees].extend(
            {"n": n, "key": key, "schema": self._schema(schema)} for key, schema in body.schemas
        )
        self._tags.update((name, body.commit) for name in body.tags)
        self._list(body.packs)
        self._set_condemned(body.reused, False)

    def _list(self, records: Iterable[PackRecord]) -> None:
        self._rows[packs].extend(
            {
                "number": p.number,
                "id": p.id,
                "bytes": p.bytes,
                "chunks": p.chunks,
                "metadata": p.metadata,
            }
            for p in records
        )

    def _schema(self, schema: str) -> int:
        number = self._schemas.get(schema)
        if number is None:
            number = self._connection.execute(_SCHEMA, {"key": schema}).scalar()
            if number is None:
                self._connection.execute(_INSERT[schemas], {"id": schema})
                number = int(self._connection.execute(_SCHEMA, {"key": schema}).scalar_one())
            self._schemas[schema] = number
        return number

    def _set_condemned(self, numbers: frozenset[int], condemned: bool) -> None:
        changed = numbers - self._condemned if condemned else numbers & self._condemned
        self._each(_CONDEMN, changed, condemned)
        self._condemned = self._condemned | changed if condemned else self._condemned - changed

    def _set_forgotten(self, ids: Iterable[CommitId], n: int) -> None:
        self._each(_FORGET, ids, n)

    def _purge(self, ids: Iterable[CommitId]) -> None:
        self._flush()
        numbers = [
            n for commit in ids for (n,) in self._connection.execute(_COMMIT, {"key": commit})
        ]
        used = {
            schema
            for n in numbers
            for (schema,) in self._connection.execute(_SCHEMAS_OF, {"key": n})
        }
        for statement in _PURGE:
            self._each(statement, numbers)
        unused = (n for n in used if not self._connection.execute(_USES, {"key": n}).first())
        self._each(_DROP_SCHEMA, unused)
        self._schemas.clear()

    def _each(self, statement: Any, keys: Iterable[int | str], value: int | None = None) -> None:
        """Execute `statement` for each of `keys`, after the rows gathered so far."""
        rows = [{"key": key} if value is None else {"key": key, "value": value} for key in keys]
        if rows:
            self._flush()
            self._connection.execute(statement, rows)

    def _flush(self) -> None:
        if self._tags:
            self._connection.execute(_DELETE_TAG, [{"key": name} for name in self._tags])
            self._rows[tags].extend(
                {"name": name, "commit_id": commit} for name, commit in self._tags.items() if commit
            )
            self._tags.clear()
        for table in _INSERTED:
            if rows := self._rows.pop(table, None):
                self._connection.execute(_INSERT[table], rows)


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


def add_schema(connection: Connection, schema_id: str, data: bytes) -> bool:
    """Add an encoded schema that commits name within a transaction."""
    connection.execute(_ADD_SCHEMA, {"key": schema_id, "value": data})
    return True


def add_statistics(connection: Connection, found: Mapping[bytes, bytes]) -> bool:
    """Add what was measured, by key, within a transaction; what is known stays."""
    rows = [{"key": key, "data": data} for key, data in found.items()]
    connection.execute(_ADD_STATISTICS, rows)
    return True
