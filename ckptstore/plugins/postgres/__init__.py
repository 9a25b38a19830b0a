"""The log and the catalog of a store in PostgreSQL."""
