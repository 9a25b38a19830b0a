"""Which paths of this host may hold stores, indexes and caches, with which permissions, and which
store encloses a directory?

A file or folder appears only once it is complete (`scratch_for`).

Only `search` looks at parent directories (docs/decisions/042-…), for commands and for
interfaces that know paths alone. A store that the user names is never checked here, because
naming it is consent. A directory is searched only while it belongs to this user alone. The
search ends at

* a directory of another user, or one that others may write to, which it searches last,
* the directory above a mount point, likewise,
* a directory of `$CKPTSTORE_CEILING`, which it does not search, unless it began there.

A store at the end of the search, or one whose directory or configuration others could have
written, is refused with an error. Directories below those in `$CKPTSTORE_SAFE_DIRECTORIES` count
as this user's alone and as one file system.
"""

import errno
import fcntl
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptstore.core.ids import CONFIG_KEY, random_digits
from ckptstore.core.text import redact
from ckptstore.errors import InvalidInput

_LOCAL = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 ubifs "
    "vfat msdos exfat ntfs ntfs3 hfs hfsplus udf iso9660 squashfs erofs "
    "tmpfs ramfs devtmpfs hugetlbfs rootfs overlay aufs ecryptfs "
    "fuseblk fuse.fuse-overlayfs fuse.fuse2fs"
)
"""Types of file systems that no other host writes to. Any other type counts as shared: a table of
network file systems is never complete, and `fuse.glusterfs`, `fuse.ceph-fuse` and `fuse.rclone`
are names that only the mount table tells. A local one that is missing here costs little: its
indexes lie in the cache directory."""

