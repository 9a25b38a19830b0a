"""Which chunks of a bucket does this host's disk cache, and how are they evicted?

Each chunk is a file named by its id that ends with the checksum of its bytes and the id, so every
read verifies it; a truncated, damaged or incomplete file is a miss and is removed. Files appear
whole, by a rename, and a reader keeps its open file, so processes share a cache without a lock;
only eviction takes turns. Nothing is synced: verification also catches the damage of a power cut.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptstore.core import forks
from ckptstore.core.ids import (
    CHECKSUM_BYTES,
    CHUNK_ID_BYTES,
    ChunkId,
    checksum,
    digest,
    random_digits,
)
from ckptstore.core.paths import make_directories
from ckptstore.core.process import file_lock
from ckptstore.storage.local_files import transfer

LARGEST_SHARE = 8
"""A chunk larger than this part of the limit is not kept: it would push out too much."""

EVICT_TO = 0.9
LOOK_EVERY = 16
"""After so small a part of the limit was added by this process, it looks what others have added."""

UNFINISHED_S = 3600.0
"""A file that was begun so long ago was left behind by a crash."""

END_BYTES = CHECKSUM_BYTES + CHUNK_ID_BYTES
"""What follows the bytes of a chunk in its file."""

_UNFINISHED = ".new"

_logger = logging.getLogger("ckptstore")


class _File(NamedTuple):
    """A file of the cache; the least recently used sorts first."""

    used_s: float
    bytes: int
    path: str


class ReadCache:
    """The cache in `directory`, which is created for this user alone if needed. Threads and
    processes may share it.

    All processes together keep at most `limit_bytes`, plus a sixteenth of that per process.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes
        self._lock = forks.lock()
        self._evicting = forks.lock()
        self._added_bytes = limit_bytes  # by others, perhaps: the first to be kept looks
        self._given_up = False

    def read_into(self, chunk: ChunkId, out: memoryview, *, verify_id: bool = False) -> bool:
        """Whether the cache has `chunk`; its bytes are then in `out`. Otherwise the content of
        `out` is undefined.

        A chunk was kept under the id that a footer gives it. With `verify_id`, the bytes are
        compared with that too.
        """
        path = self._path(chunk)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            end = memoryview(bytearray(END_BYTES))
            if (
                _filled(fd, [out, end])
                and end == checksum(out) + chunk
                and (not verify_id or digest(out) == chunk)
            ):
                os.utime(fd)  # when a file was used last says how soon it goes
                return True
        except OSError as error:
            _logger.debug("a cached chunk cannot be read: %s", error)
        finally:
            with suppress(OSError):
                os.close(fd)
        with suppress(OSError):
            path.unlink()
        return False

    def has(self, chunk: ChunkId) -> bool:
        """Whether the cache seems to have `chunk`: only a read verifies it."""
        return os.path.exists(self._path(chunk))

    def put(self, chunk: ChunkId, data: memoryview) -> None:
        """Keep `data`, the bytes of `chunk`. A failed write is ignored."""
        if self._given_up or data.nbytes > self._limit_bytes // LARGEST_SHARE:
            return
        path = self._path(chunk)
        try:
            if path.exists():
                return
            self._write(path, (data, checksum(data) + chunk))
        except OSError as error:
            self._given_up = True
            _logger.warning(
                "what is read is not kept in %s any more: %s", self._directory, error.strerror
            )
            return
        self._account(data.nbytes)

    def _path(self, chunk: ChunkId) -> Path:
        name = chunk.hex()
        return self._directory / name[:2] / name

    def _write(self, path: Path, parts: Sequence[memoryview | bytes]) -> None:
        if not path.parent.is_dir():
            make_directories(self._directory.parent)
            for folder in (self._directory, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}-{random_digits(4)}{_UNFINISHED}")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                for part in parts:
                    file.write(part)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    # -- keeping to the limit --

    def _account(self, nbytes: int) -> None:
        with self._lock:
            self._added_bytes += nbytes
        # Whoever adds while this thread evicts leaves the rest to it.
        while self._added_bytes > self._limit_bytes // LOOK_EVERY and self._evict():
            pass

    def _evict(self) -> bool:
        """Remove the oldest files if the cache is too large. False if another thread or process is
        evicting already."""
        if not self._evicting.acquire(blocking=False):
            return False
        try:
            with file_lock(self._directory / "lock", timeout_s=0.0) as held:
                if held:
                    with self._lock:
                        self._added_bytes = 0
                    self._release(sorted(self._files()))
                return held
        finally:
            self._evicting.release()

    def _release(self, files: list[_File]) -> None:
        """Remove the least recently used files until the rest fits."""
        total = sum(file.bytes for file in files)
        wanted = total if total <= self._limit_bytes else int(self._limit_bytes * EVICT_TO)
        for file in files:
            abandoned = file.path.endswith(_UNFINISHED) and file.used_s < time.time() - UNFINISHED_S
            if total > wanted or abandoned:
                with suppress(OSError):
                    os.unlink(file.path)
                total -= file.bytes

    def _files(self) -> Iterator[_File]:
        with suppress(OSError):
            for folder in os.scandir(self._directory):
                if folder.is_dir(follow_symlinks=False):
                    for entry in os.scandir(folder):
                        with suppress(OSError):  # gone meanwhile
                            status = entry.stat(follow_symlinks=False)
                            yield _File(status.st_mtime, status.st_size, entry.path)


def _filled(fd: int, out: Sequence[memoryview]) -> bool:
    """Whether the file is as long as the memory of `out`; if so, fills it."""
    total = sum(memory.nbytes for memory in out)
    return os.fstat(fd).st_size == total and not transfer(os.preadv, fd, 0, out)
