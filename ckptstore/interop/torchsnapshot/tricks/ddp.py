"""The adapter for a plain module that takes what a module within DistributedDataParallel had."""

from typing import Any

import torch

_PREFIX = "module."


class DistributedDataParallelAdapter:
    """A plain module that takes what was saved from one within DistributedDataParallel. Needed only
    for state that has the wrapper's prefix in its names, as a directory of TorchSnapshot that was
    imported."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(
            {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        )
