"""A plain module that takes what was saved from one within DistributedDataParallel."""

from typing import Any

import torch

_PREFIX = "module."


class DistributedDataParallelAdapter:
    """Take state into a plain module that has the wrapper's prefix in its names, as an imported
    directory of TorchSnapshot may have. No other state needs it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(
            {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        )
