"""How a completely full disk can still be freed: a file of a mebibyte that is given up for the log
entries which say what may go.

Deleting needs log entries first. Where not even those fit, the reserve is deleted, and made again
once there is room.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.core.ids import new_session_id
from ckptstore.errors import Corrupt, NoSpace, ReadOnly, Unavailable
from ckptstore.storage.contract import Storage

RESERVE_KEY = "reserve"
RESERVE_BYTES = 1 << 20
PROBE_BYTES = 256 << 10
"""Room enough for the entries of one forget or gc."""


def ensure_reserve(storage: Storage) -> None:
    """Make the store's reserve, or as much of it as fits: what a forget gave up and hardly used
    must be there for the gc that follows.

    Its bytes are random, lest a filesystem compress them away. A bucket needs none.
    """
    if not storage.capabilities.can_fill_up:
        return
    try:
        there = storage.size(RESERVE_KEY) or 0
    except Corrupt:
        there = 0
    for size in range(RESERVE_BYTES, max(there, PROBE_BYTES - 1), -PROBE_BYTES):
        try:
            storage.put(RESERVE_KEY, secrets.token_bytes(size))
        except (Unavailable, ReadOnly):
            continue
        return


def is_full(storage: Storage) -> bool:
    """Whether a few log entries would not fit, by trying: quotas and inodes count as well as
    blocks."""
    if not storage.capabilities.can_fill_up:
        return False
    try:
        probe = storage.create("tmp/probe", session=new_session_id())
        try:
            probe.append([memoryview(bytes(PROBE_BYTES))])
        finally:
            probe.discard()
    except NoSpace:
        return True
    return False


@contextmanager
def room(storage: Storage) -> Iterator[bool]:
    """Within, log entries can be written although the disk is full, and it is: then the value is
    True.

    Afterwards the reserve is made (again) if it can be.
    """
    full = is_full(storage)
    if full:
        storage.delete(RESERVE_KEY)
    try:
        yield full
    finally:
        ensure_reserve(storage)
