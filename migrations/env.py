"""Alembic's entry point: migrates the tables of the connection in its configuration to the
target revision."""

from alembic import context

from ckptstore.index.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
