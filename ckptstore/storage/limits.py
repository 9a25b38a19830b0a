"""How large may each kind of object be that is read whole?

A larger object is refused before it is read (docs/format.md §10).
"""

from ckptstore.core.config import MIB
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.errors import Corrupt

CONFIG_BYTES_MAX = 1 * MIB
SESSION_BYTES_MAX = 1 * MIB
ENTRY_BYTES_MAX = 64 * MIB
DOCUMENT_BYTES_MAX = 256 * MIB
CHECKPOINT_BYTES_MAX = 1 << 30
SEGMENT_BYTES_MAX = 256 * MIB
FOOTERS_BYTES_MAX = 256 * MIB
"""The footer of one pack, and a batch of those of a hundred packs."""
CHUNK_BYTES_MAX = 256 * MIB
"""One chunk of whatever kind, as it is stored."""

_BY_PREFIX = (
    ("log/checkpoint-", CHECKPOINT_BYTES_MAX),
    ("log/segment-", SEGMENT_BYTES_MAX),
    ("log/", ENTRY_BYTES_MAX),
    ("commits/", DOCUMENT_BYTES_MAX),
    ("sessions/", SESSION_BYTES_MAX),
    ("footers/", FOOTERS_BYTES_MAX),
    (CONFIG_KEY, CONFIG_BYTES_MAX),
)


def largest(key: str) -> int | None:
    """The size limit of the object at `key` in bytes; None for one that is read in ranges,
    within bounds from its footer."""
    return next((limit for prefix, limit in _BY_PREFIX if key.startswith(prefix)), None)


def check_size(key: str, nbytes: int, where: str) -> None:
    """Raise `Corrupt` for an object larger than any that ckptstore writes under that key."""
    limit = largest(key)
    if limit is not None and nbytes > limit:
        raise Corrupt(
            f"{key} in {where} has {nbytes} bytes; wanted at most {limit}, so it is not read; run "
            "`ckptstore fsck`"
        )
