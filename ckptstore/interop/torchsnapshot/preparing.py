"""What does a `_custom_tensor_prepare_func` do to a state? Its results replace the tensors before
anything is hashed or written.

All results are held until the commit is made. The function is called once per tensor, with its last
argument, `tracing`, false. Of a tensor that ranks divide, it gets this rank's part.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ckptstore.interop.torchsnapshot.errors import UnusableState
from ckptstore.interop.torchsnapshot.manifest import encode
from ckptstore.state.shards import is_distributed, is_dtensor
from ckptstore.state.stateful import state_of

Prepare: TypeAlias = Callable[[str, torch.Tensor, bool], torch.Tensor]
"""From a path, a tensor, and whether only shape and dtype are wanted, to the tensor to store."""


class Prepared:
    """A stateful object with a replaced state to commit."""

    def __init__(self, key: str, stateful: Any, prepare: Prepare) -> None:
        self._key, self._stateful, self._prepare = key, stateful, prepare

    def state_dict(self) -> Any:
        return self._visit(state_of(self._stateful), encode(self._key))

    def load_state_dict(self, state_dict: Any) -> None:
        raise UnusableState(
            f"{self._key} was prepared to be stored; restore it into the object itself"
        )

    def _visit(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) is list:
            return [self._visit(child, f"{path}/{i}") for i, child in enumerate(value)]
        if type(value) in (dict, OrderedDict):
            made = type(value)(
                (key, self._visit(child, f"{path}/{encode(str(key))}"))
                for key, child in value.items()
            )
            if hasattr(value, "_metadata"):
                made._metadata = value._metadata
            return made
        return value

    def _tensor(self, tensor: Any, path: str) -> Any:
        if not is_distributed(tensor):
            return self._call(tensor, path)
        return self._dtensor(tensor, path) if is_dtensor(tensor) else self._sharded(tensor, path)

    def _call(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        made = self._prepare(path, tensor, False)
        if made.shape != tensor.shape:
            raise UnusableState(
                f"_custom_tensor_prepare_func must keep the shape of a tensor: {path} is "
                f"{list(tensor.shape)}, it made {list(made.shape)}"
            )
        return made

    def _part(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        made = self._call(tensor, path)
        if type(made) is not torch.Tensor or made.layout is not torch.strided or made.is_quantized:
            raise UnusableState(
                f"_custom_tensor_prepare_func made {made.dtype} of {path}; what ranks divide must "
                "stay plain tensors"
            )
        return made

    def _dtensor(self, tensor: Any, path: str) -> Any:
        from torch.distributed.tensor import DTensor

        local = self._part(tensor.to_local().detach(), path)
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _sharded(self, tensor: Any, path: str) -> Any:
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed._shard.sharded_tensor.shard import Shard

        shards = [
            Shard(self._part(shard.tensor, path), shard.metadata) for shard in tensor.local_shards()
        ]
        metadata = copy.deepcopy(tensor.metadata())
        metadata.tensor_properties.dtype = (
            shards[0].tensor.dtype if shards else metadata.tensor_properties.dtype
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, sharding_spec=tensor.sharding_spec()
        )
