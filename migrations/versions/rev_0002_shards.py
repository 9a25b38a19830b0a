"""Add the table of shards: which rank wrote which box of which leaf."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.sqlite import INTEGER

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "shards",
        sa.Column(
            "n",
            sa.BigInteger().with_variant(INTEGER(), "sqlite"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("offsets", sa.Text, nullable=False),
        sa.Column("lengths", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
