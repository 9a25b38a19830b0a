"""LMDB environments of this process: one per path, with a map that grows, and reopened after a
fork."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lmdb

from ckptstore.core.forks import Condition, halts_for_forks
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.paths import rights
from ckptstore.index.chunks.lmdb_check import Damaged
from ckptstore.index.chunks.records import NUMBER_BYTES, RECORD_BYTES

MAP_BYTES = 1 << 36
"""Address space of the map, unless the process is limited to less; the file has only the pages in
use."""

DATABASES: dict[bytes, tuple[int, int] | None] = {
    b"chunks": (CHUNK_ID_BYTES, RECORD_BYTES),
    b"others": (CHUNK_ID_BYTES + NUMBER_BYTES, RECORD_BYTES),
    b"packs": None,
}
"""Bytes of each database's keys and values. For each chunk, `chunks` has the pack added last,
`others` the other packs that hold it; `packs` lists the completely indexed packs."""

UNSOUND = (lmdb.Error, Damaged)
"""Errors of an unusable file."""

_MAP_BYTES_MIN = 1 << 20
_MAX_READERS = 1024
_LOOK_S = 0.05

LOCK_BYTES = 64 * _MAX_READERS + 4096
"""Bytes of `lock.mdb`: a line of the processor's cache for each reader, and more than the header
takes on any platform. liblmdb would make a shorter file longer without blocks of its own, and the
first write through its mapping would end the process on a full disk."""

_ENGINE: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
"""Since lmdb 3 there is a second engine with a format of its own, which
`$LMDB_DEFAULT_LIB_VERSION` may prefer. `lmdb_check` reads that of 0.9."""

_T = TypeVar("_T")
Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Work: TypeAlias = Callable[["LmdbEnvironment", Transaction], _T]


class LmdbEnvironment:
    """An open LMDB environment, shared by all indexes of this process on one path."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder, self.users = folder, 0
        self.lmdb = _open_lmdb(folder, map_bytes)
        self.lmdb.reader_check()
        self.chunks, self.others, self.packs = (self.lmdb.open_db(name) for name in DATABASES)
        self._fd = os.open(folder / "data.mdb", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._inode, self._bytes = os.fstat(self._fd).st_ino, 0
        self._gate, self._halted = Condition(), False
        self._closed = False
        self._inside = set[int]()
        """The threads that use the map."""
        self._waiting = 0

    def read(self, work: Work[_T], *, write: bool = False) -> _T:
        """Run `work` in a transaction, which must not begin another one."""
        me = threading.get_ident()
        while True:
            try:
                try:
                    self._enter(me)
                    with self.lmdb.begin(self.chunks, write=write) as txn:
                        return work(self, txn)
                finally:
                    # First, and in C: an interrupt may end anything that is written in Python.
                    self._inside.discard(me)
                    with self._gate:
                        self._gate.notify_all()
            except lmdb.MapResizedError:
                self._map(0)
            except lmdb.MapFullError:
                self._map(2 * self.lmdb.info()["map_size"])

    def write(self, work: Work[_T]) -> _T:
        """As `read`, in one transaction; if the map is too small, double it and start over."""
        return self.read(work, write=True)

    def replaced(self) -> bool:
        """Whether the path leads to another file now."""
        try:
            return (self.folder / "data.mdb").lstat().st_ino != self._inode
        except OSError:
            return True

    def close(self) -> None:
        with self._gate:
            self._empty()
            self._closed = True
            self.lmdb.close()
            # The file was only read from.
            with suppress(OSError):
                os.close(self._fd)

    def halt(self, timeout_s: float) -> None:
        """Wait until no thread uses the map, and block new users until `go_on`."""
        self._gate.acquire()
        self._halted = self._empty(timeout_s)

    def go_on(self) -> None:
        self._gate.release()

    def close_inherited(self) -> bool:
        """In a child process: close what was halted before the fork; False if it was not halted."""
        if self._halted:
            self.lmdb.close()
            # The file was only read from.
            with suppress(OSError):
                os.close(self._fd)
        return self._halted

    def _enter(self, me: int) -> None:
        """Keep the map in place until this thread leaves. Raises `Damaged` if the file was
        truncated: its pages must not be touched."""
        with self._gate:
            if self._waiting:
                self._until(lambda: not self._waiting)
            self._inside.add(me)
        if self._closed:
            raise Damaged(f"{self.folder} was closed meanwhile")
        # Read first: another thread may see a longer file meanwhile.
        had = self._bytes
        size = self._size()
        if size < had:
            raise Damaged(f"{self.folder} was truncated: it has {size} bytes and had {had}")
        self._bytes = size

    def _size(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise Damaged(f"{self.folder} cannot be looked at: {error}") from error

    def _map(self, map_bytes: int) -> None:
        """Map this many bytes, or with 0 the size that another process has set, once no thread uses
        the map."""
        with self._gate:
            self._empty()
            if not self._closed:
                self.lmdb.set_mapsize(map_bytes)

    def _empty(self, timeout_s: float | None = None) -> bool:
        """Wait until no other thread uses the map, and block new users until the gate is
        released."""
        me = {threading.get_ident()}
        self._waiting += 1
        try:
            return self._until(lambda: self._inside <= me, timeout_s)
        finally:
            self._waiting -= 1
            self._gate.notify_all()

    def _until(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something holds; False after the timeout. Looks without being told as well,
        since a thread that was interrupted may tell nobody."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._gate.wait(_LOOK_S)
        return True


_FORK_TIMEOUT_S = 30.0


class _Environments:
    """Those that this process has open, by their folders."""

    def __init__(self) -> None:
        self.open: dict[Path, LmdbEnvironment] = {}
        self.lock = threading.Lock()
        self._left_behind: list[LmdbEnvironment] = []
        halts_for_forks(self)

    def halt(self) -> None:
        """Let no transaction be open at a fork: closing it in the child would end it for the
        parent."""
        self.lock.acquire()
        for env in self.open.values():
            env.halt(_FORK_TIMEOUT_S)

    def go_on(self) -> None:
        for env in self.open.values():
            env.go_on()
        self.lock.release()

    def forked(self) -> None:
        """Close the parent's environments, because liblmdb does not open a file twice. Those not
        halted stay open and are unusable here."""
        self.lock = threading.Lock()
        self._left_behind += [env for env in self.open.values() if not env.close_inherited()]
        self.open.clear()


_environments = _Environments()


def is_open(folder: Path) -> bool:
    """Whether this process has the environment at `folder` open already."""
    with _environments.lock:
        env = _environments.open.get(folder)
        return env is not None and not env.replaced()


def share(folder: Path, map_bytes: int) -> LmdbEnvironment:
    """The environment at `folder`; call `release` once for each."""
    with _environments.lock:
        env = _environments.open.get(folder)
        if env is None or env.replaced():
            env = _environments.open[folder] = LmdbEnvironment(folder, map_bytes)
        env.users += 1
        return env


def release(env: LmdbEnvironment) -> None:
    """Close `env` after its last user."""
    with _environments.lock:
        env.users -= 1
        if env.users:
            return
        if _environments.open.get(env.folder) is env:
            del _environments.open[env.folder]
    env.close()


def _reserve_lock(folder: Path) -> None:
    """Give `lock.mdb` all its blocks: a copy may have holes. Raises `OSError` if the disk is
    full."""
    fd = os.open(folder / "lock.mdb", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _open_lmdb(folder: Path, map_bytes: int) -> lmdb.Environment:
    """Open with as much address space as the process may have."""
    _reserve_lock(folder)
    while True:
        try:
            return lmdb.open(
                str(folder),
                map_size=map_bytes,
                sync=False,
                metasync=False,
                max_dbs=len(DATABASES),
                max_readers=_MAX_READERS,
                mode=0o666 & rights(folder),
                **_ENGINE,
            )
        except (lmdb.MemoryError, MemoryError):
            if map_bytes <= _MAP_BYTES_MIN:
                raise
            map_bytes //= 2
