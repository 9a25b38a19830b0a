"""When a training commits."""
