"""The largest size of each kind of object that is read whole: a larger one is refused before it is
read (docs/format.md §10)."""

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
    """How many bytes the object at `key` has at most; None for one that is read in ranges, which
    its footer bounds."""
    return next((limit for prefix, limit in _BY_PREFIX if key.startswith(prefix)), None)


def check_size(key: str, nbytes: int, where: str) -> None:
    """Raises `Corrupt` for an object that is larger than anything that a ckptstore writes there."""
    limit = largest(key)
    if limit is not None and nbytes > limit:
        raise Corrupt(
            f"{key} in {where} has {nbytes} bytes; wanted at most {limit}, so it is not read; run "
            "`ckptstore fsck`"
        )
