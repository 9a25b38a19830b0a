"""The revisions, oldest first; the newest is `index.readable.REVISION`."""
