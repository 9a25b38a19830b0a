"""Commits that are averages of others: means, moving averages, arcs between two."""

from ckptstore.plugins.analysis.averages import combine, mean, moving, spherical, weighted

__all__ = ["combine", "mean", "moving", "spherical", "weighted"]
