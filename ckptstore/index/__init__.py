"""Disposable indexes on the host: the catalog of the log in SQL, the chunk index in files."""
