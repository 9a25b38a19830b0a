"""Which objects are containers, and how are they split and joined? The registry of node types.

`split` takes an object apart into children and attributes, `join` makes an equal object of the same
type from them (docs/values.md). Flattening, inflating and restoring all use this definition.

An instance may hold attributes beside what its type describes. A dataclass's are children like its
fields. Those of all other objects are plain values in the node's attribute `attributes`, or the
commit is refused.
"""

import dataclasses
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import getattr_static
from types import BuiltinMethodType
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptstore.core.model import Node, nodes_of
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.state import values
from ckptstore.state.leaf_sources import ATTRIBUTES, NAMES, WRAPPERS
from ckptstore.state.stateful import (
    Classes,
    class_name,
    class_named,
    is_stateful,
    registered_name,
    state_of,
)

_SCALARS = (int, float, complex, str, bool, bytes)
_COLLECTIONS = (dict, list, set, tuple, frozenset, deque, OrderedDict, Counter, defaultdict)
_FACTORIES: dict[str, Any] = {cls.__name__: cls for cls in (*_SCALARS, *_COLLECTIONS)}
PARAMETERS = "parameters"
"""Node types of an optimizer's state: values by parameter name, and ordered names (not a leaf)."""

_DIVISIBLE = ("list", "tuple", "deque", "namedtuple", "dataclass", "stateful")

LEFT_OUT = Node("left out", ())
"""Stands, by identity, for unselected nodes of a narrowed skeleton; never stored."""


class Named(dict[Any, Any]):
    """An optimizer's values by parameter name."""


class Names(list[str]):
    """Ordered names. Ranks may each have a part of one such list."""


