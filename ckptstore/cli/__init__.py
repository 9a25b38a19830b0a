"""The `ckptstore` command."""
