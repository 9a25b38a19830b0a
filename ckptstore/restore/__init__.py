"""Restores: plan, read and inflate a commit, wholly or in part."""
