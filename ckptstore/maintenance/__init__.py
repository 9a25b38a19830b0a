"""Maintenance: retention, garbage collection, checking, repair and mirrors."""
