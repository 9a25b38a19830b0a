"""The directories of a store on a local disk: made when something is to be put in them, and made
durable.

A name counts as durable only after its directory was fsynced, and the directories above it were
once by this process.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ckptstore.core.paths import rights
from ckptstore.storage.local_files import failure

T = TypeVar("T")


class Directories:
    """Those below `root` and, until it exists, above it; with `fsync=False` nothing is made
    durable."""

    def __init__(self, root: str, *, fsync: bool) -> None:
        self.root = root
        self._fsync = fsync
        self._anchored: set[str] = set()

    def having(self, path: str, action: Callable[[], T]) -> T:
        """`action`, and again after making the directories above `path` if they are missing."""
        try:
            return action()
        except FileNotFoundError:
            self._make(os.path.dirname(path))
            return action()

    def sync(self, directory: str) -> None:
        """Make the names in `directory` durable, its own among them."""
        self._sync_names(directory)
        self._anchor(directory)

    def _make(self, path: str) -> None:
        """The store's own directories become durable with what is put in them, those above it at
        once."""
        try:
            self._make_below(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make(os.path.dirname(path))
            with suppress(FileExistsError):  # another process may be making them
                self._make_below(
                    path
                    # once more, not for ever: a link that leads nowhere is there, and nothing can
                    # be made below it
                )

    def _make_below(self, path: str) -> None:
        own = len(path) > len(self.root)
        os.mkdir(path, rights(self.root) if own else 0o777)
        if not own:
            self._sync_names(os.path.dirname(path))

    def _anchor(self, directory: str) -> None:
        """Make the names of `directory` and of those above it durable, once: another process may
        have made them just now."""
        if directory != self.root and directory not in self._anchored:
            parent = os.path.dirname(directory)
            self._sync_names(parent)
            self._anchor(parent)
            self._anchored.add(directory)

    def _sync_names(self, directory: str) -> None:
        if not self._fsync:
            return
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise failure(error, "make durable", directory, self.root, writing=True) from error
