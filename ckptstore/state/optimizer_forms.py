"""In which form is an optimizer's state in a commit: its parameters, its groups, and what it has of
each?

Three forms are known. *Named*: as this project commits it, or as
`torch.distributed.checkpoint.state_dict` gives it. *Numbered*: as torch's `state_dict()`. *Flat*:
as DCP's `flatten_optimizer_state_dict=True`, with keys `state.NAME.KEY` and
`param_groups.NAME.KEY`, in which each parameter has options of its own. Everything else is a form
of the optimizer's own, which only its `load_state_dict` understands. Only skeletons and small
values are read here, no tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias, TypeGuard

from ckptstore.core.forks import cached_property
from ckptstore.core.model import Node, Schema, Shape
from ckptstore.state import containers, values
from ckptstore.state.containers import LEFT_OUT
from ckptstore.state.leaf_sources import NAMES, unescape

_FLAT_MEMORY = ("_fsdp_wrapped_module", "_flat_param")
"""Parts of the names of FSDP1's flat memory, which a process that commits alone has."""

OWN_NAMES = "own"
"""The attribute of a group's names, as one rank sees it, that has the names which this rank had."""

_STATE, _GROUPS = "state", "param_groups"

ValueOf: TypeAlias = Callable[[int], bytes | None]
"""The bytes of a value leaf, or None if they cannot be had now."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters in a commit. `params` are the keys of its parameters in the state, or
    None if they are not known; `names` are theirs in the modules, if the commit has any. `options`
    has everything else. Where ranks had different ones, they are those of `own_names` only."""

    params: tuple[int | str, ...] | None
    names: tuple[str, ...] | None
    options: Node
    own_names: frozenset[str] | None = None


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
        return self.groups is not None and all(group.names is not None for group in self.groups)

    @property
    def is_numbered(self) -> bool:
        """Whether the state is under numbers, whatever names the optimizer was given."""
        params = [key for group in self.groups or () for key in group.params or ()]
        return all(type(key) is int for key in params)

    def names(self) -> list[str]:
        """The names of the parameters, in their order."""
        return [name for group in self.groups or () for name in group.names or ()]

    def is_flat_memory(self) -> bool:
        """Whether some names are those of FSDP1's flat memory."""
        names = (*map(str, self.state.keys or () if self.state else ()), *self.names())
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
    groups = tuple(_group(_node(child), value_of) for child in listed.children)
    return Form(skeleton, state, groups)


def _is_group(node: Node | int) -> bool:
    return isinstance(node, Node) and (node is LEFT_OUT or node.keys is not None)


def _group(node: Node, value_of: ValueOf) -> Group:
    if node is LEFT_OUT:
        return Group(None, None, Node("dict", (), ()))
    parts = texts_of(node)
    params = _listed(parts.get("params"), value_of)
    is_text = params is not None and all(type(key) is str for key in params)
    names = params if is_text else _listed(parts.get("param_names"), value_of)
    if names is not None and (params is None or len(names) != len(params)):
        names = None
    options = node.filtered(lambda key, child: key not in ("params", "param_names"))
    return Group(params, names, options, _own_names(parts.get("params")))


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
        Group((name,), (name,), _mapping(found[_GROUPS].get(name, {}))) for name in names
    )
    return Form(skeleton, state, groups, is_divided=False)


def texts_of(node: Node) -> dict[str, Node | int]:
    """The children of a mapping whose keys are texts, by these."""
    return {key: child for key, child in node.items() if type(key) is str}


def _mapping(items: Mapping[str, Node | int]) -> Node:
    return Node("dict", tuple(items.values()), tuple(items))


def _node(node: Node | int) -> Node:
    assert isinstance(node, Node)
    return node


def _is_names(node: Node | int | None) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.type == NAMES


def group_node(options: Node, params: Sequence[int | str]) -> Node:
    """A group with the target's parameters, after its options as in torch. The names that its
    optimizer was given the target knows itself."""
    listed = containers.attribute(list(params), "the numbers of parameters")
    own = Node(NAMES, (), None, (("names", listed),))
    return replace(
        options, children=(*options.children, own), keys=(*(options.keys or ()), "params")
    )


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
    numbers = {name: number for number, name in enumerate(form.names())}
    keys = tuple(numbers.get(str(key), key) for key in form.state.keys or ())
    groups = form.groups or ()
    firsts = accumulate((len(group.params or ()) for group in groups), initial=0)
    numbered = [
        group_node(group.options, range(first, first + len(group.params or ())))
        for group, first in zip(groups, firsts, strict=False)
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
    there = some.children if isinstance(some, Node) else (None,) * len(listed.children)
    groups = replace(listed, children=tuple(map(_with_names, listed.children, there)))
    others = narrowed.filtered(lambda key, child: key != _GROUPS)
    return replace(
        others, children=(*others.children, groups), keys=(*(others.keys or ()), _GROUPS)
    )


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
                if kind == "tensor":
                    for name in _names_of(path):
                        found.setdefault(name, set()).add(shape)
        return found

    def __call__(self, name: str) -> Shape | None:
        shapes = self._found.get(name, set())
        return next(iter(shapes)) if len(shapes) == 1 else None


def _names_of(path: str) -> tuple[str, str]:
    """The names that a parameter under `path` may have: in one module, and in one of several."""
    segments = list(map(unescape, path.split("/")))
    return ".".join(segments[1:]), ".".join(segments)


def new_names(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The new names of parameters, from the old and new paths of leaves: as in one module, and as
    in one of several. A name that would get two is left out."""
    found: dict[str, set[str]] = {}
    for old, new in paths:
        for before, after in zip(_names_of(old), _names_of(new), strict=True):
            found.setdefault(before, set()).add(after)
    return {name: news.pop() for name, news in found.items() if len(news) == 1}


def own_new_names(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """As `new_names`, where the leaves of an optimizer's own state are renamed."""
    found = ((_name_in(old), _name_in(new)) for old, new in paths)
    return {old: new for old, new in found if old is not None and new is not None and old != new}


def _name_in(path: str) -> str | None:
    """The parameter's name in the path of a leaf of its state."""
    segments = path.split("/")
    pairs = zip(segments, segments[1:], strict=False)
    return next((unescape(name) for before, name in pairs if before == _STATE), None)
