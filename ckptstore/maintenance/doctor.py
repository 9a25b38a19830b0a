"""Whether a place is fit for a store: what its storage can do, tried out, and whether the next commit will fit.

`probe` tries and measures; `judge` turns what it saw into verdicts and is pure. Nothing in the store is touched but `tmp/`.
"""

import os
import secrets
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptstore.core.ids import new_session_id
from ckptstore.core.paths import file_system, is_network_filesystem, make_directories
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.errors import CkptStoreError
from ckptstore.repository.disk_forecast import COMMITS_AHEAD, MAKE_ROOM, Room, expected_bytes, look
from ckptstore.repository.store_handle import Opening
from ckptstore.storage.contract import Backend
from ckptstore.storage.file_lock import file_lock
from ckptstore.storage.reserve import RESERVE_BYTES

FSYNC_ROUNDS = 5
SLOW_FSYNC_S = 0.1
CLOCK_SKEW_S = 5.0


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was seen, and what to do unless that is nothing."""

    name: str
    verdict: Verdict
    seen: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Storage:
    """What was seen. Where something could not be tried, it says why in words, else it is empty."""

    writable: str
    exclusive: str
    rename: str
    fsync_s: float
    filesystem: str
    network: bool
    index_directory: str
    index_network: bool
    locks: bool
    clock_skew_s: float
    newest_entry_s: float


def doctor(opening: Opening) -> tuple[Check, ...]:
    """Try the storage of a store out, and look whether there is room for what comes next."""
    return judge(probe(opening), look(opening))


def judge(storage: Storage, space: Room) -> tuple[Check, ...]:
    """The verdicts. Pure."""
    checks = [_tried("write", storage.writable, "files can be made", "get the right to write there, or use the store read-only")]
    if not storage.writable:
        link = "a store needs exclusive creation: hard links on a disk, conditional writes (If-None-Match) in a bucket"
        checks += (
            _tried("exclusive", storage.exclusive, "of two who create an object one fails", link),
            _tried("rename", storage.rename, "an object is replaced at once", "use storage that renames atomically"),
            _fsync(storage),
            _clock(storage),
        )
    checks += (_filesystem(storage), _locks(storage), _newest(storage), _free(space), _reserve(space))
    return tuple(checks)


def probe(opening: Opening) -> Storage:
    """Try the storage out. Writes a few small objects under `tmp/` and deletes them."""
    backend = opening.backend
    scratch = f"tmp/{new_session_id()}-doctor"
    writable, exclusive, rename, fsync_s, skew_s = "", "", "", 0.0, 0.0
    try:
        fsync_s = _put_seconds(backend, scratch)
        exclusive, rename, skew_s = _try_exclusive(backend, scratch), _try_rename(backend, scratch), _clock_skew(backend, scratch)
    except CkptStoreError as error:
        writable = str(error)
    finally:
        with suppress(CkptStoreError):
            for suffix in ("", ".new"):
                backend.delete(scratch + suffix)
    root, directory = backend.durable_root, opening.index_directory
    newest = max((row.time_ns for row in opening.log.replay().commits.values()), default=0)
    return Storage(
        writable,
        exclusive,
        rename,
        fsync_s,
        file_system(root) if root else backend.url.partition("://")[0],
        root is not None and is_network_filesystem(root),
        str(directory),
        is_network_filesystem(directory),
        _try_lock(directory),
        skew_s,
        newest / 1e9 - time.time() if newest else 0.0,
    )


# -- trying ------------------------------------------------------------------------------------------------------------------------


def _put_seconds(backend: Backend, key: str) -> float:
    """The median time of a small durable write."""
    times = []
    for _ in range(FSYNC_ROUNDS):
        started = time.perf_counter()
        backend.put(key, secrets.token_bytes(4096))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _try_exclusive(backend: Backend, key: str) -> str:
    created = backend.put_new(f"{key}.new", b"first")
    again = backend.put_new(f"{key}.new", b"second")
    if not created or again or backend.read(f"{key}.new") != b"first":
        return "an object was created twice"
    return ""


def _try_rename(backend: Backend, key: str) -> str:
    wanted = secrets.token_bytes(64)
    backend.put(key, wanted)
    return "" if backend.read(key) == wanted else "an object that was replaced reads as before"


def _clock_skew(backend: Backend, key: str) -> float:
    """How far the storage's clock is ahead of this host's, as a file's time shows; 0 for a bucket."""
    if backend.durable_root is None:
        return 0.0
    return os.stat(backend.durable_root / key).st_mtime - time.time()


