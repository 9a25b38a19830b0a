"""torch_checkpointing on a store (docs/torch_checkpointing.md): a manager that commits values, and
a storage that keeps the files of its own manager."""

from ckptstore.plugins.torch_checkpointing.manager import CheckpointManager
from ckptstore.plugins.torch_checkpointing.storage import StoreStorage, StoreStorageConfig

__all__ = ["CheckpointManager", "StoreStorage", "StoreStorageConfig"]
