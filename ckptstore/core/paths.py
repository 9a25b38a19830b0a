"""Which paths of this host may hold stores, indexes and caches, and with which permissions?

A file or folder appears only once it is complete (`scratch_for`).
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.errors import InvalidInput

_NETWORK = (
    "nfs nfs4 lustre cifs smb3 smbfs ceph glusterfs gpfs beegfs pvfs2 orangefs afs 9p "
    "fuse.sshfs fuse.s3fs fuse.gcsfuse fuse.juicefs"
)
"""Types of file systems that other hosts may write to."""

_MOUNT_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` for text that no file system accepts as a path: it has a NUL, or
    surrogates that stand for no byte."""
    text = os.fspath(path)
    try:
        os.fsencode(text)
        possible = "\0" not in text
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise InvalidInput(
            f"{text!r} cannot be a path: it has a NUL, or characters that stand for no bytes"
        )


def cache_directory() -> Path:
    """`$CKPTSTORE_CACHE`, else `$XDG_CACHE_HOME/ckptstore`, else `~/.cache/ckptstore`."""
    if named := os.environ.get("CKPTSTORE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptstore"


def local_cache_directory() -> Path:
    """The cache directory if it is on a local disk, else a private folder in the host's
    temporary directory.

    Mapped or locked databases need a local disk; a home directory shared by many hosts is not
    one. If no folder can be created there is no error here: an index in it is skipped.
    """
    directory = cache_directory()
    if not is_network_filesystem(directory):
        return directory
    own = Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        if (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.getuid()
            and not status.st_mode & 0o022
        ):
            return own
    return Path(os.devnull) / "ckptstore"


def rights(directory: str | Path) -> int:
    """The largest permissions for new files in `directory`: those of the directory, and always
    all for the owner. The umask applies too."""
    try:
        return stat.S_IMODE(os.stat(directory).st_mode) & 0o777 | 0o700
    except OSError:
        return 0o777


def make_directories(path: Path) -> None:
    """Create `path` and missing parents, each with no more permissions than its parent. Existing
    ones are fine."""
    if not path.is_dir():
        if path.parent != path:
            make_directories(path.parent)
        path.mkdir(mode=rights(path.parent), exist_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, with no more permissions than its directory."""
    fd = os.open(
        path,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW,
        0o666 & rights(path.parent),
    )
    with open(fd, "wb") as file:
        file.write(data)


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_network_filesystem(path: Path) -> bool:
    """Whether the mount table says that other hosts may write to the file system of `path`."""
    return file_system(path) in _NETWORK.split()


def file_system(path: Path) -> str:
    """The type of the file system of `path` (`ext4`), `""` if the mount table cannot be read."""
    target = os.path.realpath(path)
    best, kind = -1, ""
    for mount, its_kind in _mounts() or ():
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= best:
            best, kind = len(mount), its_kind
    return kind


def mount_points() -> frozenset[Path] | None:
    """The mount points of this host, None if the mount table cannot be read."""
    mounts = _mounts()
    return None if mounts is None else frozenset(Path(mount) for mount, _ in mounts)


def _mounts() -> list[tuple[str, str]] | None:
    """Each mount point with its type, in the order of mounting."""
    try:
        return parse_mounts(_MOUNT_TABLE.read_bytes())
    except OSError:
        return None


def parse_mounts(table: bytes) -> list[tuple[str, str]]:
    """The mount points and types in a mount table (proc_pid_mountinfo(5)). Paths are bytes, with
    spaces, tabs, newlines and backslashes as octal escapes."""
    mounts = []
    for line in table.split(b"\n"):
        left, _, right = line.partition(b" - ")
        if right:
            path = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), left.split(b" ")[4])
            mounts.append((os.fsdecode(path), os.fsdecode(right.split(b" ")[0])))
    return mounts


_TOKEN_BYTES = 6
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """A path beside `target`, on the same filesystem, for content that the block renames to
    `target`. The directory of `target` must exist.

    It lies in a folder of its own, which the process locks (flock(2)). The lock ends with the
    process, so the next writer of the same target recognizes abandoned folders and removes them.
    """
    _sweep(target)
    folder, lock = _make_folder(target)
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.close(lock)


def replace_file(target: Path, data: bytes) -> None:
    """Replace the content of `target` atomically but not durably, with no more permissions than
    its directory. Raises `OSError`."""
    with scratch_for(target) as new:
        write_file(new, data)
        new.replace(target)


def _make_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.with_name(f".{target.name}-{secrets.token_hex(_TOKEN_BYTES)}")
        folder.mkdir(mode=rights(target.parent))
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(folder, _FOLDER)
            with suppress(OSError):  # a filesystem without locks: what a kill leaves stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _sweep(target: Path) -> None:
    """Remove the folders of processes that were killed while they wrote `target`."""
    name = re.compile(rf"\.{re.escape(target.name)}-[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
    with suppress(OSError), os.scandir(target.parent) as found:
        for folder in [entry.path for entry in found if name.fullmatch(entry.name)]:
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: str) -> None:
    with suppress(OSError):
        lock = os.open(folder, _FOLDER)
        try:
            status = os.fstat(lock)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
