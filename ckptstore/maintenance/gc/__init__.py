"""Garbage collection: mark, condemn, copy, delete."""
