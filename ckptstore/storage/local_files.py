"""The files of a store on a local disk: opened without following links, read and written whole, and
what their failures mean."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ckptstore.core.paths import is_network_filesystem
from ckptstore.errors import CkptStoreError, Corrupt, NoSpace, NotFound, ReadOnly, Unavailable
from ckptstore.storage.contract import as_bytes, check_key

LOST = frozenset(
    getattr(errno, name, errno.EIO) for name in ("EIO", "EBADMSG", "EUCLEAN", "EILSEQ", "ENODATA")
)
"""What Linux says where a disk cannot give back what it had: bad sectors, blocks and inodes whose
checksum does not match."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Without waiting: a FIFO would wait for a writer that never comes."""


class Descriptor:
    """A file descriptor that is closed when the last reference to it goes."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # bound early: at exit the module may be gone first
        with suppress(OSError):  # it was read from; what it said has been checked
            close(self.fd)


def open_object(root: str, key: str) -> Descriptor:
    """The regular file at `key`, open. Raises `Corrupt` for whatever else lies there: links,
    directories, FIFOs, sockets, devices."""
    try:
        file = Descriptor(os.open(f"{root}/{check_key(key)}", _READ))
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
    """The size of a file; 0 where its inode is damaged, since its name counts all the same."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        if error.errno in LOST:
            return 0
        raise


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has the byte at `offset`: to announce what is there already costs as
    much as a tenth of reading it."""
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


def unreadable(error: OSError, key: str, root: str) -> CkptStoreError:
    """What a failed read means: what a disk cannot give back is damage like any other, unless a
    network lies in between."""
    if error.errno not in LOST or is_network_filesystem(Path(root)):
        return failure(error, "read", key, root)
    return Corrupt(
        f"cannot read {key} in {root}: {error.strerror}; the disk lost some of it: "
        f"restore another commit, or run `ckptstore fsck` and `ckptstore repair`"
    )


def failure(
    error: OSError, verb: str, key: str, root: str, *, writing: bool = False, nbytes: int = 0
) -> CkptStoreError:
    """What `error` means to the caller."""
    what = f"cannot {verb} {key} in {root}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"{what}; wanted {nbytes} bytes, free are {_free_bytes(root)}; `ckptstore forget` and "
            "`gc` make room, then repeat"
        )
    if writing and error.errno in (errno.EACCES, errno.EROFS):
        return ReadOnly(f"{what}; open it with read_only=True or get the right to write there")
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
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
