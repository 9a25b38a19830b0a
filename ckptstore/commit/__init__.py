"""Commits: plan, hash, write and publish a state, synchronously or in the background."""
