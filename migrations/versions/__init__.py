"""The revisions, oldest first; the newest is `index.catalog_sqlite.REVISION`."""
