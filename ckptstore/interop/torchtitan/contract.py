"""Which torchtitan is installed, and does this ckptstore know the contract of its managers?"""

from importlib import metadata

try:
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.config import TORCH_DTYPE_MAP
except ImportError as error:
    try:
        found = f"torchtitan {metadata.version('torchtitan')} is installed"
    except metadata.PackageNotFoundError:
        found = "torchtitan is not installed"
    raise ImportError(
        f"StoreCheckpointManager needs torchtitan 0.3.0 or newer, and {found}: "
        f'pip install "ckptstore[torchtitan]" ({error})'
    ) from error

METHODS = BaseCheckpointManager.__abstractmethods__
"""The methods that torchtitan wants of a manager."""

if not {"_save", "_close"} <= METHODS or not {"_load", "_load_checkpoint"} & METHODS:
    raise ImportError(
        f"torchtitan {metadata.version('torchtitan')} has checkpoint managers with the methods "
        f"{', '.join(sorted(METHODS))}, which this ckptstore does not know: install torchtitan "
        "0.3.0, or a newer ckptstore"
    )

__all__ = [
    "DATALOADER",
    "LR_SCHEDULER",
    "METHODS",
    "MODEL",
    "OPTIMIZER",
    "TORCH_DTYPE_MAP",
    "BaseCheckpointManager",
    "ModelWrapper",
]
