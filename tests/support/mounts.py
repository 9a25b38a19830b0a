"""Filesystems of a test's own: small ones that fill up, ones that lose sectors, ones that several
hosts mount, and ones whose power can be cut. They need root."""

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptstore.core.paths import is_network_filesystem

_FS_IOC_SHUTDOWN = 0x8004587D
"""_IOR('X', 125, __u32), of XFS first and now of ext4 and f2fs as well: what xfstests cuts power
with."""

_WITHOUT_LOG_FLUSH = 2
_FIBMAP = 1
_BLOCK_BYTES = 4096
_LONGEST_NAMESPACE_S = 300.0
_IMAGE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20}


@contextmanager
def small_disk(mountpoint: Path, *, size_bytes: int, files: int = 0) -> Iterator[Path]:
    """A filesystem in memory of `size_bytes`, with room for so many `files` if not 0."""
    mountpoint.mkdir()
    _run(
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={size_bytes}" + (f",nr_inodes={files}" if files else ""),
        "ckptstore-test",
        str(mountpoint),
    )
    try:
        yield mountpoint
    finally:
        _run(
            "umount", "--lazy", str(mountpoint)
        )  # a process that has just been told to close what it has there may not be through


def free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def leave_free(place: Path, nbytes: int) -> Path:
    """Fill the filesystem of `place` but for `nbytes`; returns the file that does."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        if (length := free_bytes(place) - nbytes) > 0:
            os.posix_fallocate(file.fileno(), 0, length)
    return ballast


class PowerDisk:
    """A journalling filesystem in a file, whose power can be cut."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._image, self.mountpoint = folder / f"{kind}.img", folder / kind
        self.mountpoint.mkdir()
        with self._image.open("wb") as image:
            image.truncate(_IMAGE_BYTES[kind])
        _run(f"mkfs.{kind}", "-q", str(self._image))

    def mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.mountpoint))

    def cut(self) -> None:
        """From now on nothing reaches the disk, and what had not yet is lost."""
        fd = os.open(self.mountpoint, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Until the filesystem is gone: a mount namespace that somebody made meanwhile (`ip netns`
        does) has a copy of the mount, and as long as it is there, mounting again gives the
        filesystem that was shut down, not the disk that it left."""
        _run("umount", str(self.mountpoint))
        deadline = time.monotonic() + _LONGEST_NAMESPACE_S
        while self._attached():
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self.mountpoint} is unmounted, and {self._image} still in use: another "
                    "mount namespace keeps it"
                )
            time.sleep(0.01)

    def _attached(self) -> bool:
        """Whether a loop device still leads to the image."""
        for device in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):  # it went meanwhile
                if device.read_text().strip() == str(self._image):
                    return True
        return False


@contextmanager
def failing_disk(mountpoint: Path) -> Iterator[Callable[[Path, int], None]]:
    """A disk that `lose(path, offset)` makes unreadable from a byte of a file on. What is written
    there afterwards can be read again."""
    image = mountpoint.with_name(f"{mountpoint.name}.img")
    mountpoint.mkdir()
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES["ext4"])
    _run("mkfs.ext4", "-q", "-b", str(_BLOCK_BYTES), str(image))
    _run("mount", "-o", "loop", str(image), str(mountpoint))

    def lose(path: Path, offset: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
            (block,) = struct.unpack(
                "I", fcntl.ioctl(fd, _FIBMAP, struct.pack("I", offset // _BLOCK_BYTES))
            )
            os.truncate(image, block * _BLOCK_BYTES)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    try:
        yield lose
    finally:
        _run("umount", str(mountpoint))


@contextmanager
def shared_directory(directory: Path, hosts: int) -> Iterator[list[Path]]:
    """A directory as several hosts see it: each through a mount of its own, by its name a network
    filesystem, that believes for seconds which names and sizes it has seen."""
    directory.mkdir()
    mountpoints = [directory.with_name(f"{directory.name}-{host}") for host in range(hosts)]
    mounted: list[Path] = []
    try:
        for mountpoint in mountpoints:
            mountpoint.mkdir()
            _run(
                "bindfs",
                "-o",
                "subtype=sshfs,attr_timeout=5,entry_timeout=5",
                str(directory),
                str(mountpoint),
            )
            mounted.append(mountpoint)
        yield mountpoints
    finally:
        for mountpoint in mounted:
            _run("umount", str(mountpoint))


@contextmanager
def second_mount(directory: Path, *, network: bool = False) -> Iterator[Path]:
    """The directory by a second path: a mount of its own, by its name a network filesystem or
    not."""
    mountpoint = directory.with_name(f"{directory.name}-again")
    mountpoint.mkdir()
    if network:
        options = "subtype=sshfs,attr_timeout=0,entry_timeout=0"
        _run("bindfs", "-o", options, str(directory), str(mountpoint))
    else:
        _run("mount", "--bind", str(directory), str(mountpoint))
    try:
        yield mountpoint
    finally:
        _run("umount", "--lazy", str(mountpoint))


@cache
def shared_directory_problem() -> str:
    """Why a directory cannot be mounted as a network filesystem here; empty if it can."""
    if not shutil.which("bindfs"):
        return "bindfs is not installed"
    with TemporaryDirectory() as folder:
        try:
            with shared_directory(Path(folder, "shared"), 1) as (mountpoint,):
                return (
                    ""
                    if is_network_filesystem(mountpoint)
                    else "a mount of bindfs does not look like a network filesystem here"
                )
        except (OSError, subprocess.CalledProcessError) as error:
            return f"bindfs cannot mount here: {_why(error)}"


@cache
def small_disk_problem() -> str:
    """Why there can be no small disk here; empty if there can."""
    with TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder, "disk"), size_bytes=1 << 20):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"a tmpfs cannot be mounted here: {_why(error)}"


@cache
def power_disk_problem(kind: str) -> str:
    """Why there can be no disk of this kind whose power can be cut here; empty if there can."""
    if not shutil.which(f"mkfs.{kind}"):
        return f"mkfs.{kind} is not installed"
    with TemporaryDirectory() as folder:
        try:
            disk = PowerDisk(kind, Path(folder))
            disk.mount()
            try:
                disk.cut()
            finally:
                disk.unmount()
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no loop-mounted {kind} whose power can be cut: {_why(error)}"
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _why(error: Exception) -> str:
    return (
        str(error.stderr).strip()
        if isinstance(error, subprocess.CalledProcessError)
        else str(error)
    )
