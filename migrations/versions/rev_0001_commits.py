"""Create the tables of commits, their parents, metrics and trees, tags, packs, and the leaves of
schemas."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.sqlite import INTEGER

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(INTEGER(), "sqlite")


def upgrade() -> None:
    _make_position_and_commits()
    _make_parts_of_commits()
    _make_packs_and_schemas()


def _make_position_and_commits() -> None:
    op.create_table(
        "position",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("store", sa.String(32), nullable=False),
        sa.Column("n", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "commits",
        sa.Column("n", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("content", sa.String(64), nullable=False),
        sa.Column("session", sa.String(24), nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("time_ns", sa.BigInteger, nullable=False),
        sa.Column("logical_bytes", sa.BigInteger, nullable=False),
        sa.Column("new_bytes", sa.BigInteger, nullable=False),
        sa.Column("leaves", sa.BigInteger, nullable=False),
        sa.Column("forgotten", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    )
    op.create_index("commits_by_run", "commits", ["run", "n"])
    op.create_index("commits_by_step", "commits", ["run", "step", "n"])


def _make_parts_of_commits() -> None:
    op.create_table(
        "parents",
        sa.Column("n", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.String(64), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metrics",
        sa.Column("n", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Double),
        sqlite_with_rowid=False,
    )
    op.create_index("metrics_by_value", "metrics", ["name", "value", "n"])
    op.create_table(
        "tags",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("commit_id", sa.String(64), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_tags_commit_id", "tags", ["commit_id"])
    op.create_table(
        "commit_trees",
        sa.Column("n", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("schema", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_commit_trees_schema", "commit_trees", ["schema"])


def _make_packs_and_schemas() -> None:
    op.create_table(
        "packs",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("chunks", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.Boolean, nullable=False),
        sa.Column("condemned", sa.Boolean, nullable=False, server_default=sa.text("false")),
    )
    condemned, missing = sa.text("condemned"), sa.text("leaves IS NULL")
    op.create_index(
        "packs_condemned", "packs", ["number"], sqlite_where=condemned, postgresql_where=condemned
    )
    op.create_table(
        "schemas",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("leaves", sa.BigInteger),
    )
    op.create_index(
        "schemas_missing", "schemas", ["number"], sqlite_where=missing, postgresql_where=missing
    )
    op.create_table(
        "leaves",
        sa.Column("schema", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("shape", sa.Text, nullable=False),
        sa.Column("alias", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
