"""In which form is an optimizer's state in a commit: its parameters, its groups, and what it has of
each?

Three forms are known. *Named*: as this project commits it, or as
`torch.distributed.checkpoint.state_dict` gives it. *Numbered*: as torch's `state_dict()`. *Flat*:
as DCP's `flatten_optimizer_state_dict=True`, with keys `state.NAME.KEY` and
`param_groups.NAME.KEY`, in which each parameter has options of its own. Everything else is a form
of the optimizer's own, which only its `load_state_dict` understands. Only skeletons and small
values are read here, no tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

from ckptstore.core.forks import cached_property
from ckptstore.core.model import Node, Schema, Shape
from ckptstore.state import containers, values
from ckptstore.state.containers import LEFT_OUT
from ckptstore.state.leaf_sources import NAMES, unescape
from ckptstore.state.parameter_matching import Parameter

_FLAT_MEMORY = ("_fsdp_wrapped_module", "_flat_param")
"""Parts of the names of FSDP1's flat memory, which a process that commits alone has."""

OWN_NAMES = "own"
"""The attribute of a group's names, as one rank sees it, that has the names which this rank had."""

_STATE, _GROUPS = "state", "param_groups"
_PARAMETERS = ("params", "param_names")

_DEPTHS = (1, 0)
"""Where parameters are named: in one module, and in the application state, if there are several."""

ValueOf: TypeAlias = Callable[[int], bytes | None]
"""The bytes of a value leaf, or None if they cannot be had now."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group in a commit: its number, its parameters, None if they are not known, and everything
    else."""

    number: int
    parameters: tuple[Parameter, ...] | None
    options: Node


@dataclass(frozen=True, slots=True)
class Form:
    """An optimizer's state in a commit. `state` has by parameter what the optimizer had of it.
    With `is_divided`, groups are the optimizer's; the flat form does not have them."""

    skeleton: Node
    state: Node | None
    groups: tuple[Group, ...] | None
    is_divided: bool = True

    @property
    def is_named(self) -> bool:
        """Whether the commit says which name each parameter has."""
        are_known = all(group.parameters is not None for group in self.groups or ())
        are_named = all(each.name for each in self.parameters)
        return self.groups is not None and are_known and are_named

    @property
    def is_numbered(self) -> bool:
        """Whether the state is under numbers, whatever names the optimizer was given."""
        return all(type(each.key) is int for each in self.parameters)

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all groups that are known."""
        return [each for group in self.groups or () for each in group.parameters or ()]

    def is_flat_memory(self) -> bool:
        """Whether some names are those of FSDP1's flat memory."""
        keys = self.state.keys or () if self.state else ()
        names = map(str, (*keys, *(each.name for each in self.parameters)))
        return any(part in name for name in names for part in _FLAT_MEMORY)

    def arranged(self, state: Node | None, groups: Sequence[Node]) -> Node:
        """The skeleton with another state and other groups, in torch's form, where it has these."""
        listed = Node("list", tuple(groups))
        if not self.is_divided:
            return _mapping({_STATE: state or _mapping({}), _GROUPS: listed})
        new = {_STATE: state, _GROUPS: None if self.groups is None else listed}
        children = (new.get(str(key)) or child for key, child in self.skeleton.items())
        return replace(self.skeleton, children=tuple(children))


def form_of(skeleton: Node | int, value_of: ValueOf) -> Form | None:
    """The form of an optimizer's state; None for one of another form. Parts may be missing, where
    not all of it was selected."""
    if not isinstance(skeleton, Node) or skeleton.keys is None:
        return None
    parts = texts_of(skeleton)
    state, listed = parts.get(_STATE), parts.get(_GROUPS)
    if state is None and listed is None:
        return _flat_form(skeleton, parts)
    if state is not None and (not isinstance(state, Node) or state.keys is None):
        return None
    if listed is None:
        return Form(skeleton, state, None)
    if not isinstance(listed, Node) or listed.keys is not None:
        return None
    if not all(map(_is_group, listed.children)):
        return None
    return Form(skeleton, state, tuple(_groups(listed, value_of)))


def _is_group(node: Node | int) -> bool:
    return isinstance(node, Node) and (node is LEFT_OUT or node.keys is not None)


def _groups(listed: Node, value_of: ValueOf) -> Iterator[Group]:
    first = 0
    for number, node in listed.items():
        if isinstance(node, int) or node is LEFT_OUT:
            yield Group(number, None, _mapping({}))
            continue
        parts = texts_of(node)
        options = node.filtered(lambda key, child: key not in _PARAMETERS)
        keys, parameters = _listed(parts.get("params"), value_of), None
        if keys is not None:
            is_text = all(type(key) is str for key in keys)
            given = keys if is_text else _listed(parts.get("param_names"), value_of) or ()
            names = given if len(given) == len(keys) else ("",) * len(keys)
            own = _own_names(parts.get("params"))
            parameters = tuple(
                Parameter(n, key, name, number, has_own_options=own is None or name in own)
                for n, (key, name) in enumerate(zip(keys, names, strict=True), first)
            )
            first += len(keys)
        yield Group(number, parameters, options)


def _own_names(node: Node | int | None) -> frozenset[str] | None:
    attrs = dict(node.attrs) if _is_names(node) else {}
    return frozenset(values.decode_value(attrs[OWN_NAMES])) if OWN_NAMES in attrs else None


def _listed(node: Node | int | None, value_of: ValueOf) -> tuple[Any, ...] | None:
    """A list of numbers or names, where it can be read."""
    if _is_names(node):
        return tuple(values.decode_value(dict(node.attrs)["names"]))
    data = value_of(node) if isinstance(node, int) else None
    found = None if data is None else values.decode_leaf(data)
    if type(found) is list and ({*map(type, found)} <= {int} or {*map(type, found)} <= {str}):
        return tuple(found)
    return None


