"""Bytes at rest: chunks, packs and documents, and the storage that holds them."""
