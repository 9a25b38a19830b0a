"""What lies in a directory? Its files, directories and links, by relative name; links are never
followed. The pointer of a hollow directory, and what an interrupted `hollow` or `materialize` left
there, are none of its content."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptstore.errors import InvalidInput, NotFound, Unavailable
from ckptstore.plugin.pointers import HOLLOW_POINTER
from ckptstore.plugin.text import unicode_text

_OURS = re.compile(rf"{re.escape(HOLLOW_POINTER)}|\.{re.escape(HOLLOW_POINTER)}-[0-9a-f]+")
"""The pointer, and folders of `core.paths.scratch_for` for it."""

_FOLDER_MODES = 0o3777
"""Modes of directories that are set again."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory."""

    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, as its text."""

    target: str
    mtime_ns: int


class Identity(NamedTuple):
    """Which file or directory of this host something is, while it exists."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        return cls(status.st_dev, status.st_ino)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A regular file. Whoever opens `path` follows no link, and compares what was opened with
    `identity`: the path may lead elsewhere by then."""

    path: Path
    identity: Identity


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a directory. `folders` has the directory as `""`."""

    folders: dict[str, Folder]
    links: dict[str, Link]
    files: dict[str, ListedFile]


def restore_folder(path: Path, folder: Folder) -> None:
    """Set mode and time of a directory."""
    path.chmod(folder.mode & _FOLDER_MODES)
    os.utime(path, ns=(folder.mtime_ns, folder.mtime_ns))


def list_directory(root: Path) -> Listing:
    """Everything below `root`, in order of the names. Raises `InvalidInput` for a socket, a pipe or
    a device, and for names that are not Unicode; `Unavailable` for what cannot be read, or becomes
    something else meanwhile."""
    found = Listing({}, {}, {})
    try:
        if not os.path.exists(root):
            raise NotFound(f"there is no directory {root} to adopt")
        if not root.is_dir():
            raise InvalidInput(f"{root} is not a directory; wanted one to adopt")
        root = root.resolve()
        todo = [_Listed("", root.stat())]
        while todo:
            here = todo.pop()
            path = root / here.name if here.name else root
            if here.target is not None:
                found.links[here.name] = Link(here.target, here.status.st_mtime_ns)
            elif stat.S_ISREG(here.status.st_mode):
                found.files[here.name] = ListedFile(path, Identity.of(here.status))
            else:
                mode = here.status.st_mode & 0o7777
                found.folders[here.name] = Folder(mode, here.status.st_mtime_ns)
                todo += reversed(_content(path, here))
    except OSError as error:
        raise Unavailable(
            f"cannot read {error.filename}: {error.strerror}; see that it is there and may be "
            "read, then repeat"
        ) from error
    return found


class _Listed(NamedTuple):
    """Something below the root; `target` is the text of a link."""

    name: str
    status: os.stat_result
    target: str | None = None


def _content(path: Path, folder: _Listed) -> list[_Listed]:
    """What lies in the directory `folder`, which is at `path`, in order of the names."""
    fd = os.open(path, _FOLDER)
    try:
        if Identity.of(os.fstat(fd)) != Identity.of(folder.status):
            raise Unavailable(f"{path} became another directory while it was listed; repeat this")
        with os.scandir(fd) as entries:
            names = sorted(entry.name for entry in entries)
        ours = () if folder.name else tuple(filter(_OURS.fullmatch, names))
        return [_listed(path, folder.name, name, fd) for name in names if name not in ours]
    finally:
        os.close(fd)


def _listed(folder: Path, above: str, name: str, fd: int) -> _Listed:
    """What `name` is, in the directory that is open as `fd`."""
    below = f"{above}/{name}" if above else name
    path = folder / name
    if unicode_text(below) != below:
        raise InvalidInput(
            f"the name of {path} is not Unicode, as names in a commit must be; rename it"
        )
    here = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if stat.S_ISLNK(here.st_mode):
        target = os.readlink(name, dir_fd=fd)
        if unicode_text(target) != target:
            raise InvalidInput(f"the link {path} leads to a name that is not Unicode")
        return _Listed(below, here, target)
    if not stat.S_ISDIR(here.st_mode) and not stat.S_ISREG(here.st_mode):
        raise InvalidInput(
            f"{path} is not a regular file but a socket, a pipe or a device, which a commit "
            "cannot hold; remove it, or adopt another directory"
        )
    return _Listed(below, here)
