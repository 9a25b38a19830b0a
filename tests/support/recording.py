"""Which changes does a piece of work make, one by one? Recorded, so that a crash after any of them
can be looked at; or interrupted.

Changes are those of `LocalStorage`, seen at the calls of `os` that make them. The indexes belong to
SQLite and LMDB; they are copied whenever their bytes are others, which is looked at before each
change and after each SQL statement.
"""

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from ckptstore.index.chunks import index as chunk_changes
from ckptstore.storage import local, local_files
from tests.support.disk import INDEX, Disk, Left

Change = Callable[[Disk], None]
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """What Ctrl-C does, at a moment of the test's choosing."""


@dataclass(slots=True)
class Recording:
    """The changes that some work made to a copy of `base`, in order. Crash at point n: after n of
    them."""

    base: Path
    changes: list[tuple[str, Change]] = field(default_factory=list)
    indexes: list[Path] = field(default_factory=list)
    """The copy of the indexes at each point."""

    @property
    def points(self) -> range:
        return range(len(self.changes) + 1)

    def name(self, n: int) -> str:
        return (
            f"after {n} of {len(self.changes)} changes, the last of them: "
            f"{self.changes[n - 1][0] if n else 'none'}"
        )

    def kill(self, n: int) -> "Wreck":
        """What a kill at point `n` leaves."""
        return Wreck(self._at(n).kill(), self.indexes[n])

    def cut(self, n: int, random: Random | None = None) -> "Wreck":
        """What a power cut at point `n` leaves, with the indexes as they were before; with
        `random`, one of many possible outcomes."""
        return Wreck(
            self._at(n).cut(random),
            random.choice([*self.indexes[: n + 1], None]) if random else self.indexes[0],
        )

    def _at(self, n: int) -> Disk:
        disk = Disk(self.base)
        for _, change in self.changes[:n]:
            change(disk)
        return disk


@dataclass(frozen=True, slots=True)
class Wreck:
    """A disk after a crash: what `LocalStorage` left, and a copy of the indexes."""

    left: Left
    index: Path | None

    def fingerprint(self) -> bytes:
        """Equal for wrecks that are equal."""
        state = blake2b(str(self.index).encode())
        for path, node in self.left.nodes.items():
            state.update(f"\0{path} {type(node).__name__} ".encode())
            state.update(blake2b(node if isinstance(node, bytes) else str(node).encode()).digest())
        return state.digest()

    def lay_out(self, to: Path) -> Path:
        self.left.lay_out(to)
        if self.index is None:
            return to
        for index in self.index.rglob(INDEX):
            target = to / index.relative_to(self.index)
            if target.parent.is_dir():
                shutil.copytree(index, target)
        return to


def record(base: Path, scratch: Path, work: Callable[[Path], T]) -> tuple[Recording, T]:
    """Do `work` in a copy of `base` made below `scratch`; returns its changes and its result."""
    place = scratch / "recorded"
    shutil.copytree(base, place)
    recording = Recording(base)
    copies = _IndexCopies(place, scratch / "indexes")
    recording.indexes.append(copies.newest())

    def look_at_indexes() -> None:
        if (newest := copies.newest()) != recording.indexes[-1]:
            recording.changes.append(("the indexes changed", lambda disk: None))
            recording.indexes.append(newest)

    def changed(what: str, change: Change) -> None:
        recording.changes.append((what, change))
        recording.indexes.append(recording.indexes[-1])

    with _watched(place, look_at_indexes, changed):
        result = work(place)
        look_at_indexes()
    return recording, result


@contextmanager
def interrupted(place: Path, after: int) -> Iterator[None]:
    """Within, the change after the first `after`, be it to the store, the catalog or the chunk
    index, raises `Interrupted`; once."""
    left = after

    def count() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise Interrupted

    with _watched(place, count, lambda what, change: None):
        yield


