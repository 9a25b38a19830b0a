"""The revisions, oldest first; the newest is `index.queries.REVISION`."""
