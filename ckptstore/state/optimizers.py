"""How is an optimizer's state committed by the names of its parameters, and how does it come back?

An optimizer numbers its parameters in the order it got them. The numbers differ on ranks with other
layers, or after a layer was added; names do not. So commits use the parameters' names in the
modules of the application state, found by identity. If a parameter is in no module, the state keeps
its numbers (docs/decisions/021-…), and is restored by position, as torch does. Reads
`optimizer.state_dict()`, which changes nothing.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.forks import cached_property
from ckptstore.core.identity import IdentityDict
from ckptstore.state.containers import Named, Names
from ckptstore.state.stateful import (
    found_in,
    is_stateful,
    load_optimizer,
    name_without_wrappers,
    named_parameters_of,
    optimizer_state_of,
    parameters_of,
)

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


class _Found(NamedTuple):
    """Where a parameter is: the place of its module in the application state, and its name
    there."""

    module: str
    name: str


class ParameterNames:
    """The names of the parameters of all modules in `app_state`; looked for when the first
    optimizer asks."""

    def __init__(self, app_state: Any) -> None:
        self._app_state = app_state

    @cached_property
    def _found(self) -> IdentityDict[torch.Tensor, _Found]:
        found: IdentityDict[torch.Tensor, _Found] = IdentityDict()
        for keys, module in found_in(self._app_state, _is_module):
            place = ".".join(map(str, keys))
            for name, parameter in named_parameters_of(module):
                found.setdefault(parameter, _Found(place, name))
        return found

    def sharded(self, optimizer: Optimizer) -> "ShardedOptimizer | None":
        """`optimizer` by parameters, if all of its parameters are of one module here that has FSDP1
        in it."""
        wrapper = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
        if wrapper is None:  # whoever has such a module has imported its file
            return None
        for _, module in found_in(self._app_state, _is_module):
            groups = (each.process_group for each in module.modules() if isinstance(each, wrapper))
            group = next(groups, None)
            if group is None:
                continue
            own = IdentityDict((each, True) for each in module.parameters())
            if all(each in own for each in parameters_of(optimizer)):
                return ShardedOptimizer(module, optimizer, group)
        return None

    def follower(self, optimizer: Optimizer) -> str | None:
        """The class of an object here that refers to `optimizer`, as a scheduler does, and may have
        a list of something for its groups."""
        for _, value in found_in(self._app_state, _is_follower):
            held = chain.from_iterable(
                each if isinstance(each, list | tuple) else (each,) for each in vars(value).values()
            )
            if any(getattr(each, "param_groups", None) is optimizer.param_groups for each in held):
                return type(value).__qualname__
        return None

    def of(self, optimizer: Optimizer) -> IdentityDict[torch.Tensor, str] | None:
        """The name of each parameter: with the module's place in front where they are of several
        modules.

        None if a parameter is in no module, or two have one name.
        """
        parameters = parameters_of(optimizer)
        known = self._found
        found = [(each, known[each]) for each in parameters if each in known]
        several = len({place.module for _, place in found}) > 1
        names = [(each, f"{m}.{name}" if several else name) for each, (m, name) in found]
        is_whole = len(found) == len(parameters) == len({name for _, name in names})
        return IdentityDict(names) if is_whole else None


def named_state(optimizer: Optimizer, names: ParameterNames, *, ranks: bool = False) -> Any:
    """`optimizer.state_dict()` with the names of parameters in place of their numbers; as it is
    where it is of a form of its own.

    Flat memory of FSDP1 that ranks divide is only told apart if they commit together, which `ranks`
    says.
    """
    sharded = names.sharded(optimizer)
    if sharded is not None and (ranks or sharded.ranks == 1):
        return sharded.state_dict()
    state = optimizer_state_of(optimizer)
    found = names.of(optimizer)
    if found is None:
        return state
    by_number = {number: found[each] for number, each in enumerate(parameters_of(optimizer))}
    if not _is_numbered(state, optimizer, by_number):
        return state
    return {
        **state,
        "state": Named(
            (by_number[key] if type(key) is int else key, value)
            for key, value in state["state"].items()
        ),
        "param_groups": [
            _named_group(group, [by_number[number] for number in group["params"]])
            for group in state["param_groups"]
        ],
    }


def _named_group(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A group with lists of names that ranks may have parts of: `param_names` are those that
    torch's optimizer was given."""
    given = group.get("param_names")
    more = (
        {"param_names": Names(given)}
        if type(given) is list and all(type(name) is str for name in given)
        else {}
    )
    return {**group, **more, "params": Names(names)}


def _is_numbered(state: Any, optimizer: Optimizer, names: Mapping[int, str]) -> bool:
    """Whether a state dict has the form that torch gives it, numbering all parameters in order."""
    if (
        type(state) is not dict
        or type(state.get("state")) is not dict
        or type(state.get("param_groups")) is not list
        or not all(type(group) is dict for group in state["param_groups"])
    ):
        return False
    given = [list(group.get("params", ())) for group in state["param_groups"]]
    taken = set(names.values())
    return (
        list(map(len, given)) == [len(group["params"]) for group in optimizer.param_groups]
        and list(chain.from_iterable(given)) == list(names)
        and all(key in names if type(key) is int else key not in taken for key in state["state"])
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _is_follower(value: Any) -> bool:
    return (
        is_stateful(value)
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module | Optimizer)
    )


class ShardedOptimizer:
    """An optimizer of parameters of `module`, in which there is FullyShardedDataParallel (FSDP1).

    Such an optimizer steps flat memory that is cut by bytes, which has no meaning on another number
    of ranks. FSDP1's own functions convert it to state by parameter name, sharded by rows, and
    back. They are collectives of the module's group: all its ranks must commit and restore
    together.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Optimizer, group: Any) -> None:
        self._optimizer = optimizer
        self._module, self._group = module, group

    @property
    def ranks(self) -> int:
        """Over how many ranks the parameters are divided."""
        return int(self._group.size())

    def state_dict(self) -> dict[str, Any]:
        """The state as of an optimizer of plain parameters, named. What is divided over ranks is a
        copy."""
        with self._own_form() as fsdp:
            state = fsdp.optim_state_dict(self._module, self._optimizer, group=self._group)
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the form of `state_dict` into the optimizer."""
        with self._own_form() as fsdp:
            flat = fsdp.optim_state_dict_to_load(
                self._module, self._optimizer, dict(state), group=self._group
            )
        load_optimizer(self._optimizer, flat)

    @cached_property
    def models(self) -> dict[str, torch.Tensor]:
        """The parameters as ranks hold them when they are committed, by name: state of their shape
        is held alike."""
        with self._own_form():
            return {self._name(key): value for key, value in self._module.state_dict().items()}

    def _name(self, key: str) -> str:
        return name_without_wrappers(self._module, key)

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


def _of_parameter(value: Any) -> Any:
    """What an optimizer has of one parameter, in the order of torch's own: FSDP1 passes it through
    sets, whose order no two processes share. A step that counts for all of a flat memory is given
    to each of its parameters: one tensor would count the steps of all of them where they are
    stepped one by one."""
    if not isinstance(value, dict):
        return value
    found = {key: value[key] for key in sorted(value, key=lambda key: (key != "step", key))}
    numbers = {key: each for key, each in found.items() if type(each) is torch.Tensor}
    return {**found, **{key: each.clone() for key, each in numbers.items() if not each.ndim}}
