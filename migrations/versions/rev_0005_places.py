"""A commit's place in the history is not its entry's number if it replaced another; leaves that are
gone, and leaves of lower precision."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """No older log replaces commits, so places are the numbers of entries."""
    for name, type_, start in (
        ("place", sa.BigInteger, "0"),
        ("thinned", sa.Text, "'[]'"),
        ("lossy", sa.Text, "'[]'"),
    ):
        column = sa.Column(name, type_, nullable=False, server_default=sa.text(start))
        op.add_column("commits", column)
    op.execute("UPDATE commits SET place = n")
    op.drop_index("commits_by_run", "commits")
    op.drop_index("commits_by_step", "commits")
    op.create_index("commits_by_age", "commits", ["place", "n"])
    op.create_index("commits_by_run", "commits", ["run", "place", "n"])
    op.create_index("commits_by_step", "commits", ["run", "step", "place"])
    op.create_table(
        "replaced",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("commit_id", sa.String(64), nullable=False, index=True),
        sqlite_with_rowid=False,
    )
