"""Adapters for objects whose `state_dict` is not what a snapshot should hold.

Modules within DistributedDataParallel, FSDP2 modules and their optimizers, and DTensors need none:
a commit has a module's own names, and knows what is a replica and what is divided.
"""

from ckptstore.interop.torchsnapshot.tricks.ddp import DistributedDataParallelAdapter
from ckptstore.interop.torchsnapshot.tricks.fsdp import FSDPOptimizerAdapter

__all__ = ["DistributedDataParallelAdapter", "FSDPOptimizerAdapter"]