@contextmanager
def _watched(
    place: Path, before: Callable[[], None], changed: Callable[[str, Change], None]
) -> Iterator[None]:
    """Call `before` ahead of each change, and `changed` after each that `LocalStorage` made. Stores
    must be opened within."""

    lock = threading.RLock()

    def look() -> None:
        with lock:
            before()

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            look()
            found = super().execute(*args)
            look()
            return found

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            look()
            found = super().executemany(*args)
            look()
            return found

    def looking(function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any) -> T:
            look()
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        watcher = _Watcher(place, lock, before, changed)
        for module in (local, local_files):
            patch.setattr(module, "os", watcher)
        for name in ("insert", "remove"):
            patch.setattr(chunk_changes, name, looking(getattr(chunk_changes, name)))
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
        yield


class _Watcher:
    """Stands in for `os` in the modules of the local backend. One change is made and noted before
    the next begins."""

    def __init__(
        self,
        root: Path,
        lock: Any,
        before: Callable[[], None],
        changed: Callable[[str, Change], None],
    ) -> None:
        self._root, self._lock, self._before, self._changed = f"{root}/", lock, before, changed
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        path = _path(path, dir_fd)
        name = self._name(path)
        if flags & os.O_CREAT:
            fd = self._do(
                f"create {name}", lambda: os.open(path, flags, mode), lambda disk: disk.create(name)
            )
        else:
            fd = os.open(path, flags, mode)
        self._names[fd] = name
        return fd

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        name, data = self._names[fd], b"".join(bytes(b) for b in buffers)
        return self._do(
            f"write {name}",
            lambda: os.pwritev(fd, buffers, offset),
            lambda disk: disk.write(name, offset, data),
        )

    def fsync(self, fd: int) -> None:
        name = self._names[fd]
        if os.path.isdir(self._root + name):
            self._do(
                f"fsync directory {name}",
                lambda: os.fsync(fd),
                lambda disk: disk.sync_directory(name),
            )
        else:
            self._do(f"fsync {name}", lambda: os.fsync(fd), lambda disk: disk.sync(name))

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        old, new = _path(old, src_dir_fd), _path(new, dst_dir_fd)
        a, b = self._name(old), self._name(new)
        self._do(f"rename {a} to {b}", lambda: os.rename(old, new), lambda disk: disk.rename(a, b))

    def link(
        self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> None:
        old, new = _path(old, src_dir_fd), _path(new, dst_dir_fd)
        a, b = self._name(old), self._name(new)
        self._do(f"link {a} to {b}", lambda: os.link(old, new), lambda disk: disk.link(a, b))

    def unlink(self, path: str, *, dir_fd: int) -> None:
        path = _path(path, dir_fd)
        name = self._name(path)
        self._do(f"unlink {name}", lambda: os.unlink(path), lambda disk: disk.unlink(name))

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        path = _path(path, dir_fd)
        name = self._name(path)
        self._do(
            f"make directory {name}",
            lambda: os.mkdir(path, mode),
            lambda disk: disk.make_directory(name),
        )

    def _name(self, path: str) -> str:
        return (path + "/").removeprefix(self._root).rstrip("/")

    def _do(self, what: str, act: Callable[[], T], change: Change) -> T:
        with self._lock:
            self._before()
            result = act()
            self._changed(what, change)
            return result


def _path(name: str, dir_fd: int | None) -> str:
    """The path of a name in an open directory."""
    return name if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{name}"


class _IndexCopies:
    """Copies of the indexes below `place`, one for each state that they were seen in."""

    def __init__(self, place: Path, copies: Path) -> None:
        self._place, self._copies = place, copies
        self._seen: dict[bytes, Path] = {}

    def newest(self) -> Path:
        """The copy of the indexes as they are now. Looked for often, so only where stores are: in
        the folders of `place`."""
        folders = sorted(self._place.glob(f"*/{INDEX}"))
        state = blake2b()
        for path in sorted(
            os.path.join(root, name)
            for folder in folders
            for root, _, names in os.walk(folder)
            for name in names
        ):
            with open(path, "rb") as file:
                state.update(f"{path} ".encode() + blake2b(file.read()).digest())
        copy = self._seen.setdefault(state.digest(), self._copies / str(len(self._seen)))
        if not copy.exists():
            copy.mkdir(parents=True)
            for folder in folders:
                shutil.copytree(folder, copy / folder.relative_to(self._place))
        return copy
