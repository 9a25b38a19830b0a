"""What the user hands in and gets back: torch tensors, containers and values."""
