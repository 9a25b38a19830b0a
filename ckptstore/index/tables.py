"""The tables of the catalog: the log folded into rows, and the schemas of its commits.

Portable between SQLite and PostgreSQL. Rows of a commit carry the number `n` of its log entry,
which is shorter than its id. Times and byte counts are 64-bit; a metric that is NaN is stored as
NULL. They are text, since SQLAlchemy takes long to import.

* `position` has one row: the last folded entry. `n` is 0 before the first.
* `commits` has those that were not purged; `forgotten` is the entry that forgot one, or 0. `place`
  is a commit's age: its `n`, or the place of the commit that it replaced. `thinned` are the globs
  of leaves that are gone and `lossy` those of leaves of lower precision, with dtypes, as JSON.
* `replaced` has commits whose place another has, or had last; purged ones, too.
* `packs` are those that the log lists, including condemned ones.
* `schemas` are those that commits name; `data` is canonical JSON, and NULL until it was added.
* `entries` has the bytes of the log's entries. `repair` restores a lost entry from them if its
  successor attests them.
* `statistics` is what was measured of chunks (`core.statistics`).
* `alembic_version` is Alembic's own: the revision of `migrations/` of these tables.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

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

_ON_POSTGRES = (
    (" INTEGER", " BIGINT"),
    ("TABLE schemas (\n    number BIGINT", "TABLE schemas (\n    number BIGSERIAL"),
    ("BLOB", "BYTEA"),
    ("DOUBLE", "DOUBLE PRECISION"),
    ("\n WITHOUT ROWID", ""),
)
"""What SQLite says otherwise than PostgreSQL."""


def make_tables(connection: "Connection") -> None:
    """Create the tables in PostgreSQL within a transaction. Those of a catalog on SQLite are made
    by `catalog.make_tables`."""
    statements = CREATE
    for ours, theirs in _ON_POSTGRES:
        statements = statements.replace(ours, theirs)
    for statement in statements.split(";"):
        connection.exec_driver_sql(statement)


def migrate_file(connect: Callable[[], sqlite3.Connection]) -> bool:
    """Migrate the tables on SQLite to which `connect` connects; False if there is no way from their
    revision. Raises `sqlite3.Error`."""
    from alembic.util import CommandError
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

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