class SplitObject(NamedTuple):
    """A split object. With `keys`, which are encoded, it is a mapping."""

    type: str
    children: Sequence[Any]
    keys: Sequence[Any] | None = None
    attrs: tuple[tuple[str, Any], ...] = ()

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Each child with its key, or with its number."""
        return zip(self.keys or range(len(self.children)), self.children, strict=True)


class Joint(NamedTuple):
    """The input of `join`: children in order, keys and attributes decoded. With `clears`, entries
    that only a target has go."""

    children: Sequence[Any]
    keys: Sequence[Any]
    attrs: dict[str, Any]
    classes: Classes
    clears: bool

    def items(self) -> Iterable[tuple[Any, Any]]:
        return zip(self.keys, self.children, strict=True)


Form: TypeAlias = Literal["wrapper", "sequence", "mapping", "record"]
"""A node's children: one at the node's path, items, values by key, or values by string name."""

Split: TypeAlias = Callable[[Any], SplitObject]


@dataclass(frozen=True, slots=True)
class NodeType:
    """How nodes of one type become objects again.

    `make` returns an object that `fill`, if there is one, gives its content. With `fill`, an object
    of a target for which `takes` holds is filled in place. With `copies`, `make` returns an object
    that shares no memory with its children.
    """

    form: Form
    make: Callable[[Joint], Any]
    fill: Callable[[Any, Joint], object] | None = None
    takes: Callable[[Any, Joint], bool] = lambda target, joint: False
    copies: bool = False


_SPLITS: dict[type, Split] = {}
_HELD_OTHERWISE: dict[type, frozenset[str]] = {}
"""Classes whose instances can have attributes, and the names of those that `split` handles."""
_TYPES: dict[str, NodeType] = {}


def add_container(cls: type, split: Split, held_otherwise: Sequence[str] = ()) -> None:
    """Register a class; `split` handles its instances, not those of subclasses, and their
    attributes called `held_otherwise`."""
    _SPLITS[cls] = split
    if cls.__dictoffset__:
        _HELD_OTHERWISE[cls] = frozenset(held_otherwise)


def add_node_type(
    name: str, form: Form, make: Callable[[Joint], Any], *, copies: bool = False
) -> None:
    """Register a node type whose objects are made anew."""
    _add_type(name, NodeType(form, make, copies=copies))


def add_filled(
    cls: type,
    split: Split,
    name: str,
    form: Form,
    make: Callable[[Joint], Any],
    fill: Callable[[Any, Joint], object],
    fits: Callable[[Any, Joint], bool] = lambda target, joint: True,
    held_otherwise: Sequence[str] = (),
) -> None:
    """Register a class whose objects are filled in place, those of a target for which `fits`
    holds."""
    add_container(cls, split, held_otherwise)
    kind = NodeType(
        form, make, fill, lambda target, joint: type(target) is cls and fits(target, joint)
    )
    _add_type(name, kind)


def _add_type(name: str, kind: NodeType) -> None:
    assert (kind.form == "wrapper") == (name in WRAPPERS), f"{name}: not as paths are made"
    _TYPES[name] = kind


def split(value: Any) -> SplitObject | None:
    """Split `value`, or return None if it is no container. Raises `InvalidInput` if unsupported."""
    cls = type(value)
    if cls in _SPLITS:
        parts = _SPLITS[cls](value)
        held = cls in _HELD_OTHERWISE and vars(value)
        more = attributes_of(value, _HELD_OTHERWISE[cls]) if held else ()
        return parts._replace(attrs=parts.attrs + more) if more else parts
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        attrs = (("class", class_name(cls)), *attributes_of(value))
        return SplitObject("namedtuple", list(value), list(cls._fields), attrs)
    if is_stateful(value):
        return SplitObject("stateful", [state_of(value)])
    if dataclasses.is_dataclass(cls) and not _is_builtin(cls):
        return _split_dataclass(value)
    return None


def attributes_of(
    value: Any, held_otherwise: Collection[str] = ()
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The attribute of a node for what `value` holds beside its content; none if it holds nothing.
    Raises `InvalidInput` for an attribute that is no plain value."""
    held = getattr(value, "__dict__", None)
    if not held or held.keys() <= set(held_otherwise):
        return ()
    found = {}
    for name, each in held.items():
        if name in held_otherwise:
            continue
        if type(name) is not str or values.encode_attribute(each) is values.NOT_A_VALUE:
            cls = type(value)
            is_own = cls not in _SPLITS and not cls.__module__.startswith("torch")
            way_out = f", or ckptstore.register_value(…, {class_name(cls)}, …)" if is_own else ""
            raise InvalidInput(
                f"its attribute {name!r} is {each!r:.80}, not a plain value, which is all that "
                f"attributes of a {class_name(cls)} can be; store that under a key of its own and "
                f"delete the attribute (a tensor's: commit its detach()){way_out}"
            )
        found[name] = each
    return ((ATTRIBUTES, values.encode_attribute(found)),)


def field_of(value: Any, name: str) -> Any:
    """What an instance has under the name of a field, or of an attribute beside them; else None."""
    if name in getattr(type(value), "__dataclass_fields__", ()):
        return getattr(value, name, None)
    return _own_attribute(value, name)


def _own_attribute(value: Any, name: str) -> Any:
    """An attribute that the instance itself holds, or None; runs no code of its class."""
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name]
    return getattr(value, name, None) if name in slots_of(type(value)) else None


def slots_of(cls: type) -> tuple[str, ...]:
    """The names of an instance's slots, in the order of the classes that have them."""
    found: list[str] = []
    for base in reversed(cls.__mro__):
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            if not name.startswith("__"):
                found.append(name)
    return tuple(dict.fromkeys(found))


def _split_dataclass(value: Any) -> SplitObject:
    """The fields, then what the instance holds beside them."""
    cls = type(value)
    fields = [field.name for field in dataclasses.fields(cls)]
    names = [name for name in fields if hasattr(value, name)]
    held = getattr(value, "__dict__", {})
    slots = (name for name in slots_of(cls) if hasattr(value, name))
    beside = [name for name in dict.fromkeys((*held, *slots)) if name not in fields]
    beside = [name for name in beside if name != "__orig_class__"]  # typing's note of a generic
    if not all(type(name) is str for name in beside):
        raise InvalidInput(
            f"a {class_name(cls)} has attributes whose names are no strings: {beside!r:.80}"
        )
    children = [getattr(value, name) for name in names]
    children += [_own_attribute(value, name) for name in beside]
    attrs: tuple[tuple[str, Any], ...] = (("class", class_name(cls)),)
    if beside:
        attrs += (("beside", attribute(beside, "a list of names")),)
    return SplitObject("dataclass", children, [*names, *beside], attrs)


def _is_builtin(cls: type) -> bool:
    """Whether instances have content beside their attributes, as a dict's: fields are not all."""
    bases = (base for base in cls.__mro__ if base is not object)
    return any(isinstance(vars(base).get("__new__"), BuiltinMethodType) for base in bases)


def join(
    node: Node,
    children: Sequence[Any],
    classes: Classes,
    target: Any = None,
    *,
    clears: bool = True,
) -> Any:
    """Build the object that `node` describes: `target`, filled, where that is of its type and can
    be changed. Raises `Corrupt` for a node that `split` cannot make."""
    known = _type(node.type)
    try:
        keys = [values.decode_key(key, classes) for key in node.keys or ()]
        attrs = {
            name: values.decode_value(value, classes)
            for name, value in node.attrs
            if name != ATTRIBUTES
        }
        joint = Joint(children, keys, attrs, classes, clears)
        made = target if known.takes(target, joint) else known.make(joint)
        if known.fill:
            known.fill(made, joint)
        return made
    except CkptStoreError:
        raise
    except values.MALFORMED as error:
        raise Corrupt(
            f"a container of type {node.type[:40]!r} cannot be put together: {error}; run "
            "`ckptstore fsck`"
        ) from error


def set_attributes(node: Node, made: Any, classes: Classes) -> None:
    """Give `made`, the object of `node`, what was held beside the content."""
    encoded = next((value for name, value in node.attrs if name == ATTRIBUTES), None)
    if encoded is None:
        return
    found = values.decode_value(encoded, classes)
    held = getattr(made, "__dict__", None)
    if type(found) is not dict or not all(type(name) is str for name in found) or held is None:
        raise Corrupt(
            f"a {node.type[:40]!r} cannot have the attributes {found!r:.80}; run `ckptstore fsck`"
        )
    held.update(found)


def is_wrapper(name: str) -> bool:
    """Whether nodes of this type have one child, under the node's own path."""
    return _type(name).form == "wrapper"


def copies(name: str) -> bool:
    """Whether `join` copies the memory of its children; then tied objects must be one object."""
    return _type(name).copies


def is_mapping(name: str) -> bool:
    """Whether nodes of this type hold independent values by key."""
    return _type(name).form == "mapping"


def is_divisible(name: str) -> bool:
    """Whether children can be selected one by one. Those of a tensor, array or value cannot."""
    return is_mapping(name) or name in _DIVISIBLE


def check(node: Node | int) -> None:
    """Raise `Corrupt` for a skeleton with containers that `split` cannot make."""
    for each in nodes_of(node):
        if each is LEFT_OUT:
            continue
        form = _type(each.type).form
        if not _has_form(each, form):
            raise Corrupt(
                f"the {len(each.children)} children of a {each.type!r} do not make a {form}; run "
                "`ckptstore fsck`"
            )


def _has_form(node: Node, form: Form) -> bool:
    match form:
        case "wrapper":
            return node.keys is None and len(node.children) == 1
        case "sequence":
            return node.keys is None
        case "mapping":
            return node.keys is not None
        case "record":
            return node.keys is not None and all(type(key) is str for key in node.keys)


def check_known(node: Node, classes: Classes) -> None:
    """Raise `InvalidInput` for a class or a codec of `node` that is not known here, as `join`
    does."""
    for name, encoded in node.attrs:
        if name == "class" and type(encoded) is str:
            class_named(encoded, classes)
        elif name == "name" and node.type == "registered" and type(encoded) is str:
            registered_name(encoded)


def attribute(value: Any, what: str) -> Any:
    """An attribute as JSON. Raises `InvalidInput`, naming `what`, unless it is a plain value."""
    encoded = values.encode_attribute(value)
    if encoded is values.NOT_A_VALUE:
        raise InvalidInput(
            f"{what} is {value!r:.80}, not a plain value; register the object with "
            "ckptstore.register_value"
        )
    return encoded


