"""How is a state dict loaded? By torch's `load_state_dict`, without its side effects."""

from itertools import chain
from typing import Any

import torch

from ckptstore.errors import InvalidInput
from ckptstore.state.fsdp1 import ShardedOptimizer
from ckptstore.state.modules import with_wrappers


def load(target: Any, state: Any, *, strict: bool) -> None:
    """`target.load_state_dict(state)`. Raises `InvalidInput` where a module or optimizer refuses
    its state."""
    try:
        if isinstance(target, torch.nn.Module):
            target.load_state_dict(with_wrappers(target, state), strict=strict)
        elif isinstance(target, torch.optim.Optimizer):
            if not strict:
                # What the commit does not have stays, here too.
                state = {**state, "state": {**target.state_dict()["state"], **state["state"]}}
            target.load_state_dict(state)
            _keep_dtypes(target, state)
        elif isinstance(target, ShardedOptimizer):
            if not strict:
                state = {**state, "state": {**target.state_dict()["state"], **state["state"]}}
            load(target.optimizer, target.flat_state_of(state), strict=True)
        else:
            target.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        if isinstance(target, torch.nn.Module | torch.optim.Optimizer | ShardedOptimizer):
            raise InvalidInput(
                f"{type(target).__qualname__} refuses the committed state: {error}"
            ) from error
        raise


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo torch's cast of an optimizer's state to its parameters' dtype, which would round fp32
    moments under bf16 parameters."""
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in state["state"]:
            optimizer.state[parameter] = _in_own_dtype(
                optimizer.state[parameter], state["state"][number], None
            )


def _in_own_dtype(loaded: Any, saved: Any, name: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        # A fused or capturable optimizer wants its step as float32 and has seen to it.
        return loaded if loaded.dtype == saved.dtype or name == "step" else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _in_own_dtype(loaded[key], saved[key], key)
    elif type(saved) in (list, tuple) and type(loaded) is type(saved):
        return type(saved)(_in_own_dtype(a, b, name) for a, b in zip(loaded, saved, strict=True))
    return loaded
