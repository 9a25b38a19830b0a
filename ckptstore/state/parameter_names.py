"""What an optimizer's parameters are called in a commit: as in the modules of the application
state.

An optimizer numbers its parameters as it was given them. Numbers are other ones on ranks that have
other layers, and after a layer was added; names are not. A parameter is known by its identity;
where one is in no module, the optimizer's state keeps its numbers (docs/decisions/021-…). What is
read is `optimizer.state_dict()`, which changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.state.containers import Named, Names
from ckptstore.state.fsdp1 import ShardedOptimizer, sharded_optimizer
from ckptstore.state.modules import named_parameters_of


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
    def _found(self) -> dict[int, _Found]:
        found: dict[int, _Found] = {}
        for place, module in _modules(self._app_state, ""):
            for name, parameter in named_parameters_of(module):
                found.setdefault(id(parameter), _Found(place, name))
        return found

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        """`optimizer` by parameters, if it has the flat memory of a module here."""
        return sharded_optimizer(optimizer, (module for _, module in _modules(self._app_state, "")))

    def of(self, optimizer: Optimizer) -> list[list[str]] | None:
        """The names of the parameters, group by group: with the module's place in front where they
        are of several modules.

        None if a parameter is in no module, or two have one name.
        """
        found = [
            [self._found.get(id(parameter)) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        several = len({each.module for group in found for each in group if each}) > 1
        names = [
            [f"{each.module}.{each.name}" if several else each.name for each in group if each]
            for group in found
        ]
        count = sum(map(len, names))
        return (
            names
            if count == sum(map(len, found)) == len({name for group in names for name in group})
            else None
        )


def named_state(optimizer: Optimizer, names: ParameterNames, *, ranks: bool = False) -> Any:
    """`optimizer.state_dict()` with the names of parameters in place of their numbers; as it is
    where it is of a form of its own.

    Flat memory of FSDP1 that ranks divide is only told apart if they commit together, which `ranks`
    says.
    """
    sharded = names.sharded(optimizer)
    if sharded is not None and (ranks or sharded.ranks == 1):
        return sharded.state_dict()
    state = optimizer.state_dict()
    groups = names.of(optimizer)
    if groups is None or not _is_numbered(state, groups):
        return state
    flat = [name for group in groups for name in group]
    return {
        **state,
        "state": Named(
            (flat[key] if type(key) is int else key, value) for key, value in state["state"].items()
        ),
        "param_groups": [
            _named_group(group, own)
            for group, own in zip(state["param_groups"], groups, strict=True)
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


def _is_numbered(state: Any, groups: Sequence[Sequence[str]]) -> bool:
    """Whether a state dict has the form that torch gives it, numbering all parameters in order."""
    if (
        type(state) is not dict
        or type(state.get("state")) is not dict
        or type(state.get("param_groups")) is not list
    ):
        return False
    numbers = [
        list(group.get("params", ())) for group in state["param_groups"] if type(group) is dict
    ]
    names = {name for group in groups for name in group}
    count = len(names)
    in_order = [n for group in numbers for n in group] == list(range(count)) and list(
        map(len, numbers)
    ) == list(map(len, groups))
    return in_order and all(
        0 <= key < count if type(key) is int else key not in names for key in state["state"]
    )


def _modules(value: Any, place: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules in plain containers, outermost only."""
    if isinstance(value, torch.nn.Module):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _modules(child, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _modules(child, f"{place}.{i}" if place else str(i))