def _try_lock(directory: Path) -> bool:
    """Whether a lock on a file in the index directory keeps another descriptor out."""
    path = directory / f"doctor-{secrets.token_hex(6)}.lock"
    try:
        make_directories(directory)
        with file_lock(path, timeout_s=0) as first, file_lock(path, timeout_s=0) as second:
            return first and not second
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


# -- judging -----------------------------------------------------------------------------------------------------------------------


def _tried(name: str, problem: str, fine: str, next_step: str) -> Check:
    return Check(name, Verdict.FAILED, problem, next_step) if problem else Check(name, Verdict.OK, fine)


def _fsync(storage: Storage) -> Check:
    seen = f"a small durable write takes {seconds_text(storage.fsync_s)}"
    if storage.fsync_s <= SLOW_FSYNC_S:
        return Check("fsync", Verdict.OK, seen)
    return Check("fsync", Verdict.WARNING, seen, "each commit waits for about five of them: use a faster disk, or commit less often")


def _clock(storage: Storage) -> Check:
    seen = f"the storage's clock is {abs(storage.clock_skew_s):.1f} s {'ahead' if storage.clock_skew_s > 0 else 'behind'}"
    if abs(storage.clock_skew_s) <= CLOCK_SKEW_S:
        return Check("clock", Verdict.OK, "this host and the storage agree on the time")
    return Check("clock", Verdict.WARNING, seen, "set the clocks (NTP): ages and `--keep-within` are off; nothing else depends on them")


def _newest(storage: Storage) -> Check:
    if storage.newest_entry_s <= CLOCK_SKEW_S:
        return Check("time", Verdict.OK, "no commit is from the future")
    seen = f"the newest commit is {seconds_text(storage.newest_entry_s)} in the future"
    return Check("time", Verdict.WARNING, seen, "set this host's clock, or that of the host that committed (NTP)")


def _filesystem(storage: Storage) -> Check:
    if not storage.network:
        return Check("filesystem", Verdict.OK, storage.filesystem or "unknown")
    if storage.index_network:
        seen = f"{storage.filesystem}, and the index too: {storage.index_directory}"
        return Check("filesystem", Verdict.WARNING, seen, "set CKPTSTORE_CACHE to a directory on a local disk")
    seen = f"{storage.filesystem}, shared between hosts; the index lies at {storage.index_directory}"
    return Check("filesystem", Verdict.OK, seen)


def _locks(storage: Storage) -> Check:
    if storage.locks:
        return Check("locks", Verdict.OK, f"locks work in {storage.index_directory}")
    step = "set CKPTSTORE_CACHE to a directory on a local disk; until then every process keeps an index of its own in memory"
    return Check("locks", Verdict.WARNING, f"no locks in {storage.index_directory}", step)


def _free(space: Room) -> Check:
    if space.free is None:
        return Check("space", Verdict.OK, "a bucket has no end")
    wanted = expected_bytes(space)
    seen = f"{bytes_text(space.free)} free, the next commit takes about {bytes_text(wanted)} (state: {bytes_text(space.logical)})"
    if space.free < wanted:
        return Check("space", Verdict.FAILED, seen, MAKE_ROOM)
    verdict = Verdict.WARNING if space.free < COMMITS_AHEAD * wanted else Verdict.OK
    return Check("space", verdict, seen, MAKE_ROOM if verdict is Verdict.WARNING else "")


def _reserve(space: Room) -> Check:
    if space.free is None:
        return Check("reserve", Verdict.OK, "a bucket needs none")
    if space.reserve == RESERVE_BYTES:
        return Check("reserve", Verdict.OK, f"{bytes_text(RESERVE_BYTES)} are kept so that gc works on a full disk")
    step = "run `ckptstore gc` while there is room: it makes the reserve"
    return Check("reserve", Verdict.WARNING, "no room is kept for gc on a full disk", step)
