"""The local checkpoint manager of nvidia-resiliency-ext (NVRx), on a CPU.

Its own state dict wants tensors on a GPU, its asynchronous save ends in `torch.cuda.synchronize`,
and what a partner sends back passes through a GPU (`isend_state_dict`). So this one takes any
tensor, saves at once, and loads what its own host has. What holds the step of an asynchronous save,
too, is `replicate`: it sends the part to the partner before anything is written.
"""

from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

COPIES = 2


class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]  # it has no types
    def __init__(self, tensor: torch.Tensor) -> None:
        self.state_dict: Any = {"rows": tensor}
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """It stays where it was loaded."""


class Manager:
    """All ranks make one, and call the same methods."""

    def __init__(self, root: Path) -> None:
        self._strategy = CliqueReplicationStrategy.from_replication_params(1, COPIES)
        self._manager = LocalCheckpointManager(root, repl_strategy=self._strategy)

    def replicate(self, tensor: torch.Tensor) -> None:
        self._strategy.replicate(OnCpu(tensor), "0")

    def save(self, tensor: torch.Tensor, step: int) -> None:
        self._manager.save(OnCpu(tensor), step)

    def load(self, into: torch.Tensor) -> None:
        self._manager.find_latest()
        found, _ = self._manager.load()
        into.copy_(found.state_dict["rows"])
