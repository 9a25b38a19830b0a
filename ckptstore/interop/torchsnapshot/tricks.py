"""Adapters for objects whose `state_dict` is not what a snapshot should hold.

Modules within DistributedDataParallel, FSDP2 modules and their optimizers, and DTensors need none:
a commit has a module's own names, and knows what is a replica and what is divided.
"""

import sys
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

__all__ = ["DistributedDataParallelAdapter", "FSDPOptimizerAdapter"]

sys.modules[f"{__name__}.ddp"] = sys.modules[f"{__name__}.fsdp"] = sys.modules[__name__]
"""TorchSnapshot has a module for each adapter."""

_PREFIX = "module."
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


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


class FSDPOptimizerAdapter:
    """The optimizer of a FullyShardedDataParallel module (FSDP1), its state under the parameters'
    names.

    snapshot = Snapshot.take("ckpt/1", {"model": fsdp, "optim": FSDPOptimizerAdapter(fsdp,
    optimizer)})
    """

    def __init__(self, module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        return FullyShardedDataParallel.optim_state_dict(
            self.module, self.optimizer, group=self._group()
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = FullyShardedDataParallel.optim_state_dict_to_load(
            self.module, self.optimizer, state_dict, group=self._group()
        )
        self.optimizer.load_state_dict(own)

    def _group(self) -> Any:
        """The ranks that hold the module, if they may be a part of all: without it torch waits for
        ranks that have no such module. A hybrid module's own group is that of one replica, and
        torch wants all of them to take part."""
        return None if self.module.sharding_strategy in _HYBRID else self.module.process_group
