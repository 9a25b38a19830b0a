"""The log: the ordered history of all changes, and the only authority over the store's state."""
