"""Alembic migrations that bring a catalog of an older ckptstore to the current tables.

A catalog can always be folded anew from the log; migrating spares a large store that.
`index.tables` runs the migrations.
"""
