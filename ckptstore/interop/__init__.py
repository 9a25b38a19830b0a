"""Other checkpoint formats and systems on this store."""
