"""Run by Alembic: brings the tables behind the connection that the caller put into the
configuration up to the wanted revision."""

from alembic import context

from ckptstore.index.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
