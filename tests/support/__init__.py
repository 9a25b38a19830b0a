"""Tools for the work on the project itself."""