def _flat_form(skeleton: Node, parts: Mapping[str, Node | int]) -> Form | None:
    """The form of a state whose keys hold the names; each parameter is a group of its own."""
    found: dict[str, dict[str, dict[str, Node | int]]] = {_STATE: {}, _GROUPS: {}}
    for key, child in parts.items():
        head, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if head not in found or not name or not last:
            return None
        found[head].setdefault(name, {})[last] = child
    if not parts or len(parts) < len(skeleton.children):
        return None
    state = _mapping({name: _mapping(entry) for name, entry in found[_STATE].items()})
    names = dict.fromkeys((*found[_GROUPS], *found[_STATE]))
    groups = tuple(
        Group(n, (Parameter(n, name, name, n),), _mapping(found[_GROUPS].get(name, {})))
        for n, name in enumerate(names)
    )
    return Form(skeleton, state, groups, is_divided=False)


def texts_of(node: Node) -> dict[str, Node | int]:
    """The children of a mapping whose keys are texts, by these."""
    return {key: child for key, child in node.items() if type(key) is str}


def _mapping(items: Mapping[str, Node | int]) -> Node:
    return Node("dict", tuple(items.values()), tuple(items))


def _is_names(node: Node | int | None) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.type == NAMES


def group_node(options: Node, params: Sequence[int | str]) -> Node:
    """A group with the target's parameters, after its options as in torch. The names that its
    optimizer was given the target knows itself."""
    listed = containers.attribute(list(params), "the numbers of parameters")
    own = Node(NAMES, (), None, (("names", listed),))
    return options.of([*options.items(), ("params", own)])


def is_named(skeleton: Node | int) -> bool:
    """Whether this is an optimizer's state under the names of its parameters."""
    form = form_of(skeleton, lambda leaf: None)
    return form is not None and form.state is not None and _has_names(form.state)


def _has_names(state: Node) -> bool:
    return state.type == containers.PARAMETERS


def unnamed(skeleton: Node | int) -> Node | int:
    """An optimizer's state under the numbers that torch gives its parameters, in the order of their
    names; anything else as it is."""
    form = form_of(skeleton, lambda leaf: None)
    if form is None or form.state is None or not _has_names(form.state):
        return skeleton
    numbers = {each.name: each.number for each in form.parameters}
    keys = tuple(numbers.get(str(key), key) for key in form.state.keys or ())
    numbered = [
        group_node(group.options, [each.number for each in group.parameters or ()])
        for group in form.groups or ()
    ]
    return form.arranged(replace(form.state, type="dict", keys=keys), numbered)


def with_names(node: Node, narrowed: Node) -> Node:
    """`narrowed`, some leaves of the optimizer's state `node`, with the names of all of its
    parameters; anything else as it is."""
    parts = texts_of(node)
    state, listed = parts.get(_STATE), parts.get(_GROUPS)
    if not isinstance(state, Node) or not isinstance(listed, Node):
        return narrowed
    if not _has_names(state) and {*map(type, state.keys or ())} != {str}:
        return narrowed
    some = texts_of(narrowed).get(_GROUPS)
    left = dict(some.items()) if isinstance(some, Node) else {}
    groups = tuple(_with_names(group, left.get(number)) for number, group in listed.items())
    others = narrowed.filtered(lambda key, child: key != _GROUPS)
    return others.of([*others.items(), (_GROUPS, replace(listed, children=groups))])


def _with_names(group: Node | int, left: Node | int | None) -> Node | int:
    if not isinstance(group, Node) or group.keys is None:
        return group if left is None else left
    selected = texts_of(left) if isinstance(left, Node) else {}
    return group.filtered(
        lambda key, child: str(key) in selected or key == "params" or _is_names(child)
    )


class ShapesByName:
    """The shapes of a commit's parameters by their names; None where that is not known, or where
    several modules have one name for different shapes. Made when the first is asked for."""

    def __init__(self, schemas: Iterable[Schema]) -> None:
        self._schemas = schemas

    @cached_property
    def _found(self) -> dict[str, set[Shape]]:
        found: dict[str, set[Shape]] = {}
        for schema in self._schemas:
            for path, kind, shape in zip(schema.paths, schema.kinds, schema.shapes, strict=True):
                for depth in _DEPTHS if kind == "tensor" else ():
                    found.setdefault(_name_of(path, depth), set()).add(shape)
        return found

    def __call__(self, name: str) -> Shape | None:
        shapes = self._found.get(name, set())
        return next(iter(shapes)) if len(shapes) == 1 else None


def _name_of(path: str, depth: int) -> str:
    """The name of a parameter under `path` in what lies so many segments deep."""
    return ".".join(map(unescape, path.split("/")[depth:]))


def new_names(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The new names of parameters, from the old and new paths of leaves: as in one module, and as
    in one of several. A name that would get two is left out."""
    found: dict[str, set[str]] = {}
    for old, new in paths:
        for depth in _DEPTHS:
            found.setdefault(_name_of(old, depth), set()).add(_name_of(new, depth))
    return {name: news.pop() for name, news in found.items() if len(news) == 1}


def own_new_names(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """As `new_names`, where the leaves of an optimizer's own state are renamed."""
    found = ((_name_in(old), _name_in(new)) for old, new in paths)
    return {old: new for old, new in found if old is not None and new is not None and old != new}


def _name_in(path: str) -> str | None:
    """The parameter's name in the path of a leaf of its state."""
    segments = path.split("/")
    pairs = pairwise(segments)
    return next((unescape(name) for before, name in pairs if before == _STATE), None)
