"""Indexes that can be thrown away: the log in SQL, the packs in LMDB."""
