"""How do objects lie as files in a local directory, safe against power cuts?

Invariants: A file gets its final name only after its bytes were fsynced, and never the name of a
finished object. A name counts as durable only after its directory was fsynced; this process
fsyncs the directories above once. No link beneath the root is followed, at an object or above it.
Objects get no more permissions than the store's directory.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from ckptstore.core.config import MIB, PACK_BYTES_LOCAL
from ckptstore.core.ids import SessionId, new_session_id, random_digits
from ckptstore.core.paths import rights
from ckptstore.errors import CkptStoreError, Corrupt, NoSpace, Unavailable
from ckptstore.storage.contract import Capabilities, check_key, check_size, check_writable
from ckptstore.storage.local_files import (
    LOST,
    Descriptor,
    Directories,
    LocalWriter,
    Temporary,
    directory_of,
    failure,
    is_cached,
    listed_bytes,
    open_object,
    read_range,
    transfer,
    unreadable,
)

_OPEN_FILES = 64
_LONG_BYTES = 2 * MIB
"""A thread that reads so many bytes at once, because a disk must be waited for, has files of its
own: for each of them the kernel knows one place to read on from."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

T = TypeVar("T")


class LocalStorage:
    """`Storage` on a local disk. Temporary files lie in `tmp/` below the root, so that a rename
    stays within one filesystem."""

    deadline_s = 0.0

    def __init__(
        self,
        root: str | Path,
        *,
        read_only: bool = False,
        fsync: bool = True,
        direct_io: bool | None = None,
    ) -> None:
        directory = Path(root).absolute()
        self.url = str(directory)
        self.capabilities = Capabilities(
            local_root=directory,
            slow_requests=False,
            exclusive_create=True,
            can_fill_up=True,
            pack_bytes=PACK_BYTES_LOCAL,
        )
        self._read_only = read_only
        self._fsync = fsync
        self._direct_io = direct_io
        self._directories = Directories(self.url, fsync=fsync)
        self._owner = new_session_id()
        # Evicting a file only drops a reference: a thread that reads from it keeps it open, so no
        # lock is needed.
        self._opened = lru_cache(_OPEN_FILES)(self._open)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        def whole(fd: int) -> bytes:
            end = os.fstat(fd).st_size
            if stop is None:
                check_size(key, end, self.url)
            return read_range(fd, start, end if stop is None else min(stop, end))

        return self._reading(key, open_object(self.url, key), whole)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        # Held: an evicted file is closed with its last reference.
        file = self._opened(key, threading.get_ident() if nbytes >= _LONG_BYTES else 0)
        with suppress(OSError):  # is asked again, as is a read that ended early
            if os.preadv(file.fd, buffers, offset) == nbytes:
                return
        missing = self._reading(key, file, lambda fd: transfer(os.preadv, fd, offset, buffers))
        if missing:
            raise Corrupt(
                f"{key} in {self.url} ends {missing} bytes before it should: wanted "
                f"{nbytes} bytes from {offset} on; run `ckptstore fsck`"
            )

    def open_file(self, key: str) -> Descriptor:
        return self._opened(key)

    def is_cached(self, key: str, offset: int) -> bool:
        with suppress(CkptStoreError):
            return is_cached(self._opened(key).fd, offset)
        return False

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        def tail(fd: int) -> tuple[bytes, int]:
            end = os.fstat(fd).st_size
            return read_range(fd, max(end - nbytes, 0), end), end

        return self._reading(key, open_object(self.url, key), tail)

    def read_ahead(self, sizes: Mapping[str, int]) -> None:
        """Nothing: the kernel reads ahead."""

    def size(self, key: str) -> int | None:
        try:
            directory, name = directory_of(self.url, check_key(key))
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(error, key, self.url) from error
        return status.st_size if S_ISREG(status.st_mode) else None

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        writer = self._write(key, data, durable=durable, replace=True)
        writer.finish()
        if durable:
            self.sync_dirs((key,))

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        writer = self._write(key, data, durable=True, replace=False)
        try:
            created = writer.link()
        finally:
            writer.discard()
        if created:
            try:
                self.sync_dirs((key,))
            except NoSpace as error:  # callers take it for "not created", but the name is there
                raise Unavailable(
                    f"{key} is there, but not known to be durable: {error}"
                ) from error
        return created

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> LocalWriter:
        direct_io = aside if self._direct_io is None else self._direct_io
        return self._writer(
            key, session, durable=self._fsync, direct_io=direct_io and not unbuffered, replace=False
        )

    def sync_dirs(self, keys: Iterable[str]) -> None:
        for directory in sorted({os.path.dirname(self._path(key)) for key in keys}):
            self._directories.sync(directory)

    def delete(self, key: str) -> None:
        check_key(key)
        check_writable(key, self.url, self._read_only)
        try:
            directory, name = directory_of(self.url, key)
            os.unlink(name, dir_fd=directory.fd)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise failure(error, "delete", key, self.url, writing=True) from error
        self.forget_open_files()

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        directory = prefix.rpartition("/")[0]
        if directory:
            check_key(directory)
        return self._walk(directory, prefix)

    def close(self) -> None:
        self.forget_open_files()

    def forget_open_files(self) -> None:
        """Reopen objects from now on, because one was replaced or deleted."""
        self._opened.cache_clear()

    def _reading(self, key: str, file: Descriptor, action: Callable[[int], T]) -> T:
        """Call `action` with the descriptor of an object. A failing disk is asked once more,
        because a bad cable may be the cause."""
        try:
            return action(file.fd)
        except OSError as error:
            self._opened.cache_clear()
            if error.errno not in LOST:
                raise failure(error, "read", key, self.url) from error
        file = open_object(self.url, key)
        try:
            return action(file.fd)
        except OSError as error:
            raise unreadable(error, key, self.url) from error

    def _open(self, key: str, reader: int = 0) -> Descriptor:
        """The object, open for all threads, or for the thread `reader` alone."""
        return open_object(self.url, key)

    def _path(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def _write(
        self, key: str, data: bytes | memoryview, *, durable: bool, replace: bool
    ) -> LocalWriter:
        writer = self._writer(
            key,
            self._owner,
            durable=durable and self._fsync,
            direct_io=bool(self._direct_io),
            replace=replace,
        )
        try:
            writer.append((memoryview(data),))
        except BaseException:
            writer.discard()
            raise
        return writer

    def _writer(
        self, key: str, session: SessionId, *, durable: bool, direct_io: bool, replace: bool
    ) -> LocalWriter:
        check_key(key)
        check_writable(key, self.url, self._read_only)
        temporary = f"tmp/{session}-{random_digits(8)}"
        try:
            opened = self._directories.having(temporary, lambda: self._create(temporary))
        except OSError as error:
            raise failure(error, "create", key, self.url, writing=True) from error
        return LocalWriter(
            self._directories,
            key,
            opened,
            durable=durable,
            direct_io=direct_io,
            replace=replace,
            named=self.forget_open_files,
        )

    def _create(self, key: str) -> Temporary:
        directory, name = directory_of(self.url, key)
        fd = os.open(name, _CREATE, 0o666 & rights(self.url), dir_fd=directory.fd)
        return Temporary(directory, name, fd)

    def _walk(self, directory: str, prefix: str) -> Iterator[tuple[str, int]]:
        base = f"{directory}/" if directory else ""
        try:
            # Open until its entries were looked at, which are named relative to it.
            opened, _ = directory_of(self.url, f"{base}.", os.O_RDONLY)
            with os.scandir(opened.fd) as found:
                entries = {
                    base + e.name + ("/" if e.is_dir(follow_symlinks=False) else ""): e
                    for e in found
                }
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise failure(error, "list", directory or "the store", self.url) from error
        for key in sorted(entries):
            if key.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key[:-1], prefix)
            elif key.startswith(prefix) and (size := self._listed(key, entries[key])) is not None:
                yield key, size

    def _listed(self, key: str, entry: os.DirEntry[str]) -> int | None:
        """The size of a file; None if it is no regular file or was just deleted. A concurrent
        deletion may or may not be seen."""
        try:
            return listed_bytes(entry) if entry.is_file(follow_symlinks=False) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure(error, "list", key, self.url) from error
