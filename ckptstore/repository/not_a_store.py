"""What lies at a place where a store was looked for: what an error says of it, and what opens
it."""

from contextlib import suppress
from pathlib import Path

from ckptstore.core.ids import CONFIG_KEY
from ckptstore.errors import CkptStoreError
from ckptstore.objects.pointer_files import Pointer, read_pointer
from ckptstore.storage.contract import Storage

_WRITERS = {".metadata": "torch.distributed.checkpoint", ".snapshot_metadata": "TorchSnapshot"}


def instead_of_store(storage: Storage) -> str:
    """What to say behind `no store at …:`."""
    root = storage.capabilities.local_root
    if root is not None:
        if found := _pointer(root):
            return (
                f"that is a pointer to commit {found.id[:12]} of the store {found.store}; open "
                "that store, which takes this path "
                "as a ref, or the commit alone by ckptstore.open_pointer"
            )
        for name, library in _WRITERS.items():
            if (root / name).is_file():
                return (
                    f"{library} wrote that directory; `ckptstore --store STORE import {root}` "
                    "brings it into a store"
                )
        if root.is_file():
            return (
                "that is a file; `ckptstore --store STORE import` reads the checkpoints of "
                "other libraries"
            )
    return (
        f"there is no {CONFIG_KEY}; make one with `ckptstore init {storage.url}`, or check the path"
    )


def _pointer(place: Path) -> Pointer | None:
    with suppress(CkptStoreError):
        return read_pointer(place)
    return None
