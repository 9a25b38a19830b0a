"""The stores that this process has open for snapshots: opened by the first that lies in one, kept
for those that follow.

What a store keeps pays from its second commit on: staging memory, the chunk index, the log. One
that was removed, or made anew in the same place, is let go.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptstore.core.ids import CONFIG_KEY
from ckptstore.errors import CkptStoreError
from ckptstore.open_store import open as open_store
from ckptstore.store import Store


class _Open(NamedTuple):
    """`identity` is that of the store's configuration file when it was opened."""

    store: Store
    identity: tuple[int, ...] | None


_open: dict[tuple[int, str, str], _Open] = {}
_lock = threading.Lock()


def store_at(
    place: str, storage_options: Mapping[str, Any] | None = None, *, create: bool = False
) -> Store:
    """The store at `place`, opened once per process; with `create`, made where there is none.
    Raises as `ckptstore.open` does."""
    key = (os.getpid(), place, repr(sorted((storage_options or {}).items())))
    with _lock:
        _release()
        known = _open.get(key)
        if known is None:
            store = open_store(place, create=create, storage_options=storage_options or None)
            known = _open[key] = _Open(store, _identity(place))
        return known.store


def _release() -> None:
    """Close stores that are no longer where they were. A forked child leaves its parent's alone."""
    for key, (store, identity) in list(_open.items()):
        pid, place, _ = key
        if pid == os.getpid() and identity != _identity(place):
            del _open[key]
            with suppress(CkptStoreError):
                store.close()


def _identity(place: str) -> tuple[int, ...] | None:
    if "://" in place:
        return None
    try:
        status = (Path(place) / CONFIG_KEY).stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns
