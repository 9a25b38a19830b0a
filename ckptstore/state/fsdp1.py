"""What is the optimizer state of a FullyShardedDataParallel (FSDP1) module, by parameter?

Such an optimizer steps flat memory that is cut by bytes, which has no meaning on another number of
ranks. FSDP1's own functions convert it to state by parameter name, sharded by rows, and back. They
are collectives of the module's group: all its ranks must commit and restore together.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.state.containers import Named, Names
from ckptstore.state.modules import named_without_wrappers

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FLAT = ("_fsdp_wrapped_module", "_flat_param")


class ShardedOptimizer:
    """An optimizer of parameters of `module`, in which there is FSDP1. Its state is read and set;
    nothing is stepped."""

    def __init__(self, module: torch.nn.Module, optimizer: Optimizer, group: Any) -> None:
        self.optimizer = optimizer
        self._module, self._group = module, group

    @property
    def ranks(self) -> int:
        """Over how many ranks the parameters are divided."""
        return int(self._group.size())

    def state_dict(self) -> dict[str, Any]:
        """The state as of an optimizer of plain parameters, named. What is divided over ranks is a
        copy."""
        with self._own_form() as fsdp:
            state = fsdp.optim_state_dict(self._module, self.optimizer, group=self._group)
        groups = [
            {**group, "params": Names(map(self._name, group["params"]))}
            for group in state["param_groups"]
        ]
        named = {self._name(key): _of_parameter(value) for key, value in state["state"].items()}
        stepped = [name for group in groups for name in group["params"] if name in named]
        return {
            **state,
            "state": Named((name, named[name]) for name in dict.fromkeys((*stepped, *named))),
            "param_groups": groups,
        }

    def flat_state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes, from a state of the form of `state_dict`."""
        with self._own_form() as fsdp:
            flat: dict[str, Any] = fsdp.optim_state_dict_to_load(
                self._module, self.optimizer, dict(state), group=self._group
            )
        return flat

    @cached_property
    def models(self) -> dict[str, torch.Tensor]:
        """The parameters as ranks hold them when they are committed, by name: state of their shape
        is held alike."""
        with self._own_form():
            return {self._name(key): value for key, value in self._module.state_dict().items()}

    def _name(self, key: str) -> str:
        return named_without_wrappers(self._module, key)

    @contextmanager
    def _own_form(self) -> Iterator[Any]:
        """FSDP1's functions, set to divided state where there is more than one rank, whatever the
        caller has set them to."""
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        form = StateDictType.SHARDED_STATE_DICT if self.ranks > 1 else StateDictType.FULL_STATE_DICT
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # FSDP1 warns of its own classes, which the caller has chosen
            with FullyShardedDataParallel.state_dict_type(self._module, form):
                yield FullyShardedDataParallel


def sharded_optimizer(
    optimizer: Optimizer, modules: Iterable[torch.nn.Module]
) -> ShardedOptimizer | None:
    """`optimizer` by parameters, if all of its parameters are of one of `modules` that has FSDP1 in
    it."""
    wrapper = getattr(sys.modules.get(_MODULE), "FullyShardedDataParallel", None)
    if wrapper is None:  # whoever has such a module has imported its file
        return None
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        group = next(
            (each.process_group for each in module.modules() if isinstance(each, wrapper)), None
        )
        if group is not None and stepped <= {id(parameter) for parameter in module.parameters()}:
            return ShardedOptimizer(module, optimizer, group)
    return None


def _of_parameter(value: Any) -> Any:
    """What an optimizer has of one parameter, in the order of torch's own: FSDP1 passes it through
    sets, whose order no two processes share. A step that counts for all of a flat memory is given
    to each of its parameters: one tensor would count the steps of all of them where they are
    stepped one by one."""
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: (key != "step", key))
    return {key: value[key].clone() if _is_number(value[key]) else value[key] for key in keys}


def _is_number(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0


def is_flat(names: Iterable[object]) -> bool:
    """Whether state under these names is of FSDP1's flat memory: what a process that commits by
    itself has of it."""
    return any(part in str(name) for name in names for part in _FLAT)
