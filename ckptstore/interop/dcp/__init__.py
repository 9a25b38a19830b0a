"""`torch.distributed.checkpoint` (DCP) on a store.

Pass `StoreWriter` and `StoreReader` to `dcp.save`, `dcp.load` and `dcp.async_save`:

    dcp.save(state_dict, storage_writer=StoreWriter("checkpoints", step=100))
    dcp.load(state_dict, storage_reader=StoreReader("checkpoints", 100))

A save is an ordinary commit: the native API reads it, and DCP loads native commits. Within
`redirect`, libraries that hard-code DCP's own writer and reader use a store too.
"""

from ckptstore.interop.dcp.convert import dcp_to_store, store_to_dcp
from ckptstore.interop.dcp.reader import StoreReader
from ckptstore.interop.dcp.redirect import redirect
from ckptstore.interop.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter", "dcp_to_store", "redirect", "store_to_dcp"]
