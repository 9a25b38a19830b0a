"""Packs in which this host saw damage. New commits do not rely on such a pack until it was read
whole again.

A pack stays in the log after it lost a sector, and the rest of it is still read. But a commit that
deduplicated against a lost chunk would be lost from the start. So a restore, `resume` or `fsck
--read-data` that meets damage notes the pack here for all processes of the host. The next commit
writes the chunks again, and older commits are then read from that copy.

The file has one line per pack and lies beside the other indexes. If it cannot be written, only this
process remembers. A lost note leaves the next commit unprotected; a wrong one costs a second copy
of a chunk.
"""

import os
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ckptstore.core import forks
from ckptstore.core.ids import PackId
from ckptstore.core.paths import make_index_directory, read_plain, write_file
from ckptstore.core.process import file_lock

DISTRUST_NAME = "distrusted"

_LOCK_TIMEOUT_S = 2.0
_Stamp: TypeAlias = tuple[int, int, int]


class SuspectPacks:
    """The notes at `path`. Threads and processes may share them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = forks.lock()
        self._stamp: _Stamp | None = None
        self._noted: frozenset[PackId] = frozenset()
        self._unwritten: frozenset[PackId] = frozenset()

    def packs(self) -> Set[PackId]:
        """The packs noted now by any process."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp, self._noted = stamp, self._read()
            return self._noted | self._unwritten

    def add(self, pack: PackId) -> None:
        """Note damage in `pack`."""
        if pack not in self.packs() and not self._change(lambda packs: packs | {pack}):
            with self._lock:
                self._unwritten |= {pack}

    def discard(self, pack: PackId) -> None:
        """Remove the note: every byte of `pack` was read and verified."""
        if pack in self.packs():
            with self._lock:
                self._unwritten -= {pack}
            self._change(lambda packs: packs - {pack})

    def _change(self, change: Callable[[Set[PackId]], Set[PackId]]) -> bool:
        """Rewrite the file by `change`; whether that succeeded."""
        with suppress(OSError):
            make_index_directory(self._path.parent)
            with file_lock(
                self._path.with_name(f"{DISTRUST_NAME}.lock"), timeout_s=_LOCK_TIMEOUT_S
            ) as held:
                if held:
                    new = self._path.with_name(f"{DISTRUST_NAME}.new")
                    write_file(
                        new, "".join(f"{pack}\n" for pack in sorted(change(self._read()))).encode()
                    )
                    new.replace(self._path)
                    return True
        return False

    def _read(self) -> frozenset[PackId]:
        try:
            return frozenset(map(PackId, read_plain(self._path).decode(errors="replace").split()))
        except OSError:
            return frozenset()

    def _stamp_now(self) -> _Stamp | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns
