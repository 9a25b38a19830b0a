"""Which objects are containers, and how are they split and joined? The registry of node types.

`split` takes an object apart into children and attributes, `join` makes an equal object of the same
type from them (docs/values.md). Flattening, inflating and restoring all use this definition.
"""

import dataclasses
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptstore.core.model import Node
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.state import values
from ckptstore.state.stateful import Classes, class_name, class_named, is_stateful, registered_name

_SCALARS = (int, float, complex, str, bool, bytes)
_COLLECTIONS = (dict, list, set, tuple, frozenset, deque, OrderedDict, Counter, defaultdict)
_FACTORIES: dict[str, Any] = {cls.__name__: cls for cls in (*_SCALARS, *_COLLECTIONS)}
PARAMETERS, NAMES = "parameters", "names"
"""Node types of an optimizer's state: values by parameter name, and ordered names (not a leaf)."""

_DIVISIBLE = ("list", "tuple", "deque", "namedtuple", "dataclass", "stateful")

LEFT_OUT = Node("left out", ())
"""Stands, by identity, for unselected nodes of a narrowed skeleton; never stored."""


class Named(dict[Any, Any]):
    """An optimizer's values by parameter name."""


class Names(list[str]):
    """Ordered names. Ranks may each have a part of one such list."""


class Parts(NamedTuple):
    """A split object. With `keys`, which are encoded, it is a mapping."""

    type: str
    children: Sequence[Any]
    keys: Sequence[Any] | None = None
    attrs: tuple[tuple[str, Any], ...] = ()


class Joint(NamedTuple):
    """The input of `join`: children in order, keys and attributes decoded. With `clears`, entries
    that only a target has go."""

    children: Sequence[Any]
    keys: Sequence[Any]
    attrs: dict[str, Any]
    classes: Classes
    clears: bool

    def items(self) -> list[tuple[Any, Any]]:
        return list(zip(self.keys, self.children, strict=True))


Form: TypeAlias = Literal["wrapper", "sequence", "mapping", "record"]
"""A node's children: one at the node's path, items, values by key, or values by string name."""

Split: TypeAlias = Callable[[Any], Parts]


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
_TYPES: dict[str, NodeType] = {}


def add_container(cls: type, split: Split) -> None:
    """Register a class; `split` handles its instances, not those of subclasses."""
    _SPLITS[cls] = split


def add_node_type(
    name: str, form: Form, make: Callable[[Joint], Any], *, copies: bool = False
) -> None:
    """Register a node type whose objects are made anew."""
    _TYPES[name] = NodeType(form, make, copies=copies)


def add_filled(
    cls: type,
    split: Split,
    name: str,
    form: Form,
    make: Callable[[Joint], Any],
    fill: Callable[[Any, Joint], object],
    fits: Callable[[Any, Joint], bool] = lambda target, joint: True,
) -> None:
    """Register a class whose objects are filled in place, those of a target for which `fits`
    holds."""
    add_container(cls, split)
    _TYPES[name] = NodeType(
        form, make, fill, lambda target, joint: type(target) is cls and fits(target, joint)
    )


def split(value: Any) -> Parts | None:
    """Split `value`, or return None if it is no container. Raises `InvalidInput` if unsupported."""
    cls = type(value)
    if cls in _SPLITS:
        return _SPLITS[cls](value)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return Parts("namedtuple", list(value), list(cls._fields), (("class", class_name(cls)),))
    if is_stateful(value):
        return Parts("stateful", [value.state_dict()])
    if dataclasses.is_dataclass(cls) and not _is_builtin(cls):
        names = [field.name for field in dataclasses.fields(cls) if hasattr(value, field.name)]
        return Parts(
            "dataclass",
            [getattr(value, name) for name in names],
            names,
            (("class", class_name(cls)),),
        )
    return None


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
        attrs = {name: values.decode_value(value, classes) for name, value in node.attrs}
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
    if isinstance(node, int) or node is LEFT_OUT:
        return
    form = _type(node.type).form
    fits = {
        "wrapper": node.keys is None and len(node.children) == 1,
        "sequence": node.keys is None,
        "mapping": node.keys is not None,
        "record": node.keys is not None and all(type(key) is str for key in node.keys),
    }
    if not fits[form]:
        raise Corrupt(
            f"the {len(node.children)} children of a {node.type!r} do not make a {form}; run "
            "`ckptstore fsck`"
        )
    for child in node.children:
        check(child)


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
        values.load_codecs()
    if name not in _TYPES:
        raise Corrupt(
            f"unknown container type {name[:40]!r}; written by a newer ckptstore, or damaged: run "
            "`ckptstore fsck`"
        )
    return _TYPES[name]


