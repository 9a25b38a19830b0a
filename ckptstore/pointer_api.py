"""How a file comes to mean a commit, and how the commit is read through it: pointer files
(`objects.pointer_files` has their format)."""

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
    """The commit that the pointer file at `path` means, read from the store that it names, which is
    opened read-only.

    Use it as a context manager, or call `close`: it closes the store. The options are those of
    `ckptstore.open`. Where the store is open already, `store.checkout(path)` is the way; a path is
    taken wherever a ref is.

    Raises `NotFound` if there is no such file, store or commit, `InvalidInput` for what is no
    pointer file.
    """
    pointer = read_pointer(path)
    with ExitStack() as undo:
        try:
            store = open(
                pointer.store,
                create=False,
                read_only=True,
                storage=storage,
                threads=threads,
            )
            undo.callback(store.close)
            snapshot = store.checkout(pointer.id)
        except NotFound as error:
            raise pointer.without_store(path, error) from error
        contents_of(snapshot).on_close = store.close
        undo.pop_all()
        return snapshot


def write_pointer(path: str | os.PathLike[str], store: Store, ref: AnyRef = "latest") -> Snapshot:
    """Let the file at `path` mean the commit `ref` of `store`, and return that commit; a pointer
    file that is there is replaced, at once.

    The file protects the commit from nothing: a tag does. Raises as `Store.checkout` does,
    `Conflict` if `path` is something else, `InvalidInput` for a store that is in memory only or
    whose URL has secrets in it.
    """
    snapshot = store.checkout(ref)
    write_file(path, Pointer(store.url, snapshot.id))
    return snapshot
