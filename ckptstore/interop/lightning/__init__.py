"""Checkpoints of PyTorch Lightning and Fabric are commits, by one plugin (docs/lightning.md).

    trainer = Trainer(plugins=[StoreCheckpointIO("checkpoints")])

Both packages are served, `lightning` and `pytorch_lightning`. Importing this makes their
`load_from_checkpoint` read pointer files and snapshots too.
"""

from typing import Any

from ckptstore.interop.lightning.async_io import AsyncStoreCheckpointIO
from ckptstore.interop.lightning.checkpoint_io import StoreCheckpointIO
from ckptstore.interop.lightning.model_checkpoint import store_model_checkpoint
from ckptstore.interop.lightning.packages import register

__all__ = ["AsyncStoreCheckpointIO", "StoreCheckpointIO", "StoreModelCheckpoint"]

register(StoreCheckpointIO)


def __getattr__(name: str) -> Any:
    if name == "StoreModelCheckpoint":  # needs the trainer's package, which Fabric does without
        return store_model_checkpoint()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
