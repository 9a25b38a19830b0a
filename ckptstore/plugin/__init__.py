"""The public surface for plugins: all that code beyond the core may use of it."""
