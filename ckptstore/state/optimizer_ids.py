"""How do an optimizer's parameter numbers map to names, and back to the target's numbers?

An optimizer numbers its parameters in the order it got them. The numbers differ on ranks with other
layers, or after a layer was added; names do not. So commits use the parameters' names in the
modules of the application state, found by identity. If a parameter is in no module, the state keeps
its numbers (docs/decisions/021-…), and is restored by position, as torch does. Reads
`optimizer.state_dict()`, which changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import Node
from ckptstore.state import containers, values
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


@dataclass(frozen=True, slots=True)
class Numbered:
    """A committed state as a target optimizer numbers it: `models` are the parameters of its
    leaves.

    `unexpected` are the names and nodes of what the target has no parameter for, `missing` the
    names that the commit does not know.
    """

    skeleton: Node
    models: Mapping[int, torch.Tensor]
    unexpected: tuple[tuple[str, Node | int], ...] = ()
    missing: tuple[str, ...] = ()


def is_named(skeleton: Node | int) -> bool:
    """Whether this is an optimizer's state under the names of its parameters."""
    state = _child(skeleton, "state")
    return isinstance(state, Node) and state.type == containers.PARAMETERS


def numbered(
    skeleton: Node | int, optimizer: Optimizer, names: ParameterNames, *, in_order: bool = False
) -> Numbered | None:
    """The skeleton of an optimizer's state, committed by name or by number, for `optimizer`; None
    for one of another form.

    Parameters are found by name. With `in_order`, or if none is found so, those without a
    counterpart are matched in their order, if there are as many on both sides, as torch does.
    """
    state, groups = _child(skeleton, "state"), _child(skeleton, "param_groups")
    if not isinstance(skeleton, Node) or not isinstance(state, Node) or state.keys is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not is_named(skeleton):
        return Numbered(skeleton, dict(_models(state, parameters)))
    found = _Match(
        _committed_names(groups), names.of(optimizer), len(parameters), in_order=in_order
    )
    kept = [
        (found.number(key, key), child)
        for key, child in zip(state.keys, state.children, strict=True)
        if not found.is_foreign(key)
    ]
    foreign = [
        (str(key), child)
        for key, child in zip(state.keys, state.children, strict=True)
        if found.is_foreign(key)
    ]
    inner = Node("dict", tuple(child for _, child in kept), tuple(key for key, _ in kept))
    below = (
        inner if child is state else _groups(child, optimizer) if child is groups else child
        for child in skeleton.children
    )
    return Numbered(
        replace(skeleton, children=tuple(below)),
        dict(_models(inner, parameters)),
        tuple(foreign),
        found.missing,
    )


def named(skeleton: Node | int, own: Sequence[str], models: Mapping[str, torch.Tensor]) -> Numbered:
    """A skeleton that has names, for an optimizer that takes names, its `own`; `models` are
    parameters by name."""
    state = _child(skeleton, "state")
    assert isinstance(skeleton, Node) and isinstance(state, Node) and state.keys is not None
    items = list(zip(state.keys, state.children, strict=True))
    committed = _committed_names(_child(skeleton, "param_groups"))
    foreign = set(committed or map(str, state.keys)) - set(own)
    kept = [(key, child) for key, child in items if key not in foreign]
    inner = replace(
        state, children=tuple(child for _, child in kept), keys=tuple(key for key, _ in kept)
    )
    below = tuple(inner if child is state else child for child in skeleton.children)
    return Numbered(
        replace(skeleton, children=below),
        {
            leaf: models[key]
            for key, child in kept
            if key in models
            for leaf in containers.leaves_of(child)
        },
        tuple((str(key), child) for key, child in items if key in foreign),
        tuple(name for name in own if name not in committed) if committed else (),
    )


def names_in(skeleton: Node | int) -> tuple[str, ...]:
    """The names under which an optimizer's state was committed; none for numbers."""
    state = _child(skeleton, "state")
    return (
        (*map(str, state.keys or ()), *_committed_names(_child(skeleton, "param_groups")))
        if is_named(skeleton) and isinstance(state, Node)
        else ()
    )


