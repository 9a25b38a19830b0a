"""What lies in a directory? Its files, directories and links, by relative name; links are never
followed. The pointer of a hollow directory, and what an interrupted `hollow` or `materialize` left
there, are none of its content."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ckptstore.core.text import unicode_text
from ckptstore.errors import InvalidInput, NotFound, Unavailable
from ckptstore.objects.pointer_files import HOLLOW_POINTER

_OURS = re.compile(rf"{re.escape(HOLLOW_POINTER)}|\.{re.escape(HOLLOW_POINTER)}-[0-9a-f]+")
"""The pointer, and folders of `core.paths.scratch_for` for it."""

_FOLDER_MODES = 0o3777
"""Modes of directories that are set again."""


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


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a directory. `folders` has the directory as `""`; `files` are paths."""

    folders: dict[str, Folder]
    links: dict[str, Link]
    files: dict[str, Path]


def restore_folder(path: Path, folder: Folder) -> None:
    """Set mode and time of a directory."""
    path.chmod(folder.mode & _FOLDER_MODES)
    os.utime(path, ns=(folder.mtime_ns, folder.mtime_ns))


def list_directory(root: Path) -> Listing:
    """Everything below `root`, in order of the names. Raises `InvalidInput` for a socket, a pipe or
    a device, and for names that are not Unicode; `Unavailable` for what cannot be read."""
    found = Listing({}, {}, {})
    try:
        if not os.path.exists(root):
            raise NotFound(f"there is no directory {root} to adopt")
        if not root.is_dir():
            raise InvalidInput(f"{root} is not a directory; wanted one to adopt")
        _list(root, "", os.stat(root), found)
    except OSError as error:
        raise Unavailable(
            f"cannot read {error.filename}: {error.strerror}; see that it is there and may be "
            "read, then repeat"
        ) from error
    return found


def _list(folder: Path, name: str, status: os.stat_result, found: Listing) -> None:
    found.folders[name] = Folder(status.st_mode & 0o7777, status.st_mtime_ns)
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if not name and _OURS.fullmatch(entry.name):
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        path = folder / entry.name
        if unicode_text(below) != below:
            raise InvalidInput(
                f"the name of {path} is not Unicode, as names in a commit must be; rename it"
            )
        here = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(here.st_mode):
            target = os.readlink(path)
            if unicode_text(target) != target:
                raise InvalidInput(f"the link {path} leads to a name that is not Unicode")
            found.links[below] = Link(target, here.st_mtime_ns)
        elif stat.S_ISDIR(here.st_mode):
            _list(path, below, here, found)
        elif stat.S_ISREG(here.st_mode):
            found.files[below] = path
        else:
            raise InvalidInput(
                f"{path} is not a regular file but a socket, a pipe or a device, which a commit "
                "cannot hold; remove it, or adopt another directory"
            )
