"""torch_checkpointing's `CheckpointManager` on a store (docs/torch_checkpointing.md)."""

from ckptstore.plugins.torch_checkpointing.storage import StoreStorage, StoreStorageConfig

__all__ = ["StoreStorage", "StoreStorageConfig"]
