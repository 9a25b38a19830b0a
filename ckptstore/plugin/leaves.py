"""Leaves and the sources of their bytes."""

from ckptstore.state.leaf_sources import (
    NAMES,
    NOTHING,
    BytesSource,
    FlatState,
    NotCopied,
    Source,
    StagedSource,
    memory_of,
    pickled_paths,
    rows,
    segment,
    segments,
    shown,
)
