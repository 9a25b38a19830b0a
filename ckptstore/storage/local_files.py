"""How are files and directories of a local store opened, read, written and synced?

No link beneath the store's directory is followed: each directory on the way to a key is opened by
the handle of the one above, and the last name by the handle of its directory (openat(2)). The
store's own directory, and those above it, may be links.

A file's name appears only after its bytes are durable: a
new object gets it by link(2), which never replaces a file and works on every filesystem with hard
links; rename(2) replaces. A name counts as durable only after its directory was fsynced; this
process fsyncs the directories above once.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from ckptstore.core.config import MIB
from ckptstore.core.paths import is_network_filesystem, rights
from ckptstore.errors import (
    CkptStoreError,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.storage.contract import as_bytes, check_key, name_taken
from ckptstore.storage.direct_io_file import GrowingFile, pieces

LOST = frozenset(
    getattr(errno, name, errno.EIO) for name in ("EIO", "EBADMSG", "EUCLEAN", "EILSEQ", "ENODATA")
)
"""What Linux says where a disk cannot give back what it had: bad sectors, blocks and inodes whose
checksum does not match."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Without waiting: a FIFO would wait for a writer that never comes."""


class Descriptor:
    """A file descriptor that closes with its last reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # bound early: at exit the module may be gone first
        # It was read from; what it said has been checked. Interrupted in `__init__`, it has none.
        with suppress(OSError, AttributeError):
            close(self.fd)


def directory_of(root: str, key: str, flags: int = os.O_PATH) -> tuple[Descriptor, str]:
    """The directory of `key`, open with `flags`, and the name of `key` in it.

    Raises `OSError`: ELOOP if one of the directories beneath `root` is a link.
    """
    first, *rest = key.split("/")
    if not rest:
        return Descriptor(os.open(root, flags | _DIRECTORY)), first
    try:
        # The path up to the store's directory may lead through links; its last name may not be one.
        found = Descriptor(os.open(f"{root}/{first}", flags | _DIRECTORY | os.O_NOFOLLOW))
        for name in rest[:-1]:
            found = Descriptor(os.open(name, flags | _DIRECTORY | os.O_NOFOLLOW, dir_fd=found.fd))
    except NotADirectoryError as error:
        _refuse_links(root, key, error)
        raise
    return found, rest[-1]


def _refuse_links(root: str, key: str, error: OSError) -> None:
    """Tell a link on the way to `key` from a file: Linux says ENOTDIR for both."""
    names = key.split("/")[:-1]
    for n in range(1, len(names) + 1):
        if os.path.islink(path := "/".join([root, *names[:n]])):
            raise OSError(errno.ELOOP, f"{'/'.join(names[:n])} is a symbolic link", path) from error


def give_name(root: str, source: str, target: str) -> None:
    """Give the file at the key `source` a second name, the key `target` (link(2)). Raises
    `OSError`."""
    old, new = directory_of(root, source), directory_of(root, target)
    os.link(old[1], new[1], src_dir_fd=old[0].fd, dst_dir_fd=new[0].fd, follow_symlinks=False)


def open_object(root: str, key: str) -> Descriptor:
    """The regular file at `key`, open. Raises `Corrupt` for links, directories, FIFOs, sockets
    and devices, and where a directory above it is a link."""
    try:
        directory, name = directory_of(root, check_key(key))
        file = Descriptor(os.open(name, _READ, dir_fd=directory.fd))
        mode = os.fstat(file.fd).st_mode
    except OSError as error:
        raise unreadable(error, key, root) from error
    if not stat.S_ISREG(mode):
        raise Corrupt(
            f"cannot read {key} in {root}: it is {_kind_of(mode)}; wanted a regular file; run "
            "`ckptstore fsck`"
        )
    return file


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def listed_bytes(entry: os.DirEntry[str]) -> int:
    """The size of a file; 0 if its inode is damaged, since its name still counts."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        if error.errno in LOST:
            return 0
        raise


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has the byte at `offset`."""
    try:
        return os.preadv(fd, (bytearray(1),), offset, getattr(os, "RWF_NOWAIT", 0)) == 1
    except OSError:
        return False


def read_range(fd: int, start: int, stop: int) -> bytes:
    parts = []
    while start < stop and (part := os.pread(fd, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def transfer(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    offset: int,
    buffers: Sequence[memoryview],
) -> int:
    """Repeat `move` (preadv or pwritev) until `buffers` are done; returns the bytes left over at
    the end of the file."""
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


def write_cached(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write `buffers` through the page cache, piece by piece."""
    for piece in pieces(map(as_bytes, buffers)):
        transfer(os.pwritev, fd, offset, piece)
        offset += sum(map(len, piece))


