"""Write pointer files, which name a commit, and open commits through them.

`objects.pointer_files` has the format.
"""

import os
from contextlib import ExitStack

from ckptstore.core.options import Storage
from ckptstore.errors import NotFound
from ckptstore.objects.pointer_files import Pointer, read_pointer
from ckptstore.objects.pointer_files import write_pointer as write_file
from ckptstore.open_store import open
from ckptstore.repository.resolve_ref import AnyRef
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.store import Store


def open_pointer(
    path: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    threads: int | None = None,
) -> Snapshot:
    """Open the commit that the pointer file at `path` names, in the store that it names, read-only.

    Use it as a context manager, or call `close`: it closes the store. The options are those of
    `ckptstore.open`. If the store is open already, use `store.checkout(path)`: a path can stand for
    any ref.

    Raises `NotFound` if there is no such file, store or commit, `InvalidInput` if the file is not a
    pointer file.
    """
    pointer = read_pointer(path)
    with ExitStack() as undo:
        try:
            place = pointer.store
            store = open(place, create=False, read_only=True, storage=storage, threads=threads)
            undo.callback(store.close)
            snapshot = store.checkout(pointer.id)
        except NotFound as error:
            raise pointer.without_store(path, error) from error
        contents_of(snapshot).on_close = store.close
        undo.pop_all()
        return snapshot


def write_pointer(path: str | os.PathLike[str], store: Store, ref: AnyRef = "latest") -> Snapshot:
    """Make the file at `path` name the commit `ref` of `store`, and return that commit. An existing
    pointer file is replaced atomically.

    The file does not protect the commit from `forget`; a tag does. Raises as `Store.checkout` does,
    `Conflict` if `path` is something else, `InvalidInput` for a store that is only in memory or
    whose URL has secrets in it.
    """
    snapshot = store.checkout(ref)
    write_file(path, Pointer(store.url, snapshot.id))
    return snapshot
