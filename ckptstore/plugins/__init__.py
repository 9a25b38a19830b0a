"""What is built on the store behind its public surface, `ckptstore.plugin`, and never below it."""