def unreadable(error: OSError, key: str, root: str) -> CkptStoreError:
    """Translate a failed read. Unreadable bytes count as damage, except on a network filesystem."""
    if error.errno not in LOST or is_network_filesystem(Path(root)):
        return failure(error, "read", key, root)
    return Corrupt(
        f"cannot read {key} in {root}: {error.strerror}; the disk lost some of it: "
        f"restore another commit, or run `ckptstore fsck` and `ckptstore repair`"
    )


def _is_below_a_file(root: Path) -> bool:
    """Whether the path of a store leads through a file, so that no store can be there."""
    return any(path.is_file() for path in (root, *root.parents))


def failure(
    error: OSError,
    verb: str,
    key: str,
    root: str,
    *,
    writing: bool = False,
    linking: bool = False,
    nbytes: int = 0,
) -> CkptStoreError:
    """Translate `error` into an error of this package. `linking` says that link(2) failed."""
    what = f"cannot {verb} {key} in {root}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"{what}; wanted {nbytes} bytes, free are {_free_bytes(root)}; `ckptstore forget` and "
            "`gc` make room, then repeat"
        )
    if writing and error.errno in (errno.EACCES, errno.EROFS):
        return ReadOnly(
            f"{what}; get the right to write there, or only read (in Python, open it with "
            "read_only=True)"
        )
    if writing and error.errno == errno.ENOTDIR and _is_below_a_file(Path(root)):
        return InvalidInput(f"{what}: a part of that path is a file; choose another path")
    if error.errno == errno.ELOOP:
        return Corrupt(
            f"{what}; no link beneath a store is followed: put what it leads to in its place "
            "(`mount --bind` for another disk), or delete it and run `ckptstore fsck`"
        )
    if error.errno in (errno.EISDIR, errno.ENXIO):
        return Corrupt(f"{what}; wanted a regular file; run `ckptstore fsck`")
    if not writing and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return NotFound(f"there is no {key} in {root}")
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
        return Unavailable(f"{what}; a store needs a filesystem with hard links")
    if linking and error.errno in (errno.EIO, errno.ENOSYS):
        return Unavailable(
            f"{what}; a store needs a filesystem with hard links, and this one seems to have none "
            "(rclone's mounts answer so): choose another place; if it has them, see to the "
            "storage, then repeat"
        )
    return Unavailable(f"{what}; see to the storage, then repeat")


def _free_bytes(root: str) -> int:
    try:
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


T = TypeVar("T")


