"""Objects as files under a directory, durable against a power cut.

Invariants: a file gets its final name only after its bytes were fsynced; a name counts as durable only after its directory was
fsynced, and the directories above it were once by this process; no symbolic link is ever opened. Nothing in a store may be read or written
by somebody who may not do the same to the store's directory.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar, cast

from ckptstore.core.config import MIB
from ckptstore.core.ids import SessionId, new_session_id
from ckptstore.core.places import is_network_filesystem, rights
from ckptstore.errors import CkptStoreError, Corrupt, NoSpace, NotFound, ReadOnly, Unavailable
from ckptstore.objects.backend import as_bytes, check_key
from ckptstore.objects.growing import GrowingFile

_OPEN_FILES = 64
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_LOST = frozenset(getattr(errno, name, errno.EIO) for name in ("EIO", "EBADMSG", "EUCLEAN", "EILSEQ", "ENODATA"))
"""What Linux says where a disk cannot give back what it had: bad sectors, blocks and inodes whose checksum does not match."""

_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_BYTES = 32 * MIB

T = TypeVar("T")


class LocalBackend:
    """See `Backend`. Temporary files lie in `tmp/` under the root, so that a rename stays within one filesystem."""

    def __init__(self, root: str | Path, *, read_only: bool = False, fsync: bool = True, direct_io: bool | None = None) -> None:
        self.durable_root: Path | None = Path(root).absolute()
        self.url = str(self.durable_root)
        self._read_only = read_only
        self._fsync: Callable[[int], None] = os.fsync if fsync else _no_fsync
        self._direct_io = direct_io
        self._anchored: set[str] = set()
        self._owner = new_session_id()
        # Evicting a file only drops a reference: a thread that reads from it keeps it open, so no lock is needed.
        self._opened = lru_cache(_OPEN_FILES)(partial(_open_object, self.url))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        def whole(fd: int) -> bytes:
            end = os.fstat(fd).st_size
            return _pread(fd, start, end if stop is None else min(stop, end))

        return self._reading(key, _open_object(self.url, key), whole)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        missing = self._reading(key, self._opened(key), lambda fd: _transfer(os.preadv, fd, offset, buffers))
        if missing:
            raise Corrupt(
                f"{key} in {self.url} ends {missing} bytes before it should: wanted {sum(b.nbytes for b in buffers)} bytes "
                f"from {offset} on; run `ckptstore fsck`"
            )

    def open_file(self, key: str) -> "_OpenFile":
        return self._opened(key)

    def will_need(self, key: str, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(CkptStoreError, OSError):
                file = self._opened(key)
                if not _is_cached(file.fd, offset):
                    os.posix_fadvise(file.fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        def tail(fd: int) -> tuple[bytes, int]:
            end = os.fstat(fd).st_size
            return _pread(fd, max(end - nbytes, 0), end), end

        return self._reading(key, _open_object(self.url, key), tail)

    def size(self, key: str) -> int | None:
        try:
            status = os.stat(self._path(key), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(error, key, self.url) from error
        return status.st_size if S_ISREG(status.st_mode) else None

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        writer = self._write(key, data, durable=durable)
        writer.finish()
        if durable:
            self.sync_dirs((key,))

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        writer = self._write(key, data, durable=True)
        try:
            created = writer.link()
        finally:
            writer.discard()
        if created:
            try:
                self.sync_dirs((key,))
            except NoSpace as error:  # callers take it for "not created", but the name is there
                raise Unavailable(f"{key} is there, but not known to be durable: {error}") from error
        return created

    def create(self, key: str, *, session: SessionId, lean: bool = False, aside: bool = False) -> "LocalWriter":
        direct_io = aside if self._direct_io is None else self._direct_io
        return self._writer(key, session, self._fsync, direct_io=direct_io and not lean)

    def sync_dirs(self, keys: Iterable[str]) -> None:
        for directory in sorted({os.path.dirname(self._path(key)) for key in keys}):
            self._sync_dir(directory)
            self._anchor(directory)

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._check_writable(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _failure(error, "delete", key, self.url, writing=True) from error
        self.forget_open_files()

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        directory = prefix.rpartition("/")[0]
        if directory:
            check_key(directory)
        return self._walk(directory, prefix)

    def close(self) -> None:
        self.forget_open_files()

    def forget_open_files(self) -> None:
        """Open objects anew from here on: one was replaced or deleted."""
        self._opened.cache_clear()

    def _reading(self, key: str, file: "_OpenFile", action: Callable[[int], T]) -> T:
        """`action` with the descriptor of an object. A disk that fails is asked once more, for a cable may have been at fault."""
        try:
            return action(file.fd)
        except OSError as error:
            self._opened.cache_clear()
            if error.errno not in _LOST:
                raise _failure(error, "read", key, self.url) from error
        file = _open_object(self.url, key)
        try:
            return action(file.fd)
        except OSError as error:
            raise _unreadable(error, key, self.url) from error

    def _path(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def _check_writable(self, key: str) -> None:
        if self._read_only:
            raise ReadOnly(f"cannot change {key}: {self.url} was opened for reading only; open it without read_only")

    def _write(self, key: str, data: bytes | memoryview, *, durable: bool) -> "LocalWriter":
        writer = self._writer(key, self._owner, self._fsync if durable else _no_fsync, direct_io=bool(self._direct_io))
        try:
            writer.append((memoryview(data),))
        except BaseException:
            writer.discard()
            raise
        return writer

    def _writer(self, key: str, session: SessionId, fsync: Callable[[int], None], *, direct_io: bool) -> "LocalWriter":
        path = self._path(key)
        self._check_writable(key)
        temporary = f"{self.url}/tmp/{session}-{secrets.token_hex(8)}"
        try:
            fd = self.with_parents(temporary, lambda: os.open(temporary, _CREATE, 0o666 & rights(self.url)))
        except OSError as error:
            raise _failure(error, "create", key, self.url, writing=True) from error
        return LocalWriter(self, key, path, temporary, fd, fsync, direct_io=direct_io)

    def with_parents(self, path: str, action: Callable[[], T]) -> T:
        """`action`, and again after making the directories above `path` if they are missing."""
        try:
            return action()
        except FileNotFoundError:
            self._make_dirs(os.path.dirname(path))
            return action()

    def _make_dirs(self, path: str) -> None:
        """The store's own directories become durable with what is put in them, those above it at once."""
        try:
            os.mkdir(path, rights(self.url) if len(path) > len(self.url) else 0o777)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make_dirs(os.path.dirname(path))
            self._make_dirs(path)
        else:
            if len(path) <= len(self.url):
                self._sync_dir(os.path.dirname(path))

    def _anchor(self, directory: str) -> None:
        """Make the names of `directory` and of those above it durable, once: another process may have made them just now."""
        if directory != self.url and directory not in self._anchored:
            parent = os.path.dirname(directory)
            self._sync_dir(parent)
            self._anchor(parent)
            self._anchored.add(directory)

    def _sync_dir(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise _failure(error, "make durable", path, self.url, writing=True) from error

    def _walk(self, directory: str, prefix: str) -> Iterator[tuple[str, int]]:
        base = f"{directory}/" if directory else ""
        try:
            with os.scandir(f"{self.url}/{directory}") as found:
                entries = {base + e.name + ("/" if e.is_dir(follow_symlinks=False) else ""): e for e in found}
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _failure(error, "list", directory, self.url) from error
        for key in sorted(entries):
            if key.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key[:-1], prefix)
            elif key.startswith(prefix) and entries[key].is_file(follow_symlinks=False):
                # A file deleted since is not there; one that another process is deleting is listed or not, both are right.
                with suppress(FileNotFoundError):
                    yield key, _listed_bytes(entries[key])


