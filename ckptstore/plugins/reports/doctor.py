"""Diagnosing a place for a store: the abilities of its storage, tested, and the room for the next
commit.

`probe` tests and measures; `judge` turns the facts into verdicts and is pure. Only `tmp/` of the
store is touched.
"""

import os
import secrets
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptstore.errors import CkptStoreError, ReadOnly
from ckptstore.plugin.files import (
    file_lock,
    file_system,
    is_network_filesystem,
    make_index_directory,
)
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import new_session_id
from ckptstore.plugin.storage import RESERVE_BYTES, Storage
from ckptstore.plugin.text import bytes_text, seconds_text
from ckptstore.plugin.upkeep import COMMITS_AHEAD, MAKE_ROOM, DiskRoom, expected_bytes, look

FSYNC_ROUNDS = 5
SLOW_FSYNC_S = 0.1
CLOCK_SKEW_S = 5.0


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was seen, and the next step if there is a problem."""

    name: str
    verdict: Verdict
    seen: str
    next: str = ""

    def __str__(self) -> str:
        step = f"\n    next: {self.next}" if self.next else ""
        return f"{self.name}: {self.verdict}: {self.seen}{step}"


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """The measured facts. A test that could not be run holds the reason in words, otherwise the
    empty string."""

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
    read_only: bool = False
    """Whether the storage takes no writes at all, for this user; a full one does."""


def doctor(handle: StoreHandle) -> tuple[Check, ...]:
    """Test the storage of a store, and check the room for the next commits."""
    return judge(probe(handle), look(handle))


def judge(facts: StorageFacts, space: DiskRoom) -> tuple[Check, ...]:
    """The verdicts. Pure."""
    write = _check(
        "write",
        _failed(facts.writable),
        "files can be made",
        facts.writable,
        "get the right to write there, or use the store read-only",
    )
    tried = () if facts.writable else _tried(facts)
    # Whoever may not write makes no commit, and can free nothing.
    room = () if facts.read_only else _space(space)
    return (write, *tried, _filesystem(facts), _locks(facts), _newest(facts), *room)


def _check(name: str, verdict: Verdict, fine: str, seen: str, step: str) -> Check:
    """A check that is `fine`, or else what was seen and the next step."""
    return Check(name, verdict, *((fine, "") if verdict is Verdict.OK else (seen, step)))


def _failed(problem: object) -> Verdict:
    return Verdict.FAILED if problem else Verdict.OK


def _warning(problem: object) -> Verdict:
    return Verdict.WARNING if problem else Verdict.OK


def _tried(facts: StorageFacts) -> tuple[Check, ...]:
    """The checks that need to write."""
    written = f"a small durable write takes {seconds_text(facts.fsync_s)}"
    direction = "ahead" if facts.clock_skew_s > 0 else "behind"
    return (
        _check(
            "exclusive",
            _failed(facts.exclusive),
            "of two who create an object one fails",
            facts.exclusive,
            "a store needs exclusive creation: hard links on a disk, conditional writes "
            "(If-None-Match) in a bucket",
        ),
        _check(
            "rename",
            _failed(facts.rename),
            "an object is replaced at once",
            facts.rename,
            "use storage that renames atomically",
        ),
        _check(
            "fsync",
            _warning(facts.fsync_s > SLOW_FSYNC_S),
            written,
            written,
            "each commit waits for about five of them: use a faster disk, or commit less often",
        ),
        _check(
            "clock",
            _warning(abs(facts.clock_skew_s) > CLOCK_SKEW_S),
            "this host and the storage agree on the time",
            f"the storage's clock is {abs(facts.clock_skew_s):.1f} s {direction}",
            "set the clocks (NTP): ages and `--keep-within` are off; nothing else depends on them",
        ),
    )


def _newest(facts: StorageFacts) -> Check:
    return _check(
        "time",
        _warning(facts.newest_entry_s > CLOCK_SKEW_S),
        "no commit is from the future",
        f"the newest commit is {seconds_text(facts.newest_entry_s)} in the future",
        "set this host's clock, or that of the host that committed (NTP)",
    )


def _filesystem(facts: StorageFacts) -> Check:
    fine = facts.filesystem or "unknown"
    if facts.network:
        fine = f"{fine}, shared between hosts; the index lies at {facts.index_directory}"
    return _check(
        "filesystem",
        _warning(facts.network and facts.index_network),
        fine,
        f"{facts.filesystem}, and the index too: {facts.index_directory}",
        "set CKPTSTORE_CACHE to a directory on a local disk",
    )


def _locks(facts: StorageFacts) -> Check:
    return _check(
        "locks",
        _warning(not facts.locks),
        f"locks work in {facts.index_directory}",
        f"no locks in {facts.index_directory}",
        "set CKPTSTORE_CACHE to a directory on a local disk; until then every process keeps an "
        "index of its own in memory",
    )


def _space(space: DiskRoom) -> tuple[Check, ...]:
    if space.free is None:
        fine = (("space", "a bucket has no end"), ("reserve", "a bucket needs none"))
        return tuple(Check(name, Verdict.OK, seen) for name, seen in fine)
    wanted = expected_bytes(space)
    seen = (
        f"{bytes_text(space.free)} free, the next commit takes about {bytes_text(wanted)} "
        f"(state: {bytes_text(space.logical)})"
    )
    room = _warning(space.free < COMMITS_AHEAD * wanted)
    if space.free < wanted:
        room = Verdict.FAILED
    return (
        _check("space", room, seen, seen, MAKE_ROOM),
        _check(
            "reserve",
            _warning(space.reserve != RESERVE_BYTES),
            f"{bytes_text(RESERVE_BYTES)} are kept so that gc works on a full disk",
            "no room is kept for gc on a full disk",
            "run `ckptstore gc` while there is room: it makes the reserve",
        ),
    )


def probe(handle: StoreHandle) -> StorageFacts:
    """Test the storage. Writes a few small objects under `tmp/` and deletes them."""
    storage = handle.storage
    scratch = f"tmp/{new_session_id()}-doctor"
    writable, exclusive, rename, fsync_s, skew_s, read_only = "", "", "", 0.0, 0.0, False
    try:
        fsync_s = _put_seconds(storage, scratch)
        exclusive, rename, skew_s = (
            _try_exclusive(storage, scratch),
            _try_rename(storage, scratch),
            _clock_skew(storage, scratch),
        )
    except CkptStoreError as error:
        writable, read_only = str(error), isinstance(error, ReadOnly)
    finally:
        with suppress(CkptStoreError):
            for suffix in ("", ".new"):
                storage.delete(scratch + suffix)
    root, directory = storage.capabilities.local_root, handle.index_directory
    newest = max((row.time_ns for row in handle.log.replay().commits.values()), default=0)
    return StorageFacts(
        writable,
        exclusive,
        rename,
        fsync_s,
        file_system(root) if root else storage.url.partition("://")[0],
        root is not None and is_network_filesystem(root),
        str(directory),
        is_network_filesystem(directory),
        _try_lock(directory),
        skew_s,
        newest / 1e9 - time.time() if newest else 0.0,
        read_only,
    )


def _put_seconds(storage: Storage, key: str) -> float:
    """The median time of a small durable write."""
    times = []
    for _ in range(FSYNC_ROUNDS):
        started = time.perf_counter()
        storage.put(key, secrets.token_bytes(4096))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _try_exclusive(storage: Storage, key: str) -> str:
    # It counts as taken, too, if only the answer was lost and the request was repeated.
    storage.put_new(f"{key}.new", b"first")
    if storage.put_new(f"{key}.new", b"second") or storage.read(f"{key}.new") != b"first":
        return "an object was created twice"
    return ""


def _try_rename(storage: Storage, key: str) -> str:
    wanted = secrets.token_bytes(64)
    storage.put(key, wanted)
    return "" if storage.read(key) == wanted else "an object that was replaced reads as before"


def _clock_skew(storage: Storage, key: str) -> float:
    """The lead of the storage's clock over this host's, by a file's time; 0 for a bucket."""
    if storage.capabilities.local_root is None:
        return 0.0
    return os.stat(storage.capabilities.local_root / key).st_mtime - time.time()


def _try_lock(directory: Path) -> bool:
    """Whether a lock on a file in the index directory excludes another descriptor."""
    path = directory / f"doctor-{secrets.token_hex(6)}.lock"
    try:
        make_index_directory(directory)
        with file_lock(path, timeout_s=0) as first, file_lock(path, timeout_s=0) as second:
            return first and not second
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
