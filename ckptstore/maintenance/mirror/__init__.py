"""Mirrors: copying commits between stores."""
