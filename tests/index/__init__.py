"""Tests of the indexes: the catalog and the chunk index."""