class LocalWriter:
    """See `Writer`."""

    def __init__(
        self,
        backend: LocalBackend,
        key: str,
        path: str,
        temporary: str,
        fd: int,
        fsync: Callable[[int], None],
        *,
        direct_io: bool,
    ) -> None:
        self._backend = backend
        self._key = key
        self._path = path
        self._temporary = temporary
        self._fd = fd
        self._fsync = fsync
        self._written = self._sent = 0
        self._file = GrowingFile(fd, self._write_all, direct=direct_io and fsync is os.fsync)

    def append(self, buffers: Sequence[memoryview]) -> None:
        try:
            self._file.append(buffers)
        except OSError as error:
            raise self._failure(error, "write", sum(b.nbytes for b in buffers)) from error
        if self._written - self._sent >= _WRITE_BACK_BYTES:
            self._write_back()

    def finish(self) -> None:
        try:
            self._seal()
            self._backend.with_parents(self._path, partial(os.rename, self._temporary, self._path))
        except OSError as error:
            self.discard()
            raise self._failure(error, "make durable") from error
        self._temporary = ""
        self._backend.forget_open_files()

    def link(self) -> bool:
        """Like `finish`, unless there is an object of that name: then False. `discard` afterwards in either case."""
        try:
            self._seal()
            try:
                self._backend.with_parents(self._path, partial(os.link, self._temporary, self._path))
            except FileExistsError:
                # NFS may repeat a link whose answer was lost and call its own success a failure; the count of names tells.
                return os.stat(self._temporary).st_nlink == 2
        except OSError as error:
            raise self._failure(error, "create") from error
        return True

    def discard(self) -> None:
        self._close()
        if self._temporary:
            # What cannot be unlinked now is found by gc under the session's name.
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def _write_all(self, offset: int, buffers: Sequence[memoryview]) -> None:
        _transfer(os.pwritev, self._fd, offset, buffers)
        self._written = offset + sum(len(buffer) for buffer in buffers)

    def _write_back(self) -> None:
        """Let the disk begin with what the page cache holds of the file; advice that promises nothing and raises nothing."""
        if self._fsync is os.fsync and not self._file.direct:
            _sync_file_range()(self._fd, self._sent, self._written - self._sent, _SYNC_FILE_RANGE_WRITE)
        self._sent = self._written

    def _seal(self) -> None:
        self._file.finish()
        self._fsync(self._fd)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _failure(self, error: OSError, verb: str, nbytes: int = 0) -> CkptStoreError:
        return _failure(error, verb, self._key, self._backend.url, writing=True, nbytes=nbytes)


