"""Checking a store: log, metadata, packs, stored bytes."""
