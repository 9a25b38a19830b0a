"""The tables of the catalog: the log folded into rows, and the schemas' leaves.

One definition for SQLite and PostgreSQL. Rows of a commit carry the number `n` of its log entry,
which is shorter than its id. Times and byte counts are 64-bit; a metric that is NaN is stored as
NULL.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptstore.core.ids import StoreId
from ckptstore.log.entries import origin

if TYPE_CHECKING:
    from sqlalchemy import Connection

REVISION = "0003"
"""The revision of `migrations/` that makes these tables."""

Execute: TypeAlias = Callable[..., Any]
"""Runs a statement with the named values of one row, or with a list of rows; returns a cursor."""

SQLITE: Mapping[str, str] = {
    # SQLite uses a column of exactly this type as its row id, and then needs no other index.
    "number": "INTEGER",
    "counted": "INTEGER",
    "real": "DOUBLE",
    "bytes": "BLOB",
    "keyed": " WITHOUT ROWID",
}
POSTGRESQL: Mapping[str, str] = {
    "number": "BIGINT",
    "counted": "BIGSERIAL",
    "real": "DOUBLE PRECISION",
    "bytes": "BYTEA",
    "keyed": "",
}

# position: one row, the last folded entry; n is 0 before the first.
# commits: those that were not purged; `forgotten` is the entry that forgot one, or 0.
# packs: those that the log lists, including condemned ones.
# schemas: those that commits name; `leaves` is NULL until their leaves were added.
# leaves: one set of rows per schema, shared by its commits; `kind` indexes `queries.KINDS`, `shape`
#   is lengths with commas.
# shards: the rank that wrote each box of each leaf, for multi-rank commits.
# entries: the bytes of the log's entries; `repair` restores a lost entry from them if its successor
#   attests them.
# alembic_version: Alembic's own table, the revision of these tables.
_TABLES = """
CREATE TABLE position (
    id SMALLINT NOT NULL, store VARCHAR(32) NOT NULL, n BIGINT NOT NULL, hash VARCHAR(64) NOT NULL,
    bytes BIGINT NOT NULL, PRIMARY KEY (id) );
CREATE TABLE commits (
    n {number} NOT NULL, id VARCHAR(64) NOT NULL, content VARCHAR(64) NOT NULL,
    session VARCHAR(24) NOT NULL, run TEXT NOT NULL, step BIGINT, message TEXT NOT NULL,
    time_ns BIGINT NOT NULL, logical_bytes BIGINT NOT NULL, new_bytes BIGINT NOT NULL,
    leaves BIGINT NOT NULL, forgotten BIGINT DEFAULT 0 NOT NULL, PRIMARY KEY (n), UNIQUE (id) );
CREATE INDEX commits_by_run ON commits (run, n);
CREATE INDEX commits_by_step ON commits (run, step, n);
CREATE TABLE parents (
    n {number} NOT NULL, position INTEGER NOT NULL, parent VARCHAR(64) NOT NULL,
    PRIMARY KEY (n, position) ){keyed};
CREATE TABLE metrics (
    n {number} NOT NULL, name TEXT NOT NULL, value {real}, PRIMARY KEY (n, name) ){keyed};
CREATE INDEX metrics_by_value ON metrics (name, value, n);
CREATE TABLE tags (
    name TEXT NOT NULL, commit_id VARCHAR(64) NOT NULL, PRIMARY KEY (name) ){keyed};
CREATE INDEX ix_tags_commit_id ON tags (commit_id);
CREATE TABLE packs (
    number {number} NOT NULL, id TEXT NOT NULL, bytes BIGINT NOT NULL, chunks BIGINT NOT NULL,
    metadata BOOLEAN NOT NULL, condemned BOOLEAN DEFAULT false NOT NULL, PRIMARY KEY (number) );
CREATE INDEX packs_condemned ON packs (number) WHERE condemned;
CREATE TABLE schemas (
    number {counted} NOT NULL, id VARCHAR(64) NOT NULL, leaves BIGINT, PRIMARY KEY (number),
    UNIQUE (id) );
CREATE INDEX schemas_missing ON schemas (number) WHERE leaves IS NULL;
CREATE TABLE commit_trees (
    n {number} NOT NULL, "key" TEXT NOT NULL, schema BIGINT NOT NULL, PRIMARY KEY (n, "key")
    ){keyed};
CREATE INDEX ix_commit_trees_schema ON commit_trees (schema);
CREATE TABLE leaves (
    schema {number} NOT NULL, number INTEGER NOT NULL, path TEXT NOT NULL, kind SMALLINT NOT NULL,
    dtype TEXT NOT NULL, shape TEXT NOT NULL, alias INTEGER NOT NULL, PRIMARY KEY (schema, number)
    ){keyed};
CREATE TABLE shards (
    n {number} NOT NULL, number INTEGER NOT NULL, path TEXT NOT NULL, rank INTEGER NOT NULL,
    offsets TEXT NOT NULL, lengths TEXT NOT NULL, PRIMARY KEY (n, number) ){keyed};
CREATE TABLE entries ( n {number} NOT NULL, data {bytes} NOT NULL, PRIMARY KEY (n) );
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num) )
"""


def make_tables(execute: Execute, store: StoreId, words: Mapping[str, str]) -> None:
    """Create the tables of an empty catalog within a transaction. `words` are a database's."""
    for statement in _TABLES.format(**words).split(";"):
        execute(statement)
    start = origin(store)._asdict()
    execute("INSERT INTO alembic_version VALUES (:revision)", {"revision": REVISION})
    execute("INSERT INTO position VALUES (1, :store, :n, :hash, :bytes)", {"store": store, **start})


def migrate(connection: "Connection") -> None:
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
