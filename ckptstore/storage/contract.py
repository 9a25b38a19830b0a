"""What a place for objects can do, whether it is a local disk or a bucket.

An object has a key, a path relative to the store's root with `/` between its parts. Everything
durable in a store is put in its place by one of three methods, and each of them shows readers the
whole object or none of it: `put`, `put_new`, `Writer.finish`.

A finished object is never replaced: packs, twins, documents and log entries get their name by an
exclusive create, so that what went wrong above storage cannot change bytes that were acknowledged.
`put` is for what changes by design: sessions, the configuration, caches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptstore.core.config import PACK_BYTES_REMOTE
from ckptstore.core.ids import SessionId
from ckptstore.errors import Conflict, InvalidInput


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may assume about a storage beyond the methods of `Storage`."""

    local_root: Path | None = None
    """The directory that holds the objects as files: they can be mapped, linked and given
    permissions. None if objects are not files of this host."""
    slow_requests: bool = True
    """Each request is a network round trip: caches, batches and read-ahead pay off."""
    exclusive_create: bool = False
    """`put_new` is atomic on every server of this kind. If not, it must be tried before use."""
    can_fill_up: bool = False
    """Space is bounded, so the store keeps a reserve for the log entries of a deletion."""
    pack_bytes: int = PACK_BYTES_REMOTE
    """The size of pack that new data is written to."""


class Writer(Protocol):
    """A large object being written from front to back, by one thread at a time; readers see it
    after `finish`."""

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one behind the other where the last call ended. They are the caller's
        again on return."""

    def finish(self) -> bool:
        """Make the bytes durable and give the object its name; the name is durable after
        `Storage.sync_dirs`.

        True if the object is this writer's: on failure of what it is for, the caller may delete it.
        False if an object with the same bytes has the name, which may be this one by an attempt
        whose answer was lost, or another writer's. Raises `Conflict` if the name is taken
        otherwise; what has it stays as it is. After any other failure, `Unavailable`, the object is
        discarded: after a failed fsync nobody knows what was written.
        """

    def discard(self) -> None:
        """Forget the object. May be called again and after a failed `finish`; does nothing after a
        successful one."""


class OpenFile(Protocol):
    """A file that stays open as long as this is referred to."""

    fd: int


class Storage(Protocol):
    """Objects by key. Safe for threads, and for use in the child after a fork.

    Raises `NotFound` for an absent object, `Unavailable` when storage does not answer or is full,
    `ReadOnly` where writing is not allowed, `Corrupt` for an object that is shorter than it was
    said to be, `InvalidInput` for a key that leaves the root.
    """

    url: str
    capabilities: Capabilities

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes `start:stop` of the object as it is now, as many of them as there are."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one behind the other, from `offset` on; only for objects that never
        change (they may be held open)."""

    def open_file(self, key: str) -> OpenFile:
        """An object that never changes, as an open file: to be mapped. Raises `InvalidInput` where
        objects are no files of this host."""

    def will_need(self, key: str, offset: int, nbytes: int) -> None:
        """A hint that these bytes will be read soon. Never raises: the read itself says what is
        wrong."""

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        """The last `nbytes` of the object, or all of a shorter one, and the object's size."""

    def size(self, key: str) -> int | None:
        """The object's size in bytes, None if it is absent."""

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        """Create or replace an object atomically; unless `durable`, a power cut may bring the old
        one back or leave it empty."""

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """Create an object atomically and durably, unless there is one: then False, and nothing
        changes.

        After `Unavailable` the object may exist or not, and only reading it tells; after `NoSpace`
        it does not.
        """

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> Writer:
        """A writer for a large object; what a crash leaves behind is named after `session`. A
        `unbuffered` one does without a buffer where it can, at the cost of processor time. One that
        works `aside` should take little from others, even if it takes longer."""

    def sync_dirs(self, keys: Iterable[str]) -> None:
        """Make the names of finished objects durable, each directory once."""

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is fine."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys that begin with `prefix` and their sizes, sorted by key; symbolic links are neither
        listed nor followed."""

    def close(self) -> None:
        """Give back what is held open; the backend may not be used afterwards."""


def put_finished(storage: Storage, key: str, data: bytes) -> bool:
    """Create a small object that is never replaced; durable on return. The value is that of
    `Writer.finish`.

    Raises `Conflict` if other bytes have that name.
    """
    if storage.put_new(key, data):
        return True
    if storage.read(key) == data:
        return False
    raise name_taken(key, storage.url)


def name_taken(key: str, url: str) -> Conflict:
    """What to raise where a finished object would be replaced."""
    return Conflict(
        f"{key} in {url} is finished and is never replaced: another writer has taken that name "
        "with other bytes, which stay; "
        f"repeat what failed, it gets names of its own"
    )


def as_bytes(buffer: memoryview) -> memoryview:
    """The same memory as single bytes in one dimension. Cast only where it has to be: that costs,
    and buffers may be many."""
    return buffer if buffer.ndim == 1 and buffer.itemsize == 1 else buffer.cast("B")


def check_key(key: str) -> str:
    """`key` if it stays inside the root, else `InvalidInput`."""
    if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise InvalidInput(
            f"{key!r} cannot be an object's key: wanted names joined by '/', without '.', '..' and "
            "empty ones"
        )
    return key
