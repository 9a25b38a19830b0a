"""The tables of a catalog on SQLite, made and changed by the standard library alone, which is
imported in a tenth of the time that SQLAlchemy takes.

`index.tables` defines the tables. A test holds `CREATE` equal to what SQLAlchemy makes of them.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.core.ids import StoreId
from ckptstore.index.catalog_fold import Tables, stamp
from ckptstore.index.queries import Rows

CREATE = """\
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE commit_trees (
    n INTEGER NOT NULL,
    "key" TEXT NOT NULL,
    schema BIGINT NOT NULL,
    PRIMARY KEY (n, "key")
)
 WITHOUT ROWID;
CREATE INDEX ix_commit_trees_schema ON commit_trees (schema);
CREATE TABLE commits (
    n INTEGER NOT NULL,
    id VARCHAR(64) NOT NULL,
    content VARCHAR(64) NOT NULL,
    session VARCHAR(24) NOT NULL,
    run TEXT NOT NULL,
    step BIGINT,
    message TEXT NOT NULL,
    time_ns BIGINT NOT NULL,
    logical_bytes BIGINT NOT NULL,
    new_bytes BIGINT NOT NULL,
    leaves BIGINT NOT NULL,
    forgotten BIGINT DEFAULT 0 NOT NULL,
    place BIGINT DEFAULT 0 NOT NULL,
    thinned TEXT DEFAULT '[]' NOT NULL,
    lossy TEXT DEFAULT '[]' NOT NULL,
    PRIMARY KEY (n),
    UNIQUE (id)
);
CREATE INDEX commits_by_age ON commits (place, n);
CREATE INDEX commits_by_run ON commits (run, place, n);
CREATE INDEX commits_by_step ON commits (run, step, place);
CREATE TABLE entries (
    n INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (n)
);
CREATE TABLE metrics (
    n INTEGER NOT NULL,
    name TEXT NOT NULL,
    value DOUBLE,
    PRIMARY KEY (n, name)
)
 WITHOUT ROWID;
CREATE INDEX metrics_by_value ON metrics (name, value, n);
CREATE TABLE packs (
    number INTEGER NOT NULL,
    id TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    chunks BIGINT NOT NULL,
    metadata BOOLEAN NOT NULL,
    condemned BOOLEAN DEFAULT false NOT NULL,
    PRIMARY KEY (number)
);
CREATE INDEX packs_condemned ON packs (number) WHERE condemned;
CREATE TABLE parents (
    n INTEGER NOT NULL,
    position INTEGER NOT NULL,
    parent VARCHAR(64) NOT NULL,
    PRIMARY KEY (n, position)
)
 WITHOUT ROWID;
CREATE TABLE position (
    id SMALLINT NOT NULL,
    store VARCHAR(32) NOT NULL,
    n BIGINT NOT NULL,
    hash VARCHAR(64) NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE replaced (
    id VARCHAR(64) NOT NULL,
    commit_id VARCHAR(64) NOT NULL,
    PRIMARY KEY (id)
)
 WITHOUT ROWID;
CREATE INDEX ix_replaced_commit_id ON replaced (commit_id);
CREATE TABLE schemas (
    number INTEGER NOT NULL,
    id VARCHAR(64) NOT NULL,
    data BLOB,
    PRIMARY KEY (number),
    UNIQUE (id)
);
CREATE INDEX schemas_missing ON schemas (number) WHERE data IS NULL;
CREATE TABLE statistics (
    "key" BLOB NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY ("key")
)
 WITHOUT ROWID;
CREATE TABLE tags (
    name TEXT NOT NULL,
    commit_id VARCHAR(64) NOT NULL,
    PRIMARY KEY (name)
)
 WITHOUT ROWID;
CREATE INDEX ix_tags_commit_id ON tags (commit_id)"""


class SqliteTables(Tables):
    """The tables behind a connection that begins its transactions explicitly."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._connection.execute(sql, values).fetchall()

    def change(self, sql: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._connection.executemany(sql, rows)


def make_tables(connection: sqlite3.Connection, store: StoreId) -> None:
    """Create the tables of an empty catalog within a transaction."""
    for statement in CREATE.split(";"):
        connection.execute(statement)
    stamp(SqliteTables(connection), store)
