"""Mirrors: commits that travel between stores."""
