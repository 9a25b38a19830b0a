"""Keep schemas as the store encodes them, not as rows of leaves; drop the table of shards, which
was never filled."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """The next process that opens the store adds the schemas from its packs."""
    missing = sa.text("data IS NULL")
    op.drop_table("shards")
    op.drop_table("leaves")
    op.drop_index("schemas_missing", "schemas")
    op.drop_column("schemas", "leaves")
    op.add_column("schemas", sa.Column("data", sa.LargeBinary))
    op.create_index(
        "schemas_missing", "schemas", ["number"], sqlite_where=missing, postgresql_where=missing
    )
