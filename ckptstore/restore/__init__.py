"""A commit becomes a state again: plan, read, inflate."""
