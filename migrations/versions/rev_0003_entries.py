"""Add a copy of every log entry, for `ckptstore repair`."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.sqlite import INTEGER

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Entries folded before have no copy until `ckptstore reindex`."""
    op.create_table(
        "entries",
        sa.Column(
            "n",
            sa.BigInteger().with_variant(INTEGER(), "sqlite"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
