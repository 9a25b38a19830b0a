"""Keep statistics of chunks, so that the history of a tensor is read once."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Statistics are made when somebody asks for them."""
    op.create_table(
        "statistics",
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
