"""How does a file or folder appear only once it is complete, and vanish if the process is killed
before?

It is written in a folder of its own beside the target, which the process locks (flock(2)). The
lock ends with the process, so the next writer of the same target can recognize abandoned folders
and remove them.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.core.paths import rights, write_file

_TOKEN_BYTES = 6


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """A path beside `target`, on the same filesystem, for content that the block renames to
    `target`. Leftovers are removed.

    The directory of `target` must exist.
    """
    _sweep(target)
    folder, lock = _make_folder(target)
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.close(lock)


def replace_file(target: Path, data: bytes) -> None:
    """Replace the content of `target` atomically but not durably, with no more permissions than
    its directory. Raises `OSError`."""
    with scratch_for(target) as new:
        write_file(new, data)
        new.replace(target)


def _make_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.with_name(f".{target.name}-{secrets.token_hex(_TOKEN_BYTES)}")
        folder.mkdir(mode=rights(target.parent))
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
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
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(lock)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
