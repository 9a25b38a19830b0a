"""Application state: flatten, stage, match and rebuild torch tensors, containers and values."""
