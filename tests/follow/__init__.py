"""Following the commits of a run, in place."""
