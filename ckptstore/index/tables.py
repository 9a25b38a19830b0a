"""The tables of the catalog: the log folded into rows, and the schemas' leaves.

Portable between SQLite and PostgreSQL. Rows of a commit carry the number `n` of its log entry,
which is shorter than its id. Times and byte counts are 64-bit; a metric that is NaN is stored as
NULL.
"""

from pathlib import Path

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
    text,
)
from sqlalchemy.dialects.sqlite import INTEGER

from ckptstore.core.ids import StoreId
from ckptstore.index.catalog_sqlite import REVISION
from ckptstore.log.entries import origin

metadata = MetaData()

# SQLite uses a column of exactly this type as its row id, and then needs no other index.
_Number = BigInteger().with_variant(INTEGER(), "sqlite")

position = Table(
    "position",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("store", String(32), nullable=False),
    Column("n", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
"""One row: the last folded entry. `n` is 0 before the first."""

commits = Table(
    "commits",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("id", String(64), nullable=False, unique=True),
    Column("content", String(64), nullable=False),
    Column("session", String(24), nullable=False),
    Column("run", Text, nullable=False),
    Column("step", BigInteger),
    Column("message", Text, nullable=False),
    Column("time_ns", BigInteger, nullable=False),
    Column("logical_bytes", BigInteger, nullable=False),
    Column("new_bytes", BigInteger, nullable=False),
    Column("leaves", BigInteger, nullable=False),
    Column("forgotten", BigInteger, nullable=False, server_default=text("0")),
    Index("commits_by_run", "run", "n"),
    Index("commits_by_step", "run", "step", "n"),
)
"""Commits that were not purged; `forgotten` is the entry that forgot one, or 0."""

parents = Table(
    "parents",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("parent", String(64), nullable=False),
    sqlite_with_rowid=False,
)

metrics = Table(
    "metrics",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("value", Double),
    Index("metrics_by_value", "name", "value", "n"),
    sqlite_with_rowid=False,
)

tags = Table(
    "tags",
    metadata,
    Column("name", Text, primary_key=True),
    Column("commit_id", String(64), nullable=False, index=True),
    sqlite_with_rowid=False,
)

packs = Table(
    "packs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("chunks", BigInteger, nullable=False),
    Column("metadata", Boolean, nullable=False),
    Column("condemned", Boolean, nullable=False, server_default=text("false")),
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
    Column("id", String(64), nullable=False, unique=True),
    Column("leaves", BigInteger),
    Index(
        "schemas_missing",
        "number",
        sqlite_where=text("leaves IS NULL"),
        postgresql_where=text("leaves IS NULL"),
    ),
)
"""Schemas that commits name; `leaves` is NULL until their leaves were added."""

commit_trees = Table(
    "commit_trees",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("schema", BigInteger, nullable=False, index=True),
    sqlite_with_rowid=False,
)

leaves = Table(
    "leaves",
    metadata,
    Column("schema", _Number, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("shape", Text, nullable=False),
    Column("alias", Integer, nullable=False),
    sqlite_with_rowid=False,
)
"""One set of rows per schema, shared by its commits. `kind` indexes `queries.KINDS`; `shape` is
lengths with commas."""

shards = Table(
    "shards",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("offsets", Text, nullable=False),
    Column("lengths", Text, nullable=False),
    sqlite_with_rowid=False,
)
"""The rank that wrote each box of each leaf, for multi-rank commits."""

entries = Table(
    "entries",
    metadata,
    Column("n", _Number, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)
"""The bytes of the log's entries. `repair` restores a lost entry from them if its successor attests
them."""

revision = Table(
    "alembic_version",
    metadata,
    Column("version_num", String(32), nullable=False),
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