_MOUNT_TABLE = Path("/proc/self/mountinfo")
_URL_WITHOUT_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)(.*)", re.DOTALL)
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` for text that no file system accepts as a path: it has a NUL, or
    surrogates that stand for no byte; and for a URL that has lost a slash, as `pathlib` does to it:
    it would silently be a directory of this host."""
    text = os.fspath(path)
    if lost := _URL_WITHOUT_SLASH.fullmatch(text):
        scheme, rest = lost.groups()
        url = f"{scheme}:///{rest}" if scheme.lower() == "file" else f"{scheme}://{rest}"
        raise InvalidInput(
            f"{redact(text)} would be a path below a directory {scheme + ':'!r} of this host; if "
            f"the URL {redact(url)} is meant, write it so, as text: pathlib.Path drops one of its "
            f"slashes. ./{redact(text)} is that directory"
        )
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
    import tempfile  # only here, as `shutil` below: together they take 6 ms to import

    own = Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        if not distrust(own):
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


def make_index_directory(path: Path) -> None:
    """`make_directories`, for a directory beneath which no link is followed. Raises `OSError` if
    it is a link itself."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    make_directories(path)


def index_file(path: str | os.PathLike[str]) -> Path:
    """One absolute path for each file in an index directory: links above that directory are
    resolved, itself and `path` are not."""
    plain = Path(path).absolute()
    return Path(os.path.realpath(plain.parent.parent), plain.parent.name, plain.name)


def is_plain(path: Path) -> bool:
    """Whether `path` is a regular file itself, in a directory that is no link: a library that
    opens it by its path follows none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except OSError:
        return False


def read_plain(path: Path) -> bytes:
    """The content of a regular file. Raises `OSError`, also for a link, and at once for a FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
        return file.read()


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
    """Whether other hosts may write to the file system of `path`, by its type in the mount table;
    False without such a table."""
    kind = file_system(path)
    return bool(kind) and kind not in _LOCAL.split()


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
        _remove(folder)
        with suppress(OSError):
            os.close(lock)


def _remove(folder: str | os.PathLike[str]) -> None:
    try:
        os.rmdir(folder)  # what was written has its name
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def replace_file(target: Path, data: bytes) -> None:
    """Replace the content of `target` atomically but not durably, with no more permissions than
    its directory. Raises `OSError`."""
    with scratch_for(target) as new:
        write_file(new, data)
        new.replace(target)


def _make_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.with_name(f".{target.name}-{random_digits(_TOKEN_BYTES)}")
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
                _remove(folder)
        finally:
            os.close(lock)


BESIDE = ".ckptstore"
"""A store under this name serves the directory that it lies in, which holds other things too."""

CEILING = "CKPTSTORE_CEILING"
SAFE = "CKPTSTORE_SAFE_DIRECTORIES"


@dataclass(frozen=True, slots=True)
class Search:
    """The `store` that was found, the directories that were `passed` on the way to it, and why the
    search went no further up (`end`, empty where it reached the root or a store)."""

    store: Path | None
    passed: tuple[Path, ...]
    end: str = ""


def search(start: Path) -> Search:
    """Look for the store that encloses `start`, which need not exist: at `start`, and at each
    directory above while that is this user's alone. Symbolic links on the way to `start` are
    resolved first.

    Raises `InvalidInput` for a store that others could have put there, naming it and the ways to
    use it or to leave it out.
    """
    start = Path(os.path.realpath(start))
    ceilings, safe, mounts = _listed(CEILING), _listed(SAFE), mount_points()
    passed: list[Path] = []
    below: Path | None = None
    for directory in (start, *start.parents):
        if directory != start and directory in ceilings:
            return Search(None, tuple(passed), f"{directory} is in ${CEILING}")
        if not directory.is_dir():
            continue
        trusted = _covers(safe, directory)
        end = "" if trusted else _beyond(below, mounts) or distrust(directory)
        if store := _store_in(directory):
            reason = end or ("" if trusted else _distrust_store(store))
            if reason:
                raise InvalidInput(_refusal(store, directory, reason))
            return Search(store, tuple(passed))
        if end:
            return Search(None, tuple(passed), end)
        passed.append(directory)
        below = directory
    return Search(None, tuple(passed))


def base_of(store: Path) -> Path:
    """The directory that a store serves: itself, or the one that it lies in as `.ckptstore`."""
    return store.parent if store.name == BESIDE else store


def is_alone(directory: Path) -> bool:
    """Whether a store may be created in `directory` by default: it belongs to this user alone,
    or is listed as safe."""
    directory = Path(os.path.realpath(directory))
    return _covers(_listed(SAFE), directory) or not distrust(directory)


def distrust(path: Path) -> str:
    """Why other users could have written `path`, or its content; empty if only this user could,
    or if it is absent."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be examined ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user ({_user(status.st_uid)})"
    if status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not _is_private(path, status.st_gid)
    ):
        return (
            f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o}, group "
            f"{_group(status.st_gid)})"
        )
    return ""


def _store_in(directory: Path) -> Path | None:
    return next(
        (place for place in (directory, directory / BESIDE) if os.path.lexists(place / CONFIG_KEY)),
        None,
    )


def _distrust_store(store: Path) -> str:
    return distrust(store) or distrust(store / CONFIG_KEY)


def _beyond(below: Path | None, mounts: frozenset[Path] | None) -> str:
    """Why the parent of `below` is on another file system; empty if it is not."""
    if below is None:
        return ""
    is_mount = os.path.ismount(below) if mounts is None else below in mounts
    return f"{below} is a mount point" if is_mount else ""


def _refusal(store: Path, directory: Path, reason: str) -> str:
    return (
        f"there is a store at {store}, which is not used because nobody named it and {reason}. If "
        f"you know it, name it: -s {store}, or "
        f"ckptstore.open({str(store)!r}); or list {base_of(store)} in ${SAFE}, for all that lies "
        "below it. "
        f"To leave it out, list {directory} in ${CEILING}"
    )


def _listed(variable: str) -> frozenset[Path]:
    return frozenset(
        Path(os.path.realpath(place))
        for place in os.environ.get(variable, "").split(os.pathsep)
        if place
    )


def _covers(listed: frozenset[Path], directory: Path) -> bool:
    return not listed.isdisjoint((directory, *directory.parents))


def _is_private(path: Path, gid: int) -> bool:
    """Whether a group is this user's private one, as many systems make for each account, and no
    access list says more."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != user.pw_gid or group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return False
    try:
        return "system.posix_acl_access" not in os.listxattr(path, follow_symlinks=False)
    except OSError:
        return True  # a file system without attributes has no access lists of this kind


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
