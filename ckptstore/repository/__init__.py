"""Chunks by id: locate, read and verify, deduplicate, write packs."""