def _type(name: str) -> NodeType:
    if name not in _TYPES:
        raise Corrupt(
            f"unknown container type {name[:40]!r}; written by a newer ckptstore, or damaged: run "
            "`ckptstore fsck`"
        )
    return _TYPES[name]


def _split_mapping(value: Any) -> SplitObject:
    keys = [key if type(key) is str and key.isascii() else values.encode_key(key) for key in value]
    return SplitObject(type(value).__name__, list(value.values()), keys)


def _split_ordered(value: OrderedDict[Any, Any]) -> SplitObject:
    metadata = getattr(value, "_metadata", None)
    attrs = (
        () if metadata is None else (("metadata", attribute(metadata, "state_dict()._metadata")),)
    )
    return _split_mapping(value)._replace(attrs=attrs)


def _make_ordered(joint: Joint) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    if "metadata" in joint.attrs:
        metadata = joint.attrs["metadata"]
        if not isinstance(metadata, dict) or not all(
            isinstance(entry, dict) for entry in metadata.values()
        ):
            raise ValueError(f"metadata is {metadata!r:.80}")
        made._metadata = metadata  # type: ignore[attr-defined]  # as nn.Module.state_dict does
    return made


def _fill_ordered(target: dict[Any, Any], joint: Joint) -> None:
    _fill_mapping(target, joint)
    if joint.clears and type(target) is OrderedDict:
        vars(target).update(vars(_make_ordered(joint)))


def _split_named(value: Named) -> SplitObject:
    return _split_mapping(value)._replace(type=PARAMETERS)


def _split_names(value: Names) -> SplitObject:
    return SplitObject(NAMES, [], attrs=(("names", attribute(list(value), "a list of names")),))


def _split_defaultdict(value: defaultdict[Any, Any]) -> SplitObject:
    factory = value.default_factory
    if factory is not None and not isinstance(factory, type):
        raise InvalidInput(
            f"a defaultdict with the factory {factory!r} cannot be stored, since code is not; use "
            "a class as factory"
        )
    known = factory is not None and _FACTORIES.get(factory.__name__) is factory
    name = None if factory is None else factory.__name__ if known else class_name(factory)
    return _split_mapping(value)._replace(attrs=(("factory", name),))


def _make_defaultdict(joint: Joint) -> defaultdict[Any, Any]:
    name = joint.attrs["factory"]
    factory = None if name is None else _FACTORIES.get(name) or class_named(name, joint.classes)
    return defaultdict(factory)


def _split_deque(value: deque[Any]) -> SplitObject:
    return SplitObject("deque", list(value), attrs=(("maxlen", value.maxlen),))


def _join_namedtuple(joint: Joint) -> Any:
    cls: Any = class_named(joint.attrs["class"], joint.classes)
    if not issubclass(cls, tuple) or list(getattr(cls, "_fields", ())) != list(joint.keys):
        fields = ", ".join(joint.keys)
        raise InvalidInput(
            f"{class_name(cls)} is no namedtuple of the fields {fields}; restore with the "
            "code that wrote it"
        )
    return cls._make(joint.children)


def _make_dataclass(joint: Joint) -> Any:
    """An instance, built without running the class's code."""
    cls = class_named(joint.attrs["class"], joint.classes)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    beside = joint.attrs.get("beside", [])
    unknown = set(joint.keys).difference((field.name for field in fields), beside)
    if unknown:
        raise InvalidInput(
            f"{class_name(cls)} is no dataclass with the fields {', '.join(sorted(unknown))}; "
            "restore with the code that wrote it"
        )
    return object.__new__(cls)


def _fill_dataclass(target: Any, joint: Joint) -> None:
    cls, held = type(target), getattr(target, "__dict__", {})
    beside = {*joint.attrs.get("beside", ())}.difference(slots_of(cls))
    beside.difference_update(field.name for field in dataclasses.fields(cls))
    if beside and not cls.__dictoffset__:
        raise InvalidInput(
            f"a {class_name(cls)} cannot have the attributes {', '.join(sorted(beside))}; restore "
            "with the code that wrote it"
        )
    for name in list(held) if joint.clears else ():
        # It was computed from fields that change now.
        if isinstance(getattr_static(cls, name, None), cached_property) and name not in joint.keys:
            del held[name]
    for name, value in joint.items():
        if name in beside:
            held[name] = value
        else:
            object.__setattr__(target, name, value)


