"""Numbers of tensors: moments, distances, and their form in the catalog."""

from ckptstore.core.statistics import (
    Moments,
    Statistics,
    added,
    added_moments,
    decode_distance,
    decode_moments,
    decode_statistics,
    encode_distance,
    has_statistics,
    is_measured,
    key_of,
)