class Directories:
    """The directories below `root`, and above it until it exists. With `fsync=False` nothing is
    made durable."""

    def __init__(self, root: str, *, fsync: bool) -> None:
        self.root = root
        self._fsync = fsync
        self._anchored: set[str] = set()

    def having(self, key: str, action: Callable[[], T]) -> T:
        """Run `action`; if the directories above `key` are missing, create them and run it
        again."""
        try:
            return action()
        except FileNotFoundError:
            self._make(os.path.dirname(f"{self.root}/{key}"))
            return action()

    def sync(self, directory: str) -> None:
        """Make the names in `directory` durable, and the names of `directory` and its parents."""
        self._sync_names(directory)
        self._anchor(directory)

    def _make(self, path: str) -> None:
        """Create directories. Those of the store become durable with the objects in them, those
        above it at once."""
        try:
            self._make_below(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make(os.path.dirname(path))
            with suppress(FileExistsError):  # another process may be making them
                self._make_below(
                    path
                    # once more, not for ever: a link that leads nowhere is there, and nothing can
                    # be made below it
                )

    def _make_below(self, path: str) -> None:
        if len(path) > len(self.root):
            directory, name = directory_of(self.root, path[len(self.root) + 1 :])
            os.mkdir(name, rights(self.root), dir_fd=directory.fd)
        else:
            os.mkdir(path, 0o777)
            self._sync_names(os.path.dirname(path))

    def _anchor(self, directory: str) -> None:
        """Make the names of `directory` and of those above it durable, once: another process may
        just have created them."""
        if directory != self.root and directory not in self._anchored:
            parent = os.path.dirname(directory)
            self._sync_names(parent)
            self._anchor(parent)
            self._anchored.add(directory)

    def _sync_names(self, directory: str) -> None:
        if not self._fsync:
            return
        try:
            follow = os.O_NOFOLLOW if len(directory) > len(self.root) else 0
            fd = os.open(directory, os.O_RDONLY | _DIRECTORY | follow)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise failure(error, "make durable", directory, self.root, writing=True) from error


_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_BYTES = 32 * MIB


class Temporary(NamedTuple):
    """A file to write: its directory, which stays open until it has its name, its name there, and
    the file itself."""

    directory: Descriptor
    name: str
    fd: int


class LocalWriter:
    """`Writer` of a local file. The bytes go to `temporary`, which becomes `key` in `directories`.

    Without `durable` nothing is fsynced. With `direct_io` a large file bypasses the page cache.
    """

    def __init__(
        self,
        directories: Directories,
        key: str,
        temporary: Temporary,
        *,
        durable: bool,
        direct_io: bool,
        replace: bool,
        named: Callable[[], None],
    ) -> None:
        """`named` is called once the object has its name, which may have replaced another
        object. `replace` allows replacing a finished one."""
        self._directories = directories
        self._key = key
        self._temporary: Temporary | None = temporary
        self._fd = fd = temporary.fd
        self._durable = durable
        self._replace = replace
        self._named = named
        self._sent = 0
        write_all = partial(transfer, os.pwritev, fd)
        self._file = GrowingFile(fd, write_all, direct=direct_io and durable)

    def append(self, buffers: Sequence[memoryview]) -> None:
        try:
            self._file.append(buffers)
        except OSError as error:
            raise self._failure(error, "write", sum(b.nbytes for b in buffers)) from error
        if self._file.written - self._sent >= _WRITE_BACK_BYTES:
            self._write_back()

    def finish(self) -> bool:
        try:
            self._seal()
            created = self._rename() if self._replace else self._link()
        except OSError as error:
            self.discard()
            raise self._failure(error, "make durable") from error
        self.discard()
        if not created:
            raise name_taken(self._key, self._directories.root)
        self._named()
        return True

    def link(self) -> bool:
        """Like `finish`, but returns False if an object has that name. Call `discard` afterwards
        in either case."""
        try:
            self._seal()
            return self._link()
        except OSError as error:
            raise self._failure(error, "create") from error

    def discard(self) -> None:
        with suppress(OSError):  # nobody will read it
            self._close()
        temporary, self._temporary = self._temporary, None
        if temporary:
            # What cannot be unlinked now is found by gc under the session's name.
            with suppress(OSError):
                os.unlink(temporary.name, dir_fd=temporary.directory.fd)

    def _rename(self) -> bool:
        self._directories.having(self._key, partial(self._name, os.rename))
        self._temporary = None
        return True

    def _link(self) -> bool:
        link = partial(os.link, follow_symlinks=False)
        try:
            self._directories.having(self._key, partial(self._name, link))
        except FileExistsError:
            # NFS may repeat a link whose answer was lost and call its own success a failure; the
            # count of names tells.
            assert self._temporary
            directory, name, _ = self._temporary
            return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_nlink == 2
        return True

    def _name(self, name_it: Callable[..., None]) -> None:
        """Give the file its name by link(2) or rename(2)."""
        assert self._temporary
        old, name, _ = self._temporary
        new, new_name = directory_of(self._directories.root, self._key)
        name_it(name, new_name, src_dir_fd=old.fd, dst_dir_fd=new.fd)

    def _write_back(self) -> None:
        """Advise the disk to start writing the file's cached pages. Promises and raises nothing."""
        written = self._file.written
        if self._durable and not self._file.direct:
            _sync_file_range()(self._fd, self._sent, written - self._sent, _SYNC_FILE_RANGE_WRITE)
        self._sent = written

    def _seal(self) -> None:
        self._file.finish()
        if self._durable:
            os.fsync(self._fd)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _failure(self, error: OSError, verb: str, nbytes: int = 0) -> CkptStoreError:
        linking = not self._replace and error.filename2 is not None
        root = self._directories.root
        return failure(error, verb, self._key, root, writing=True, linking=linking, nbytes=nbytes)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    """glibc's function, or a function that does nothing. Its errors are left to the fsync that
    follows."""
    # Imported here because queries never write.
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return lambda fd, offset, nbytes, flags: 0
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast(Callable[[int, int, int, int], int], function)
