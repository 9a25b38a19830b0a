"""Commits on a disk that fills up: a forecast, an explanation of `NoSpace`, and with `on_full="gc"`
a gc and a retry.

A commit that did not fit has ended its session and deleted its packs before anything here runs, so
a gc need not wait for it. That also holds for many ranks: the coordinator collects while the others
wait.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ckptstore.core import forks
from ckptstore.core.options import OnFull
from ckptstore.core.text import bytes_text
from ckptstore.errors import CkptStoreError, NoSpace
from ckptstore.log.state import NEWEST_KEPT
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.gc import GcOptions, collect, plans_at
from ckptstore.maintenance.retention import ForgetPlan, KeepLast, plan_policies
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.reserve import RESERVE_KEY

if TYPE_CHECKING:
    from ckptstore.distributed.collective import Collective

logger = logging.getLogger("ckptstore")

T = TypeVar("T")

COMMITS_LOOKED_AT = 5
COMMITS_AHEAD = 3
"""So many commits should still fit: a warning comes before the disk is full."""

MAKE_ROOM = "free some: `ckptstore forget`, then `ckptstore gc --now`"

PATIENCE = 4
"""Fraction of the ranks' timeout after which the waiting ranks are told that a gc is running."""

_GOES_ON, _AGAIN, _EXPLAINED = b"w", b"a", b"e"

EVERYTHING = GcOptions(max_unused=0.0, force=True, grace_s=0)
"""On a full disk no other writer can commit either, so gc waits for none. `on_full="gc"` asks for
room at once, so it purges what was just forgotten, too."""


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
            f"this commit takes more than the {bytes_text(free)} that are free: up to {missing} "
            "are missing"
        )
    return (
        f"{bytes_text(free)} are free, enough for the {bytes_text(room.logical)} of this state "
        "but for a quota, inodes or its metadata"
    )


def relief(handle: StoreHandle) -> str:
    """What would free space: a gc now, and one after forgetting all commits but the newest of each
    run and pinned ones. Copies of live chunks are subtracted. Raises the errors of a dry run of
    gc."""
    now, later = gained_by(handle, plan_policies(handle.log.replay(), [KeepLast(NEWEST_KEPT)]))
    if not later:
        return (
            "neither `ckptstore gc --now` nor `ckptstore forget` would free anything: make room on "
            "the disk"
        )
    gc = f"frees {bytes_text(now)}" if now else "alone frees nothing"
    forget = f"`ckptstore forget --keep-last {NEWEST_KEPT}`"
    return f"`ckptstore gc --now` {gc}, after {forget} it frees {bytes_text(later)}"


def gained_by(
    handle: StoreHandle, plan: ForgetPlan, progress: Progress = silent
) -> tuple[int, int]:
    """The bytes that a gc of everything would gain now, and after this forget. Raises the errors
    of a dry run of gc."""
    state = handle.log.replay()
    forgotten = {
        each.commit: each.row._replace(soft=state.n)
        for each in plan.forgotten
        if each.commit in state.commits
    }
    after = replace(state, commits=state.commits.update(forgotten.items()))
    now, later = plans_at(handle, (state, after), EVERYTHING, progress)
    return now.gained_bytes, later.gained_bytes


class DiskWatch:
    """The forecast of one open store's disk space. Threads may share it."""

    def __init__(self, handle: StoreHandle, run: str, on_full: OnFull) -> None:
        self._handle, self._run, self._on_full = handle, run, on_full
        self._lock = forks.lock()
        self._looked = False
        self._warned = False

    def before(self, logical_bytes: int) -> None:
        """Before the first commit: warn if it, or one of the next, will not fit. Never raises;
        unknown facts are skipped."""
        with self._lock:
            looked, self._looked = self._looked, True
        if looked or self._handle.storage.capabilities.local_root is None:
            return
        try:
            room = look(self._handle, self._run, logical_bytes=logical_bytes)
        except CkptStoreError as error:
            logger.debug("it is unknown whether the next commit fits: %s", error)
            return
        self._warn(room)

    def after(self, logical_bytes: int, new_bytes: int) -> None:
        """After each commit: warn once when space gets short for more like it, and again only
        after there was enough."""
        self._warn(DiskRoom(free_bytes(self._handle), (new_bytes,), logical_bytes, None))

    def relieve(
        self, error: NoSpace, logical_bytes: int, peers: "Collective | None", *, collect: bool
    ) -> None:
        """Return if a commit of a state of `logical_bytes` that failed with `error` is to be
        repeated: with `collect` and `on_full="gc"`, after a gc that freed something.

        Otherwise raises `NoSpace` with the missing space and what would free it; the store is
        unchanged. The coordinator's `on_full` and view of the disk count, and all ranks raise one
        `NoSpace`, whose `causes` say where the disk was full.
        """

        def decide() -> str | None:
            if collect and self._on_full == "gc" and self._collected():
                return None
            return self._explanation(logical_bytes)

        said = _said_by_the_first(peers, decide) if peers else decide()
        if said is not None:
            explained = NoSpace(f"{error}{said}")
            explained.causes = error.causes
            raise explained from error

    def _collected(self) -> bool:
        """Whether a gc freed something; a failure is logged, and the commit's own error is
        raised."""
        try:
            report = collect(self._handle, EVERYTHING)
        except CkptStoreError as error:
            logger.warning("the disk of %s is full, and gc failed: %s", self._handle.url, error)
            return False
        self._handle.follow()
        logger.warning(
            "the disk of %s is full: gc freed %s",
            self._handle.url,
            bytes_text(report.freed_bytes - report.copied_bytes),
        )
        return report.freed_bytes > 0

    def _explanation(self, logical_bytes: int) -> str:
        """The space missing for a state of this many bytes, and what would free it."""
        said = ""
        try:
            room = look(self._handle, self._run, logical_bytes=logical_bytes)
            said += f"; {shortage(room)}"
            said += f"; {relief(self._handle)}"
        except CkptStoreError as other:
            logger.debug("it is unknown what could be freed: %s", other)
        return said

    def _warn(self, room: DiskRoom) -> None:
        text = warning(room)
        with self._lock:
            warned, self._warned = self._warned, bool(text)
        if text and not warned:
            logger.warning("%s: %s", self._handle.url, text)


def _said_by_the_first(peers: "Collective", look: Callable[[], str | None]) -> str | None:
    """The coordinator's answer on every rank. The others wait, and hear that it is at work."""
    begun: list[Future[str | None]] = []
    threads = ThreadPool(1)

    def answer(handed_in: Sequence[bytes]) -> list[bytes]:
        if not begun:
            begun.append(threads.submit(look))
        wait_for(begun, peers.timeout_s / PATIENCE)
        said = _GOES_ON
        if begun[0].done():
            text = begun[0].result()
            said = _AGAIN if text is None else _EXPLAINED + text.encode()
        return [said] * len(handed_in)

    try:
        said = _GOES_ON
        while said == _GOES_ON:
            said = peers.round("commit: full", bytes, answer)
    finally:
        threads.close()
    return None if said == _AGAIN else said.removeprefix(_EXPLAINED).decode()