def _takes_dataclass(target: Any, joint: Joint) -> bool:
    cls = type(target)
    return class_name(cls) == joint.attrs["class"] and not cls.__dataclass_params__.frozen


def _fill_deque(target: deque[Any], joint: Joint) -> None:
    target.clear()
    target.extend(joint.children)


def _split_bytesio(value: io.BytesIO) -> SplitObject:
    return SplitObject("BytesIO", [value.getvalue()], attrs=(("position", value.tell()),))


def _fill_bytesio(target: io.BytesIO, joint: Joint) -> None:
    target.seek(0)
    target.truncate()
    target.write(joint.children[0])
    target.seek(joint.attrs["position"])


def _fill_mapping(target: dict[Any, Any], joint: Joint) -> None:
    if joint.clears:
        target.clear()
    for key, child in joint.items():
        target[key] = child


def _only_child(joint: Joint) -> Any:
    return joint.children[0]


def _add_containers() -> None:
    for cls in (dict, Counter):
        add_container(cls, _split_mapping)
    add_container(OrderedDict, _split_ordered, held_otherwise=["_metadata"])
    add_container(defaultdict, _split_defaultdict)
    add_container(Named, _split_named)
    add_container(Names, _split_names)
    add_container(tuple, lambda value: SplitObject("tuple", value))
    makers: dict[str, Callable[[Joint], dict[Any, Any]]] = {
        "Counter": lambda joint: Counter(),
        "OrderedDict": _make_ordered,
        "defaultdict": _make_defaultdict,
        **dict.fromkeys(("dict", "ranks", PARAMETERS), lambda joint: {}),
    }
    for name, make in makers.items():
        fill = _fill_ordered if name == "OrderedDict" else _fill_mapping
        _TYPES[name] = NodeType(
            "mapping", make, fill, lambda target, joint: isinstance(target, dict)
        )
    add_node_type(NAMES, "sequence", lambda joint: list(joint.attrs["names"]))
    add_filled(
        list,
        lambda value: SplitObject("list", value),
        "list",
        "sequence",
        lambda joint: [],
        lambda target, joint: target.__setitem__(slice(None), joint.children),
    )
    add_node_type("tuple", "sequence", lambda joint: tuple(joint.children))
    add_node_type("namedtuple", "record", _join_namedtuple)
    _TYPES["dataclass"] = NodeType("record", _make_dataclass, _fill_dataclass, _takes_dataclass)
    add_filled(
        deque,
        _split_deque,
        "deque",
        "sequence",
        lambda joint: deque(maxlen=joint.attrs["maxlen"]),
        _fill_deque,
        lambda target, joint: target.maxlen == joint.attrs["maxlen"],
    )


def _add_wrappers() -> None:
    # Copied: a view would prevent its owner from resizing it during the commit.
    add_filled(
        bytearray,
        lambda value: SplitObject("bytearray", [bytes(value)]),
        "bytearray",
        "wrapper",
        lambda joint: bytearray(),
        lambda target, joint: target.__setitem__(slice(None), joint.children[0]),
    )
    add_filled(
        random.Random,
        lambda value: SplitObject("Random", [value.getstate()]),
        "Random",
        "wrapper",
        lambda joint: random.Random(),
        lambda target, joint: target.setstate(joint.children[0]),
        held_otherwise=["gauss_next"],
    )
    add_filled(
        io.BytesIO,
        _split_bytesio,
        "BytesIO",
        "wrapper",
        lambda joint: io.BytesIO(),
        _fill_bytesio,
        lambda target, joint: not target.closed,
    )
    # `inflate` decides whether the bytes of a pickle may be unpickled.
    for name in ("stateful", "pickle"):
        add_node_type(name, "wrapper", _only_child)
    add_node_type(
        "registered",
        "wrapper",
        lambda joint: registered_name(joint.attrs["name"]).object_of(joint.children[0]),
    )


_add_containers()
_add_wrappers()
