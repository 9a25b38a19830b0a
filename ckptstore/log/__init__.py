"""What happened to the store and in which order: the log, the one authority."""