def _split_mapping(value: Any) -> Parts:
    keys = [key if type(key) is str and key.isascii() else values.encode_key(key) for key in value]
    return Parts(type(value).__name__, list(value.values()), keys)


def _split_ordered(value: OrderedDict[Any, Any]) -> Parts:
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


def _split_named(value: Named) -> Parts:
    return _split_mapping(value)._replace(type=PARAMETERS)


def _split_names(value: Names) -> Parts:
    return Parts(NAMES, [], attrs=(("names", attribute(list(value), "a list of names")),))


def _split_defaultdict(value: defaultdict[Any, Any]) -> Parts:
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


def _split_deque(value: deque[Any]) -> Parts:
    return Parts("deque", list(value), attrs=(("maxlen", value.maxlen),))


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
    if unknown := set(joint.keys) - {field.name for field in fields}:
        raise InvalidInput(
            f"{class_name(cls)} is no dataclass with the fields {', '.join(sorted(unknown))}; "
            "restore with the code that wrote it"
        )
    return object.__new__(cls)


def _fill_dataclass(target: Any, joint: Joint) -> None:
    for name, value in joint.items():
        object.__setattr__(target, name, value)


def _takes_dataclass(target: Any, joint: Joint) -> bool:
    cls = type(target)
    return class_name(cls) == joint.attrs["class"] and not cls.__dataclass_params__.frozen


def _fill_deque(target: deque[Any], joint: Joint) -> None:
    target.clear()
    target.extend(joint.children)


def _split_bytesio(value: io.BytesIO) -> Parts:
    return Parts("BytesIO", [value.getvalue()], attrs=(("position", value.tell()),))


def _join_bytesio(joint: Joint) -> io.BytesIO:
    made = io.BytesIO(joint.children[0])
    made.seek(joint.attrs["position"])
    return made


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
    add_container(OrderedDict, _split_ordered)
    add_container(defaultdict, _split_defaultdict)
    add_container(Named, _split_named)
    add_container(Names, _split_names)
    add_container(tuple, lambda value: Parts("tuple", value))
    makers: dict[str, Callable[[Joint], dict[Any, Any]]] = {
        "Counter": lambda joint: Counter(),
        "OrderedDict": _make_ordered,
        "defaultdict": _make_defaultdict,
        **dict.fromkeys(("dict", "ranks", PARAMETERS), lambda joint: {}),
    }
    for name, make in makers.items():
        _TYPES[name] = NodeType(
            "mapping", make, _fill_mapping, lambda target, joint: isinstance(target, dict)
        )
    add_node_type(NAMES, "sequence", lambda joint: list(joint.attrs["names"]))
    add_filled(
        list,
        lambda value: Parts("list", value),
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
        lambda value: Parts("bytearray", [bytes(value)]),
        "bytearray",
        "wrapper",
        lambda joint: bytearray(),
        lambda target, joint: target.__setitem__(slice(None), joint.children[0]),
    )
    add_filled(
        random.Random,
        lambda value: Parts("Random", [value.getstate()]),
        "Random",
        "wrapper",
        lambda joint: random.Random(),
        lambda target, joint: target.setstate(joint.children[0]),
    )
    add_container(io.BytesIO, _split_bytesio)
    add_node_type("BytesIO", "wrapper", _join_bytesio)
    # `inflate` decides whether the bytes of a pickle may be unpickled.
    for name in ("stateful", "pickle"):
        add_node_type(name, "wrapper", _only_child)
    add_node_type(
        "registered",
        "wrapper",
        lambda joint: registered_name(joint.attrs["name"]).decode(joint.children[0]),
    )


_add_containers()
_add_wrappers()
