"""What does every storage offer, whether it is a local disk or a bucket?

An object has a key: a path relative to the store's root, with `/` between its parts. `put`,
`put_new` and `Writer.finish` create durable objects; readers see the whole object or nothing.

A finished object is never replaced. Packs, twins, documents and log entries get their names by
an exclusive create, so that a fault above storage cannot change acknowledged bytes. `put` is for
objects that change by design: sessions, the configuration, caches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptstore.core.config import MIB, PACK_BYTES_REMOTE
from ckptstore.core.ids import CONFIG_KEY, SessionId
from ckptstore.errors import Conflict, Corrupt, InvalidInput, ReadOnly

PART_BYTES = 8 * MIB
"""A large object is uploaded in parts of so many bytes. S3 wants at least 5 MiB, and takes at most
10,000 parts."""

COPY = "#copy"
"""Behind a key: not the object that was read under the key, but a copy on another host."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a storage that callers may rely on, beyond the methods of `Storage`."""

    local_root: Path | None = None
    """The directory that holds the objects as files: they can be mapped, linked and given
    permissions. None if objects are not files of this host."""
    slow_requests: bool = True
    """Each request is a network round trip: caches, batches and read-ahead pay off."""
    exclusive_create: bool = False
    """`put_new` is atomic on every server of this kind. If not, it must be tried before use."""
    can_fill_up: bool = False
    """Space is bounded, so the store keeps a reserve for the log entries of a deletion."""
    copies: bool = False
    """Objects lie on several hosts: the key with `COPY` behind it reads a copy on another host."""
    pack_bytes: int = PACK_BYTES_REMOTE
    """The size of pack that new data is written to."""


class Writer(Protocol):
    """A large object written from front to back by one thread at a time; readers see it after
    `finish`."""

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` after the bytes of the last call. The caller may reuse them on return."""

    def finish(self) -> bool:
        """Make the bytes durable and give the object its name; the name is durable after
        `Storage.sync_dirs`.

        Returns True if this writer created the object: if its purpose fails later, the caller
        may delete it. Returns False if an object with the same bytes has the name: this writer's
        own, if an earlier answer was lost, or another writer's. Raises `Conflict` if the name is
        taken by other bytes, which stay. After `Unavailable`, any other failure, the object is
        discarded: after a failed fsync its content is unknown.
        """

    def discard(self) -> None:
        """Delete the object. May be repeated, also after a failed `finish`; does nothing after a
        successful one."""


class OpenFile(Protocol):
    """A file that stays open while this object is referenced."""

    fd: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an object in a local file, which stays open while this lives."""

    key: str
    file: OpenFile
    offset: int
    nbytes: int

    def fileno(self) -> int:
        return self.file.fd


class Storage(Protocol):
    """Objects by key. Thread-safe, and usable in a forked child.

    Raises `NotFound` for an absent object, `Unavailable` if storage does not answer or is full,
    `ReadOnly` if writing is not allowed, `Corrupt` for an object shorter than expected,
    `InvalidInput` for a key outside the root.
    """

    url: str
    capabilities: Capabilities
    deadline_s: float
    """So long a request is repeated that nobody answers. May be set."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes `start:stop` of the object, or fewer at its end."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` in order from `offset` on. Only for objects that never change: they may
        be held open."""

    def open_file(self, key: str) -> OpenFile:
        """An object that never changes, as an open file to map. Raises `InvalidInput` without a
        `local_root`."""

    def is_cached(self, key: str, offset: int) -> bool:
        """Whether this host's memory has the byte at `offset` of an object that never changes.
        False if that is unknown. Never raises."""

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        """The last `nbytes` of the object, or all of a shorter one, and the object's size."""

    def read_ahead(self, sizes: Mapping[str, int]) -> None:
        """Read these objects, which never change and are about to be read, at once and whole.
        Their sizes are given. Each byte, and each tail, is then served once from memory; the
        second time storage is asked, so that what was damaged on the way is read again. The next
        call drops the bytes of this one. Does nothing where requests are quick. Raises for no
        object: what needs it asks again."""

    def size(self, key: str) -> int | None:
        """The object's size in bytes, None if it is absent."""

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        """Create or replace an object atomically. Unless `durable`, a power cut may restore the
        old object or leave it empty."""

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """Create an object atomically and durably. Returns False, and changes nothing, if the
        name is taken.

        After `Unavailable` the object may exist; only a read can tell. After `NoSpace` it does
        not.
        """

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> Writer:
        """A writer for a large object; the remains of a crash carry the name of `session`.

        An `unbuffered` writer avoids buffers where possible and uses more processor time. A
        writer with `aside` yields resources to others, even if it takes longer.
        """

    def sync_dirs(self, keys: Iterable[str]) -> None:
        """Make the names of finished objects durable, each directory once. Does nothing in a
        bucket."""

    def delete(self, key: str) -> None:
        """Delete an object; no error if it is absent."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys that begin with `prefix`, with their sizes, sorted by key. Symbolic links are
        neither listed nor followed."""

    def close(self) -> None:
        """Release open files; the storage must not be used afterwards."""


def check_writable(key: str, url: str, read_only: bool) -> None:
    """Raise `ReadOnly` if nothing may be changed."""
    if read_only:
        raise ReadOnly(
            f"cannot change {key}: {url} was opened for reading only; open it without read_only"
        )


def put_finished(storage: Storage, key: str, data: bytes) -> bool:
    """Create a small durable object that is never replaced. Returns the value of
    `Writer.finish`.

    Raises `Conflict` if other bytes have the name.
    """
    if storage.put_new(key, data):
        return True
    if storage.read(key) == data:
        return False
    raise name_taken(key, storage.url)


def name_taken(key: str, url: str) -> Conflict:
    """The error for an attempt to replace a finished object."""
    return Conflict(
        f"{key} in {url} is finished and is never replaced: another writer has taken that name "
        "with other bytes, which stay; "
        f"repeat what failed, it gets names of its own"
    )


def as_bytes(buffer: memoryview) -> memoryview:
    """The same memory as one dimension of bytes. Casts only if needed, because casts of many
    buffers are slow."""
    return buffer if buffer.ndim == 1 and buffer.itemsize == 1 else buffer.cast("B")


def check_key(key: str) -> str:
    """`key` if it stays inside the root, else `InvalidInput`."""
    if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise InvalidInput(
            f"{key!r} cannot be an object's key: wanted names joined by '/', without '.', '..' and "
            "empty ones"
        )
    return key


# The largest objects of each kind that are read whole (docs/format.md §10). A larger one is refused
# before it is read.
CONFIG_BYTES_MAX = 1 * MIB
SESSION_BYTES_MAX = 1 * MIB
SIGNATURE_BYTES_MAX = 1 << 12
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
    ("signatures/", SIGNATURE_BYTES_MAX),
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
