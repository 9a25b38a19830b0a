"""Disposable indexes on the host: the catalog of the log in SQL, and the chunk index."""
