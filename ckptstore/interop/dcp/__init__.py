"""How does `torch.distributed.checkpoint` (DCP) save to a store and load from it?

Pass `StoreWriter` and `StoreReader` to `dcp.save`, `dcp.load` and `dcp.async_save`:

    dcp.save(state_dict, storage_writer=StoreWriter("checkpoints", step=100))
    dcp.load(state_dict, storage_reader=StoreReader("checkpoints", 100))

A save is an ordinary commit: the native API reads it, and DCP loads native commits.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.interop.dcp.convert import dcp_to_store, store_to_dcp
    from ckptstore.interop.dcp.reader import StoreReader
    from ckptstore.interop.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter", "dcp_to_store", "store_to_dcp"]

# Importing a DCP directory does not need torch.distributed.
_LATER = {
    "StoreReader": "ckptstore.interop.dcp.reader",
    "StoreWriter": "ckptstore.interop.dcp.writer",
    "dcp_to_store": "ckptstore.interop.dcp.convert",
    "store_to_dcp": "ckptstore.interop.dcp.convert",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'ckptstore.interop.dcp' has no attribute {name!r}")
