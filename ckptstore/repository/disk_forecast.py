"""Will the next commits fit on the disk?

`look` asks the disk and the catalog. The other functions are pure.
"""

import os
from dataclasses import dataclass

from ckptstore.core.text import bytes_text
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage.reserve import RESERVE_KEY

COMMITS_LOOKED_AT = 5
COMMITS_AHEAD = 3
"""So many commits should still fit: a warning comes before the disk is full."""

MAKE_ROOM = "free some: `ckptstore forget`, then `ckptstore gc --now`"


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Byte counts: `free` on the disk (None for a bucket), `new` of the last commits, newest
    first, `logical` of the next state, and `reserve`.

    `logical` is that of the newest commit if the next state is unknown.
    """

    free: int | None
    new: tuple[int, ...]
    logical: int
    reserve: int | None


def look(
    handle: StoreHandle, run: str | None = None, *, logical_bytes: int | None = None
) -> DiskRoom:
    """Free space, and the bytes that the last commits of `run`, or of all runs, added.
    `logical_bytes` is the size of the next state."""
    infos = handle.queries().log(run, limit=COMMITS_LOOKED_AT)
    reserve = handle.storage.size(RESERVE_KEY) if handle.storage.capabilities.can_fill_up else None
    logical = logical_bytes if logical_bytes is not None else infos[0].logical_bytes if infos else 0
    return DiskRoom(free_bytes(handle), tuple(info.new_bytes for info in infos), logical, reserve)


def free_bytes(handle: StoreHandle) -> int | None:
    """Bytes that this process can still write; None for a bucket, or if the disk does not report
    them."""
    root = handle.storage.capabilities.local_root
    if root is None:
        return None
    try:
        status = os.statvfs(root)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def expected_bytes(room: DiskRoom) -> int:
    """Estimated bytes of the next commit: the largest addition of the last commits, or the whole
    state if there are none."""
    return max(room.new, default=room.logical)


def warning(room: DiskRoom) -> str:
    """A warning for people before they commit; empty while `COMMITS_AHEAD` such commits fit."""
    wanted = expected_bytes(room)
    if room.free is None or room.free >= COMMITS_AHEAD * wanted:
        return ""
    seen = f"the next commit takes about {bytes_text(wanted)}, and {bytes_text(room.free)} are free"
    if room.free < wanted:
        return f"{seen}: {bytes_text(wanted - room.free)} are missing; {MAKE_ROOM}"
    return f"{seen}: enough for {room.free // wanted} like it; {MAKE_ROOM}"


def shortage(room: DiskRoom) -> str:
    """How many bytes a failed commit lacked, after its own bytes were removed."""
    free, wanted = room.free or 0, expected_bytes(room)
    if wanted > free:
        return (
            f"this commit takes about {bytes_text(wanted)}, and {bytes_text(free)} are free: "
            f"{bytes_text(wanted - free)} are missing"
        )
    if room.logical > free:
        missing = bytes_text(room.logical - free)
        return (
            f"this commit takes more than the {bytes_text(free)} that are free: up to "
            f"{missing} "
            "are missing"
        )
    return (
        f"{bytes_text(free)} are free, enough for the {bytes_text(room.logical)} of this state "
        "but for a quota, inodes or its metadata"
    )
