"""A disposable SQLite file of this host: put in place whole, and replaced when it is unusable.

Replacing a file and the first look at it are serialized by a lock on `<path>.lock`: the journal of
one process must never be applied to a file that another process has just put there.
"""

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ckptstore.core.paths import make_directories, write_file
from ckptstore.storage.file_lock import file_lock

LOCK_TIMEOUT_S = 2.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")


def prepare(
    path: Path,
    usable: Callable[[bool], bool],
    fill: Callable[[Path], None],
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> bool:
    """Ensure that a usable file is at `path`; False if the lock is busy.

    `usable` looks at the file; its argument says whether it may change it. Otherwise `fill` makes
    a new one out of an empty file. Raises `OSError` if the directory cannot be written.
    """
    make_directories(path.parent)
    for exclusive in (False, True):
        with file_lock(beside(path, ".lock"), timeout_s=timeout_s, exclusive=exclusive) as held:
            if held and path.is_file() and usable(exclusive):
                return True
            if held and exclusive:
                new = beside(path, ".new")
                _unlink(new)
                # SQLite gives its other files the permissions of this one.
                write_file(new, b"")
                fill(new)
                _unlink(path)
                new.rename(path)
                return True
    return False


def remove(path: Path) -> None:
    """Delete the file, so that the next process to open it creates it anew."""
    with file_lock(beside(path, ".lock"), timeout_s=LOCK_TIMEOUT_S) as held:
        if held:
            _unlink(path)


def inode(path: Path) -> int:
    """The file's inode number, 0 if there is none: tells whether it was replaced."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _unlink(path: Path) -> None:
    for suffix in _SUFFIXES:
        beside(path, suffix).unlink(missing_ok=True)


class Forked(Protocol):
    """The owner of a connection, of which no process may use its parent's."""

    lock: threading.RLock
    """Held while SQLite works."""

    def forked(self) -> None:
        """Give up the connection, in a child."""


_owners: "weakref.WeakSet[Forked]" = weakref.WeakSet()
_forking: list[Forked] = []


def survive_forks(owner: Forked) -> None:
    """Hold the lock of `owner` during each fork, lest the child inherit locks within SQLite that
    nobody releases."""
    _owners.add(owner)


def _before_fork() -> None:
    _forking[:] = _owners
    for owner in _forking:
        owner.lock.acquire()


def _in_parent() -> None:
    while _forking:
        _forking.pop().lock.release()


def _in_child() -> None:
    for owner in _forking:
        owner.forked()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
