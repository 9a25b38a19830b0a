"""How can a store on a full disk still be freed?

A deletion needs log entries first. The reserve, a file of one mebibyte, is deleted to make room
for them, and created again once there is space.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from blake3 import blake3

from ckptstore.core.ids import new_session_id
from ckptstore.errors import Corrupt, NoSpace, ReadOnly, Unavailable
from ckptstore.storage.contract import Storage

RESERVE_KEY = "reserve"
RESERVE_BYTES = 1 << 20
PROBE_BYTES = 256 << 10
"""Room enough for the entries of one forget or gc."""

T = TypeVar("T")


def ensure_reserve(storage: Storage) -> None:
    """Create the store's reserve, or as much of it as fits: a gc that follows a forget needs it
    again."""
    if not storage.capabilities.can_fill_up:
        return
    try:
        there = storage.size(RESERVE_KEY) or 0
    except (Corrupt, Unavailable):  # what was done before counts, and not this
        there = 0
    for size in range(RESERVE_BYTES, max(there, PROBE_BYTES - 1), -PROBE_BYTES):
        try:
            storage.put(RESERVE_KEY, _incompressible(size))
        except (Unavailable, ReadOnly):
            continue
        return


def is_full(storage: Storage) -> bool:
    """Whether a few log entries would not fit. Found by writing as much, because quotas and inodes
    count as well as blocks. A network filesystem may take what does not fit: see `with_room`."""
    if not storage.capabilities.can_fill_up:
        return False
    try:
        probe = storage.create("tmp/probe", session=new_session_id())
        try:
            probe.append([memoryview(_incompressible(PROBE_BYTES))])
        finally:
            probe.discard()
    except NoSpace:
        return True
    return False


def _incompressible(size: int) -> bytes:
    """Pseudorandom bytes, so that no filesystem compresses or deduplicates them away. BLAKE3 makes
    them in a tenth of the time that the kernel's generator takes."""
    return blake3(os.urandom(32)).digest(size)


def with_room(storage: Storage, append: Callable[[], T]) -> T:
    """The result of `append`, of a log entry after which something can be deleted. If the disk is
    full, it gets the room of the reserve, which is created again if possible."""
    try:
        return append()
    except NoSpace:
        if not storage.capabilities.can_fill_up:
            raise
        storage.delete(RESERVE_KEY)
        return append()
    finally:
        ensure_reserve(storage)


@contextmanager
def room(storage: Storage) -> Iterator[bool]:
    """Make room for a gc within the block. The value is True if the disk was full.

    Afterwards the reserve is created again if possible.
    """
    full = is_full(storage)
    if full:
        storage.delete(RESERVE_KEY)
    try:
        yield full
    finally:
        ensure_reserve(storage)
