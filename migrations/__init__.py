"""How a catalog of an older ckptstore gets the tables of this one: Alembic's environment and its
revisions.

A catalog can always be folded anew from the log; migrating spares a large store that.
`index.catalog_file` runs it.
"""
