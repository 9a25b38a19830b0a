"""Stores as each format version wrote them, to be read by every later ckptstore."""
