"""Quarantine: objects that `repair` removes or replaces move to `quarantine/`, under unique
names."""

import itertools
import os
from collections.abc import Iterator

from ckptstore.core.config import MIB
from ckptstore.core.ids import new_session_id
from ckptstore.core.paths import make_directories
from ckptstore.errors import CkptStoreError
from ckptstore.maintenance.check.log import read_small
from ckptstore.storage.contract import Storage


def quarantine(storage: Storage, key: str) -> None:
    """Move an object to `quarantine/`, where it is durable before the original is removed; an
    absent one is ignored."""
    if storage.size(key) is None:
        return
    kept = _keep(storage, key)
    storage.sync_dirs([kept])
    storage.delete(key)
    storage.sync_dirs([key])


def replace_small(storage: Storage, key: str, data: bytes) -> None:
    """Write a small object after copying the old one to `quarantine/`: its name is never free in
    between."""
    old = read_small(storage, key)
    if old is not None:
        storage.put(next(_free_names(storage, key)), old)
    storage.put(key, data)


def copy_object(storage: Storage, source: str, target: str) -> None:
    """Copy an object in pieces to an unused name, and put it in place atomically."""
    size = storage.size(source) or 0
    writer = storage.create(target, session=new_session_id())
    try:
        for start in range(0, size, 8 * MIB):
            writer.append([memoryview(storage.read(source, start, min(start + 8 * MIB, size)))])
        writer.finish()
    except (CkptStoreError, OSError):
        writer.discard()
        raise
    storage.sync_dirs([target])


def _keep(storage: Storage, key: str) -> str:
    """Give an object a second name in `quarantine/`, or copy it if storage has no second names."""
    names = _free_names(storage, key)
    if (root := storage.capabilities.local_root) is None:
        copy_object(storage, key, name := next(names))
        return name
    for name in names:
        make_directories((root / name).parent)
        try:
            os.link(root / key, root / name)
        except FileExistsError:
            continue
        except OSError:
            copy_object(storage, key, name)
        return name
    raise AssertionError("an unused name always exists")


def _free_names(storage: Storage, key: str) -> Iterator[str]:
    for n in itertools.count():
        name = f"quarantine/{key}~{n}" if n else f"quarantine/{key}"
        if storage.size(name) is None:
            yield name
