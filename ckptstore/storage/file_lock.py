"""How do processes of one host take turns?

By `flock` on a file, with a timeout. The lock ends with its process. It protects indexes, which
can be rebuilt, and never the store.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.core.paths import rights

_POLL_S = 0.005


@contextmanager
def file_lock(path: Path, *, timeout_s: float, exclusive: bool = True) -> Iterator[bool]:
    """Hold the lock within the block. Yields False after the timeout, or at once if `path`
    cannot be opened.

    Not reentrant: a thread that holds the lock and asks again waits for itself.
    """
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666 & rights(path.parent)
        )
    except OSError:
        yield False
        return
    try:
        yield _take(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, time.monotonic() + timeout_s)
    finally:
        with suppress(OSError):  # the descriptor and its lock are gone whatever close(2) says
            os.close(fd)


def _take(fd: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return False