def unnamed(skeleton: Node | int) -> Node | int:
    """An optimizer's state under the numbers that torch gives its parameters, in the order of their
    names; anything else as it is."""
    state, groups = _child(skeleton, "state"), _child(skeleton, "param_groups")
    if not isinstance(skeleton, Node) or not isinstance(state, Node) or not is_named(skeleton):
        return skeleton
    numbers = {name: number for number, name in enumerate(_committed_names(groups))}
    keys = tuple(numbers.get(key, key) if type(key) is str else key for key in state.keys or ())
    below = {
        id(state): replace(state, type="dict", keys=keys),
        id(groups): _numbered_groups(groups),
    }
    children = tuple(below.get(id(child), child) for child in skeleton.children)
    return replace(skeleton, children=children)  # type: ignore[arg-type]  # none is None


def _numbered_groups(groups: Node | int | None) -> Node | int | None:
    if not isinstance(groups, Node):
        return groups
    counts = [
        len(_committed_names(replace(groups, children=(group,)))) for group in groups.children
    ]
    firsts = accumulate(counts, initial=0)
    children = (
        _group(group, range(first, first + n))
        for group, first, n in zip(groups.children, firsts, counts, strict=False)
    )
    return replace(groups, children=tuple(children))


class _Match:
    """Which number each committed parameter has in a target of `count` parameters with `names`, if
    these are known.

    `committed` are the names in their order; there are none where only a part of the state is
    selected.
    """

    def __init__(
        self,
        committed: Sequence[str],
        names: Sequence[Sequence[str]] | None,
        count: int,
        *,
        in_order: bool,
    ) -> None:
        target = [name for group in names or () for name in group]
        self._numbers = {name: number for number, name in enumerate(target)}
        self._committed = frozenset(committed)
        found = {name: self._numbers[name] for name in committed if name in self._numbers}
        taken = set(found.values())
        left, free = (
            [name for name in committed if name not in found],
            [n for n in range(count) if n not in taken],
        )
        if len(left) == len(free) and (in_order or not found):
            found.update(zip(left, free, strict=True))
            free = []
        self._numbers.update(found)
        self.missing = tuple(target[n] if target else str(n) for n in free) if committed else ()

    def number(self, key: Any, default: Any) -> Any:
        return self._numbers.get(key, default) if type(key) is str else default

    def is_foreign(self, key: Any) -> bool:
        """Whether the target has no such parameter. What is no parameter's at all, as some
        optimizers have it, is not foreign."""
        return (
            type(key) is str
            and key not in self._numbers
            and (key in self._committed or not self._committed)
        )


def _groups(node: Node | int, optimizer: Optimizer) -> Node | int:
    if not isinstance(node, Node) or len(node.children) != len(optimizer.param_groups):
        return node  # torch refuses another number of groups, and says so
    renamed, first = [], 0
    for group, own in zip(node.children, optimizer.param_groups, strict=True):
        renamed.append(_group(group, range(first, first + len(own["params"]))))
        first += len(own["params"])
    return replace(node, children=tuple(renamed))


def _group(node: Node | int, numbers: range) -> Node | int:
    """A group with the target's parameters. The names that its optimizer was given the target knows
    itself."""
    if not isinstance(node, Node) or node.keys is None:
        return node
    items = [
        (key, child)
        for key, child in zip(node.keys, node.children, strict=True)
        if key != "param_names" or not _is_names(child)
    ]
    own = Node(
        containers.NAMES, (), None, (("names", containers.attribute(list(numbers), "names")),)
    )
    children = tuple(own if key == "params" and _is_names(child) else child for key, child in items)
    return replace(node, keys=tuple(key for key, _ in items), children=children)


def _committed_names(groups: Node | int | None) -> list[str]:
    found: list[str] = []
    for group in groups.children if isinstance(groups, Node) else ():
        params = _child(group, "params")
        if isinstance(params, Node) and _is_names(params):
            found.extend(values.decode_value(dict(params.attrs)["names"]))
    return found


def _is_names(node: Node | int) -> bool:
    return isinstance(node, Node) and node.type == containers.NAMES


def _models(state: Node, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    for key, child in zip(state.keys or (), state.children, strict=True):
        if type(key) is int and 0 <= key < len(parameters):
            yield from ((leaf, parameters[key]) for leaf in containers.leaves_of(child))


def _child(node: Node | int, key: str) -> Node | int | None:
    if not isinstance(node, Node) or node.keys is None or key not in node.keys:
        return None
    return node.children[node.keys.index(key)]
