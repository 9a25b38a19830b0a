"""A commit and a restore of one state that many ranks hold."""
