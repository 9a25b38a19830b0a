"""The optimizer of an FSDP1 module, its state under the parameters' names."""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


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