class _OpenFile:
    """A file descriptor that is closed when the last reference to it goes."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound early: at exit the module may be gone first
        close(self.fd)


def _open_object(root: str, key: str) -> _OpenFile:
    try:
        return _OpenFile(os.open(f"{root}/{check_key(key)}", _READ))
    except OSError as error:
        raise _unreadable(error, key, root) from error


def _listed_bytes(entry: os.DirEntry[str]) -> int:
    """The size of a file; 0 where its inode is damaged, since its name counts all the same."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        if error.errno in _LOST:
            return 0
        raise


def _is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has the byte at `offset`: to announce what is there already costs as much as a tenth of reading it."""
    try:
        return os.preadv(fd, (bytearray(1),), offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False


def _pread(fd: int, start: int, stop: int) -> bytes:
    parts = []
    while start < stop and (part := os.pread(fd, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _transfer(move: Callable[[int, Sequence[memoryview], int], int], fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Repeat `move` (preadv or pwritev) until `buffers` are done; returns the bytes left over at the end of the file."""
    rest = [as_bytes(buffer) for buffer in buffers if buffer.nbytes]
    first = 0
    while first < len(rest):
        moved = move(fd, rest[first : first + _IOV_MAX], offset)
        if not moved:
            break
        offset += moved
        while first < len(rest) and moved >= rest[first].nbytes:
            moved -= rest[first].nbytes
            first += 1
        if moved:
            rest[first] = rest[first][moved:]
    return sum(b.nbytes for b in rest[first:])


def _no_fsync(fd: int) -> None:
    """For those who asked for speed instead of durability."""


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    """glibc's function; where there is none, one that does nothing. Its errors are left to the fsync that follows."""
    # Imported here because queries never write.
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return lambda fd, offset, nbytes, flags: 0
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast(Callable[[int, int, int, int], int], function)


def _unreadable(error: OSError, key: str, root: str) -> CkptStoreError:
    """What a failed read means: what a disk cannot give back is damage like any other, unless a network lies in between."""
    if error.errno not in _LOST or is_network_filesystem(Path(root)):
        return _failure(error, "read", key, root)
    return Corrupt(
        f"cannot read {key} in {root}: {error.strerror}; the disk lost some of it: "
        f"restore another commit, or run `ckptstore fsck` and `ckptstore repair`"
    )


def _failure(error: OSError, verb: str, key: str, root: str, *, writing: bool = False, nbytes: int = 0) -> CkptStoreError:
    """What `error` means to the caller."""
    what = f"cannot {verb} {key} in {root}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{what}; wanted {nbytes} bytes, free are {_free_bytes(root)}; `ckptstore forget` and `gc` make room, then repeat")
    if writing and error.errno in (errno.EACCES, errno.EROFS):
        return ReadOnly(f"{what}; open it with read_only=True or get the right to write there")
    if error.errno in (errno.ELOOP, errno.EISDIR):
        return Corrupt(f"{what}; wanted a regular file; run `ckptstore fsck`")
    if not writing and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return NotFound(f"there is no {key} in {root}")
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
        return Unavailable(f"{what}; a store needs a filesystem with hard links")
    return Unavailable(f"{what}; see to the storage, then repeat")


def _free_bytes(root: str) -> int:
    try:
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
