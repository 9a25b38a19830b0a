"""Directories of foreign files as commits, and back, byte for byte."""
