"""Housekeeping: retention, garbage collection, checking and mending."""
