"""What the harness needs of the file system: a real disk, durability, an empty cache, an honest
size. Linux only."""

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
MANY_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def filesystem(path: Path) -> str:
    """The type of the file system that holds `path`, as the kernel calls it: `ext4`, `tmpfs`."""
    found, best = "unknown", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        point = mount.split()[4]
        if len(point) >= best and path.resolve().is_relative_to(point):
            found, best = kind.split()[0], len(point)
    return found


def work_dir(wanted: Path | None) -> Path:
    """A new folder on a disk: below `wanted`, or below the first of the usual places that is one.
    Exits if there is none."""
    places = [wanted] if wanted else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for place in places:
        if place.is_dir() and filesystem(place) not in IN_MEMORY:
            return Path(tempfile.mkdtemp(prefix="ckptstore-bench-", dir=place))
    seen = ", ".join(
        f"{place} ({filesystem(place) if place.is_dir() else 'not a folder'})" for place in places
    )
    raise SystemExit(
        f"no folder on a disk among {seen}: durable writes to memory measure nothing; pass --dir "
        "with a folder on a disk"
    )


def files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def settle(folder: Path) -> None:
    """Make everything below `folder` durable: every file, then every directory. What is durable
    already costs next to nothing."""
    paths = list(files(folder))
    if len(paths) > MANY_FILES:
        os.sync()
        return
    for path in [*paths, *(Path(parent) for parent, _, _ in os.walk(folder, topdown=False))]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_cache(folder: Path) -> None:
    """Evict every file below `folder` from the page cache; pages must be clean for that, so they
    are written first."""
    settle(folder)
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def used_bytes(folder: Path) -> int:
    """What `du` says: the blocks of every file and folder, holes not counted."""
    folders = [Path(parent) for parent, _, _ in os.walk(folder)]
    return sum(path.lstat().st_blocks * 512 for path in [*folders, *files(folder)])


def start_write_back(fd: int, start: int, stop: int) -> None:
    """Let the disk work on a range while the processor goes on:
    `sync_file_range(SYNC_FILE_RANGE_WRITE)`."""
    if _libc.sync_file_range(
        fd,
        ctypes.c_int64(start),
        ctypes.c_int64(stop - start),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    ):
        raise OSError(ctypes.get_errno(), "sync_file_range")
