"""Which store encloses a directory, and is it safe to use?

Only this search looks at parent directories (docs/decisions/042-…), for commands and for
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

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from ckptstore.core.ids import CONFIG_KEY
from ckptstore.core.paths import mount_points
from ckptstore.errors import InvalidInput

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
