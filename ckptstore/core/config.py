"""What is a store's fixed configuration, and what are the defaults and limits?

`StoreConfig` is fixed when a store is created; `Settings` are one process's choices.
"""

import os
from dataclasses import dataclass, replace

from ckptstore.core.ids import StoreId
from ckptstore.errors import InvalidInput

MIB = 1 << 20
FORMAT_VERSION = 3
CHUNK_BYTES = 1 * MIB
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 64 * MIB
RUN_BYTES = 8 * MIB
DEFAULT_RUN = "main"
"""The label of commits for which no run is named."""
MIN_STAGING_BYTES = 2 * MIB
"""What memory for staged states is taken in: huge pages."""
PACK_BYTES_LOCAL = 256 * MIB
PACK_BYTES_REMOTE = 64 * MIB
CODECS = ("raw", "zstd")
"""What a store offers new chunks to; with `zstd`, floats are split into byte planes first."""
MESSAGE_BYTES_MAX = 64 << 10
METRICS_MAX = 256
METRIC_NAME_BYTES_MAX = 200
TAGS_MAX = 100
"""What a caller may say about a commit: the log keeps it for good, also when the commit is
forgotten. Names of tags and runs have at most 200 characters."""
LINKS_MAX = 64
LINK_NAME_BYTES_MAX = 200
LINK_BYTES_MAX = 4 << 10
"""Links are in the commit's document alone."""
LOG_FILES = "log/"
"""The log's place where it is in the store itself."""
IN_POSTGRESQL = "postgresql"
"""What a store needs whose log is in PostgreSQL, and how the name of such a place begins."""
READ_FEATURES: frozenset[str] = frozenset([IN_POSTGRESQL])
WRITE_FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The contents of `ckptstore.json` (docs/format.md §2)."""

    store: StoreId
    chunk_bytes: int = CHUNK_BYTES
    codec: str = "raw"
    log_place: str = LOG_FILES
    generation: int = 1
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()

    @property
    def in_database(self) -> bool:
        """Whether the log is in PostgreSQL."""
        return self.log_place.startswith(IN_POSTGRESQL)

    def moved(self, place: str, generation: int) -> "StoreConfig":
        """The same store with its log elsewhere."""
        read = tuple(feature for feature in self.read if feature != IN_POSTGRESQL)
        needed = (*read, IN_POSTGRESQL) if place.startswith(IN_POSTGRESQL) else read
        return replace(self, log_place=place, generation=generation, read=needed)

    @property
    def unknown_write_features(self) -> frozenset[str]:
        """The features that a writer must understand and that this version does not know."""
        return frozenset(self.write) - WRITE_FEATURES


def check_chunk_bytes(n: object) -> int:
    """`n` if it can be a store's chunk size, else `InvalidInput`."""
    if isinstance(n, int) and CHUNK_BYTES_MIN <= n <= CHUNK_BYTES_MAX and n.bit_count() == 1:
        return n
    raise InvalidInput(
        f"chunk_bytes is {n!r}; wanted a power of two from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}, "
        f"such as {CHUNK_BYTES}"
    )


def check_codec(name: object) -> str:
    """`name` if it is a codec, else `InvalidInput`."""
    if name in CODECS:
        return str(name)
    raise InvalidInput(f"codec is {name!r}; wanted one of {', '.join(CODECS)}")


THREADS_MAX = 64
"""More threads than this hash, read and write no faster."""


def default_threads() -> int:
    """The default number of threads that hash, read and write: one more than the usable
    processors, because some wait for the disk; at most four."""
    return min(len(os.sched_getaffinity(0)) + 1, 4)
