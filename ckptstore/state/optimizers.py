"""How is an optimizer's state committed by the names of its parameters, and how does it come back?

An optimizer numbers its parameters in the order it got them. The numbers differ on ranks with other
layers, or after a layer was added; names do not. So commits use the parameters' names in the
modules of the application state, found by identity. If a parameter is in no module, the state keeps
its numbers (docs/decisions/021-…), and is restored by position, as torch does. Reads
`optimizer.state_dict()`, which changes nothing.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import Node, leaves_of
from ckptstore.state import containers, values
from ckptstore.state.containers import Named, Names
from ckptstore.state.leaf_sources import unescape
from ckptstore.state.stateful import (
    found_in,
    load_optimizer,
    name_without_wrappers,
    named_parameters_of,
    parameters_of,
)

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FLAT = ("_fsdp_wrapped_module", "_flat_param")
"""Parts of the names of FSDP1's flat memory, which a process that commits alone has."""


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
        for keys, module in found_in(self._app_state, _is_module):
            for name, parameter in named_parameters_of(module):
                found.setdefault(id(parameter), _Found(".".join(map(str, keys)), name))
        return found

    def sharded(self, optimizer: Optimizer) -> "ShardedOptimizer | None":
        """`optimizer` by parameters, if all of its parameters are of one module here that has FSDP1
        in it."""
        wrapper = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
        if wrapper is None:  # whoever has such a module has imported its file
            return None
        stepped = set(map(id, parameters_of(optimizer)))
        for _, module in found_in(self._app_state, _is_module):
            groups = (each.process_group for each in module.modules() if isinstance(each, wrapper))
            group = next(groups, None)
            if group is not None and stepped <= {id(each) for each in module.parameters()}:
                return ShardedOptimizer(module, optimizer, group)
        return None

    def of(self, optimizer: Optimizer) -> list[list[str]] | None:
        """The names of the parameters, group by group: with the module's place in front where they
        are of several modules.

        None if a parameter is in no module, or two have one name.
        """
        found = [
            [self._found.get(id(parameter)) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        several = len({each.module for each in chain.from_iterable(found) if each}) > 1
        names = [
            [f"{each.module}.{each.name}" if several else each.name for each in group if each]
            for group in found
        ]
        flat = list(chain.from_iterable(names))
        return names if len(flat) == sum(map(len, found)) == len(set(flat)) else None


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
    numbers = iter(range(sum(map(len, groups))))
    wanted = [list(islice(numbers, len(group))) for group in groups]
    given = [each.get("params", ()) for each in state["param_groups"] if type(each) is dict]
    names = set(chain.from_iterable(groups))
    return list(map(list, given)) == wanted and all(
        0 <= key < len(names) if type(key) is int else key not in names for key in state["state"]
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A committed state as a target optimizer takes it.

    `receiver` is what loads it, and `state` what that has now. `models` are the parameters of the
    skeleton's leaves. `unexpected` are the names and nodes of what the target has no parameter for,
    `missing` the names that the commit does not know.
    """

    receiver: "Optimizer | ShardedOptimizer"
    state: Any
    skeleton: Node | int
    models: Mapping[int, torch.Tensor]
    unexpected: tuple[tuple[str, Node | int], ...] = ()
    missing: tuple[str, ...] = ()


class _Form(NamedTuple):
    """The skeleton of an optimizer's state: values by parameter, and the groups."""

    skeleton: Node
    state: Node
    groups: Node | int | None

    @property
    def is_named(self) -> bool:
        return self.state.type == containers.PARAMETERS

    def is_flat(self) -> bool:
        """Whether some names are those of FSDP1's flat memory."""
        names = (*map(str, self.state.keys or ()), *self.names())
        return any(part in name for name in names for part in _FLAT)

    def names(self) -> list[str]:
        """The names of the parameters, in their order; none where the groups are left out."""
        return list(chain.from_iterable(map(_names_of, _children(self.groups))))

    def replaced(self, state: Node, counts: Sequence[int] | None) -> Node:
        """With another state, and in the groups numbers of parameters, so many a group, in place of
        names."""
        groups = self.groups
        if counts is not None and isinstance(groups, Node) and len(groups.children) == len(counts):
            firsts = accumulate(counts, initial=0)
            numbered = (
                _numbered_group(group, range(first, first + count))
                for group, first, count in zip(groups.children, firsts, counts, strict=False)
            )
            groups = replace(groups, children=tuple(numbered))
        children = tuple(
            state if child is self.state else groups if child is self.groups else child
            for child in self.skeleton.children
        )
        return replace(self.skeleton, children=children)  # type: ignore[arg-type]  # none is None


def _form(skeleton: Node | int) -> _Form | None:
    """The parts of an optimizer's state; None for one of another form."""
    if not isinstance(skeleton, Node):
        return None
    parts = {key: child for key, child in skeleton.items() if type(key) is str}
    state = parts.get("state")
    if not isinstance(state, Node) or state.keys is None:
        return None
    return _Form(skeleton, state, parts.get("param_groups"))


def is_named(skeleton: Node | int) -> bool:
    """Whether this is an optimizer's state under the names of its parameters."""
    form = _form(skeleton)
    return form is not None and form.is_named


def unnamed(skeleton: Node | int) -> Node | int:
    """An optimizer's state under the numbers that torch gives its parameters, in the order of their
    names; anything else as it is."""
    form = _form(skeleton)
    if form is None or not form.is_named:
        return skeleton
    numbers = {name: number for number, name in enumerate(form.names())}
    keys = _numbered_keys(form.state, numbers)
    counts = [len(_names_of(group)) for group in _children(form.groups)]
    return form.replaced(replace(form.state, type="dict", keys=keys), counts)


def new_names(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The new names of parameters, from the old and new paths of leaves: as in one module, and as
    in one of several. A name that would get two is left out."""
    found: dict[str, set[str]] = {}
    for old, new in paths:
        before, after = (list(map(unescape, path.split("/"))) for path in (old, new))
        for skip in (1, 0):
            found.setdefault(".".join(before[skip:]), set()).add(".".join(after[skip:]))
    return {name: news.pop() for name, news in found.items() if len(news) == 1}


def fit(
    skeleton: Node | int,
    optimizer: Optimizer,
    names: ParameterNames,
    renames: Mapping[str, str] | None = None,
) -> Fitted:
    """A state, committed by name or by number, for `optimizer`; one of another form as it is.

    Parameters are found by name, by that of `renames` if it has one. With `renames`, or if none is
    found so, those without a counterpart are matched in their order, if there are as many on both
    sides, as torch does.
    """
    form, sharded = _form(skeleton), names.sharded(optimizer)
    if form is None or not form.is_named or form.is_flat():
        sharded = None
    receiver = sharded or optimizer
    state = receiver.state_dict()
    if form is None:
        return Fitted(receiver, state, skeleton, {})
    committed = form.names()
    known, counts = frozenset(committed), None
    keys: Mapping[str, int | str]
    models: Mapping[Any, torch.Tensor]
    if sharded is not None:
        own = [name for group in state["param_groups"] for name in group["params"]]
        keys, models = dict(zip(own, own, strict=True)), sharded.models
        missing = tuple(name for name in own if name not in known) if known else ()
    else:
        models = dict(enumerate(parameters_of(optimizer)))
        if not form.is_named:
            return Fitted(receiver, state, skeleton, _models(form.state, models))
        counts = [len(group["params"]) for group in optimizer.param_groups]
        keys, missing = _numbers(committed, names.of(optimizer), len(models), renames)

    def is_foreign(key: Any) -> bool:
        """What is no parameter's at all, as some optimizers have it, is not foreign."""
        unknown = type(key) is str and key not in keys
        return unknown and (key in known or not known)

    kept = form.state.filtered(lambda key, child: not is_foreign(key))
    inner = Node("dict", kept.children, _numbered_keys(kept, keys))
    foreign = tuple((str(key), child) for key, child in form.state.items() if is_foreign(key))
    fitted = form.replaced(inner, counts)
    return Fitted(receiver, state, fitted, _models(inner, models), foreign, missing)


def _numbers(
    committed: Sequence[str],
    names: Sequence[Sequence[str]] | None,
    count: int,
    renames: Mapping[str, str] | None,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of each name in a target of `count` parameters with `names`, if these are known,
    and what the commit does not have. Names in `renames` are found under their new ones.

    `committed` are the names in their order; there are none where only a part of the state is
    selected.
    """
    target = list(chain.from_iterable(names or ()))
    own = {name: number for number, name in enumerate(target)}
    new = {name: (renames or {}).get(name, name) for name in committed}
    found = {name: own[new[name]] for name in committed if new[name] in own}
    numbers = own | found
    left = [name for name in committed if name not in found]
    taken = set(found.values())
    free = [n for n in range(count) if n not in taken]
    if len(left) == len(free) and (renames is not None or not taken):
        numbers.update(zip(left, free, strict=True))
        free = []
    return numbers, tuple(target[n] if target else str(n) for n in free) if committed else ()


def _numbered_keys(state: Node, numbers: Mapping[str, int | str]) -> tuple[Any, ...]:
    return tuple(numbers.get(key, key) if type(key) is str else key for key in state.keys or ())


def _models(state: Node, models: Mapping[Any, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The parameter of each leaf."""
    return {
        leaf: models[key]
        for key, child in state.items()
        if isinstance(key, int | str) and key in models
        for leaf in leaves_of(child)
    }


def _numbered_group(node: Node | int, numbers: range) -> Node | int:
    """A group with the target's parameters. The names that its optimizer was given the target knows
    itself."""
    if not isinstance(node, Node) or node.keys is None:
        return node
    node = node.filtered(lambda key, child: key != "param_names" or not _is_names(child))
    own = Node(
        containers.NAMES, (), None, (("names", containers.attribute(list(numbers), "names")),)
    )
    children = (own if key == "params" and _is_names(each) else each for key, each in node.items())
    return replace(node, children=tuple(children))


def _names_of(group: Node | int) -> list[str]:
    items = group.items() if isinstance(group, Node) and group.keys is not None else ()
    found: list[str] = []
    for key, child in items:
        if key == "params" and _is_names(child):
            found = values.decode_value(dict(child.attrs)["names"])
    return found


def _is_names(node: Node | int) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.type == containers.NAMES


def _children(node: Node | int | None) -> tuple[Node | int, ...]:
    return node.children if isinstance(node, Node) else ()


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
