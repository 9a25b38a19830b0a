"""Questions about a history of commits: where runs part, what broke them, how far tensors moved."""

from ckptstore.plugins.analysis.runs import (
    Bisection,
    Distance,
    NotCompared,
    Parting,
    bad_number,
    bisect,
    distance,
    norm,
    parting,
)

__all__ = [
    "Bisection",
    "Distance",
    "NotCompared",
    "Parting",
    "bad_number",
    "bisect",
    "distance",
    "norm",
    "parting",
]
