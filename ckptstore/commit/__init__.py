"""The two journeys of a tensor's bytes: commit and checkout."""
