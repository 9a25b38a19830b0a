"""The tables of the catalog: the log folded into rows, and the schemas of its commits.

Portable between SQLite and PostgreSQL. Rows of a commit carry the number `n` of its log entry,
which is shorter than its id. Times and byte counts are 64-bit; a metric that is NaN is stored as
NULL.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    NullPool,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    create_engine,
    text,
)
from sqlalchemy.dialects.sqlite import INTEGER
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

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
    _value("place", default="0"),
    _value("thinned", Text, default="'[]'"),
    _value("lossy", Text, default="'[]'"),
    Index("commits_by_age", "place", "n"),
    Index("commits_by_run", "run", "place", "n"),
    Index("commits_by_step", "run", "step", "place"),
)
"""Commits that were not purged; `forgotten` is the entry that forgot one, or 0.

`place` is a commit's age: its `n`, or the place of the commit that it replaced. `thinned` are the
globs of leaves that are gone and `lossy` those of leaves of lower precision, with dtypes, as JSON.
"""

replaced = Table(
    "replaced",
    metadata,
    _key("id", String(64)),
    _value("commit_id", String(64), index=True),
    sqlite_with_rowid=False,
)
"""Commits whose place another has, or had last; purged ones, too."""

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


def make_tables(connection: Connection) -> None:
    """Create the tables within a transaction. Those of a catalog on SQLite are made by
    `catalog.make_tables`."""
    for statement in creating(connection.dialect):
        connection.exec_driver_sql(statement)


def creating(dialect: Dialect) -> tuple[str, ...]:
    """The statements that create the tables."""
    made: list[CreateTable | CreateIndex] = []
    for table in metadata.sorted_tables:
        if dialect.name == "postgresql":
            _where_on_postgres(table)
        made += [CreateTable(table), *map(CreateIndex, sorted(table.indexes, key=str))]
    return tuple(str(each.compile(dialect=dialect)) for each in made)


def _where_on_postgres(table: Table) -> None:
    """Make the partial indexes of SQLite partial on PostgreSQL. Naming that in the tables would
    import every PostgreSQL driver of SQLAlchemy, asyncio among them, also to migrate a file."""
    for index in table.indexes:
        index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"]


def migrate_file(connect: Callable[[], sqlite3.Connection]) -> bool:
    """Migrate the tables on SQLite to which `connect` connects; False if there is no way from their
    revision. Raises `sqlite3.Error`."""
    from alembic.util import CommandError

    engine = create_engine(
        "sqlite://", isolation_level="AUTOCOMMIT", poolclass=NullPool, creator=connect
    )
    try:
        with engine.connect() as connection:
            migrate(connection)
    except DBAPIError as error:
        raise error.orig or error from error
    except (CommandError, SQLAlchemyError):
        return False
    return True


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
