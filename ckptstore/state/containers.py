"""Which objects are containers, and how are they split and joined? The registry of node types.

`split` takes an object apart into children and attributes, `join` makes an equal object of the same
type from them (docs/values.md). Flattening, inflating and restoring all use this definition.
"""

import dataclasses
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptstore.core.model import Node
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.state import values
from ckptstore.state.values import Classes

_SCALARS = (int, float, complex, str, bool, bytes)
_COLLECTIONS = (dict, list, set, tuple, frozenset, deque, OrderedDict, Counter, defaultdict)
_FACTORIES: dict[str, Any] = {cls.__name__: cls for cls in (*_SCALARS, *_COLLECTIONS)}
PARAMETERS, NAMES = "parameters", "names"
"""Node types of an optimizer's state: values by parameter name, and ordered names (not a leaf)."""

MAPPINGS = ("dict", "OrderedDict", "defaultdict", "Counter", PARAMETERS)
"""Node types whose objects are dicts."""

_DIVISIBLE = ("list", "tuple", "deque", "namedtuple", "dataclass", "stateful")

LEFT_OUT = Node("left out", ())
"""Stands, by identity, for unselected nodes of a narrowed skeleton; never stored."""

_FACTORY_NAMES: dict[Any, str] = {factory: name for name, factory in _FACTORIES.items()}


@runtime_checkable
class Stateful(Protocol):
    """An object whose state `state_dict` returns and `load_state_dict` sets."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


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
    """The input of `join`: children in order, keys and attributes decoded."""

    children: Sequence[Any]
    keys: Sequence[Any]
    attrs: dict[str, Any]
    classes: Classes

    def items(self) -> list[tuple[Any, Any]]:
        return list(zip(self.keys, self.children, strict=True))


Form: TypeAlias = Literal["wrapper", "sequence", "mapping", "record"]
"""A node's children: one at the node's path, items, values by key, or values by string name."""

Split: TypeAlias = Callable[[Any], Parts]
Join: TypeAlias = Callable[[Joint], Any]
Refill: TypeAlias = Callable[[Any, Joint], bool]

_SPLITS: dict[type, Split] = {}
_JOINS: dict[str, Join] = {}
_REFILLS: dict[str, Refill] = {}
_FORMS: dict[str, Form] = {}
_COPYING: set[str] = set()
_PROVIDERS = {"torch": "ckptstore.state.tensor_subclasses", "numpy": "ckptstore.state.numpy_values"}


def add_container(cls: type, split: Split) -> None:
    """Register a class; `split` handles its instances, not those of subclasses."""
    _SPLITS[cls] = split


def add_node_type(
    name: str, form: Form, join: Join, refill: Refill | None = None, *, copies: bool = False
) -> None:
    """Register a node type. `refill` updates a target in place, or returns False for another type.
    With `copies`, `join` returns an object that shares no memory with its children."""
    _FORMS[name], _JOINS[name] = form, join
    if refill:
        _REFILLS[name] = refill
    if copies:
        _COPYING.add(name)


def split(value: Any) -> Parts | None:
    """Split `value`, or return None if it is no container. Raises `InvalidInput` if unsupported."""
    cls = type(value)
    if cls in _SPLITS:
        return _SPLITS[cls](value)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return Parts(
            "namedtuple", list(value), list(cls._fields), (("class", values.class_name(cls)),)
        )
    if is_stateful(value):
        return Parts("stateful", [value.state_dict()])
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if hasattr(value, field.name)]
        return Parts(
            "dataclass",
            [getattr(value, name) for name in names],
            names,
            (("class", values.class_name(cls)),),
        )
    return None


def join(node: Node, children: Sequence[Any], classes: Classes) -> Any:
    """Build the object that `node` describes. Raises `Corrupt` for a node that `split` cannot
    make."""
    return _call(_join_of(node.type), node, children, classes)


def refill(target: Any, node: Node, children: Sequence[Any], classes: Classes) -> bool:
    """Update `target` to equal the result of `join`; False if its type differs or cannot be
    updated."""
    known = _REFILLS.get(node.type)
    return known is not None and bool(
        _call(lambda joint: known(target, joint), node, children, classes)
    )


def is_wrapper(name: str) -> bool:
    """Whether nodes of this type have one child, under the node's own path."""
    _join_of(name)
    return _FORMS[name] == "wrapper"


def copies(name: str) -> bool:
    """Whether `join` copies the memory of its children; then tied objects must be one object."""
    return name in _COPYING


def is_mapping(name: str) -> bool:
    """Whether nodes of this type hold independent values by key."""
    _join_of(name)
    return _FORMS[name] == "mapping"


def is_divisible(name: str) -> bool:
    """Whether children can be selected one by one. Those of a tensor, array or value cannot."""
    return is_mapping(name) or name in _DIVISIBLE


def check(node: Node | int) -> None:
    """Raise `Corrupt` for a skeleton with containers that `split` cannot make."""
    if isinstance(node, int) or node is LEFT_OUT:
        return
    _join_of(node.type)
    form = _FORMS[node.type]
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


def leaves_of(node: Node | int) -> Iterator[int]:
    """The numbers of the leaves below `node`."""
    if isinstance(node, int):
        yield node
    else:
        for child in node.children:
            yield from leaves_of(child)


def is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


def attribute(value: Any, what: str) -> Any:
    """An attribute as JSON. Raises `InvalidInput`, naming `what`, unless it is a plain value."""
    encoded = values.encode_attribute(value)
    if encoded is values.NOT_A_VALUE:
        raise InvalidInput(
            f"{what} is {value!r:.80}, not a plain value; register the object with "
            "ckptstore.register_value"
        )
    return encoded


def _call(function: Join, node: Node, children: Sequence[Any], classes: Classes) -> Any:
    try:
        keys = [values.decode_value(key, classes) for key in node.keys or ()]
        attrs = {name: values.decode_value(value, classes) for name, value in node.attrs}
        return function(Joint(children, keys, attrs, classes))
    except CkptStoreError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise Corrupt(
            f"a container of type {node.type[:40]!r} cannot be put together: {error}; run "
            "`ckptstore fsck`"
        ) from error


def _join_of(name: str) -> Join:
    root = name.partition(".")[0]
    if name not in _JOINS and root in _PROVIDERS:
        import_module(_PROVIDERS[root])
    if name not in _JOINS:
        raise Corrupt(
            f"unknown container type {name[:40]!r}; written by a newer ckptstore, or damaged: run "
            "`ckptstore fsck`"
        )
    return _JOINS[name]


def _split_mapping(value: Any) -> Parts:
    keys = [key if type(key) is str and key.isascii() else values.encode_key(key) for key in value]
    return Parts(type(value).__name__, list(value.values()), keys)


def _split_ordered(value: OrderedDict[Any, Any]) -> Parts:
    metadata = getattr(value, "_metadata", None)
    attrs = (
        () if metadata is None else (("metadata", attribute(metadata, "state_dict()._metadata")),)
    )
    return _split_mapping(value)._replace(attrs=attrs)


def _join_ordered(joint: Joint) -> OrderedDict[Any, Any]:
    joined: OrderedDict[Any, Any] = OrderedDict(joint.items())
    if "metadata" in joint.attrs:
        metadata = joint.attrs["metadata"]
        if not isinstance(metadata, dict) or not all(
            isinstance(entry, dict) for entry in metadata.values()
        ):
            raise ValueError(f"metadata is {metadata!r:.80}")
        joined._metadata = metadata  # type: ignore[attr-defined]  # as nn.Module.state_dict does
    return joined


def _split_named(value: Named) -> Parts:
    return _split_mapping(value)._replace(type=PARAMETERS)


def _split_names(value: Names) -> Parts:
    return Parts(NAMES, [], attrs=(("names", attribute(list(value), "a list of names")),))


def _split_defaultdict(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    if factory is None:
        name = None
    elif factory in _FACTORY_NAMES:
        name = _FACTORY_NAMES[factory]
    elif isinstance(factory, type):
        name = values.class_name(factory)
    else:
        raise InvalidInput(
            f"a defaultdict with the factory {factory!r} cannot be stored, since code is not; use "
            "a class as factory"
        )
    return _split_mapping(value)._replace(attrs=(("factory", name),))


def _join_defaultdict(joint: Joint) -> defaultdict[Any, Any]:
    name = joint.attrs["factory"]
    factory = (
        None if name is None else _FACTORIES.get(name) or values.class_named(name, joint.classes)
    )
    return defaultdict(factory, joint.items())


def _split_deque(value: deque[Any]) -> Parts:
    return Parts("deque", list(value), attrs=(("maxlen", value.maxlen),))


def _join_namedtuple(joint: Joint) -> Any:
    cls: Any = values.class_named(joint.attrs["class"], joint.classes)
    if not issubclass(cls, tuple) or list(getattr(cls, "_fields", ())) != list(joint.keys):
        fields = ", ".join(joint.keys)
        raise InvalidInput(
            f"{values.class_name(cls)} is no namedtuple of the fields {fields}; restore with the "
            "code that wrote it"
        )
    return cls._make(joint.children)


def _join_dataclass(joint: Joint) -> Any:
    """An instance, built without running the class's code."""
    cls = values.class_named(joint.attrs["class"], joint.classes)
    fields = (
        {field.name for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else set()
    )
    if unknown := set(joint.keys) - fields:
        names = ", ".join(sorted(unknown))
        raise InvalidInput(
            f"{values.class_name(cls)} is no dataclass with the fields {names}; restore with the "
            "code that wrote it"
        )
    made: Any = object.__new__(cls)
    for name, value in joint.items():
        object.__setattr__(made, name, value)
    return made


def _refill_dataclass(target: Any, joint: Joint) -> bool:
    cls = type(target)
    if values.class_name(cls) != joint.attrs["class"] or cls.__dataclass_params__.frozen:
        return False
    for name, value in joint.items():
        object.__setattr__(target, name, value)
    return True


def _refill_deque(target: Any, joint: Joint) -> bool:
    if type(target) is not deque or target.maxlen != joint.attrs["maxlen"]:
        return False
    target.clear()
    target.extend(joint.children)
    return True


def _refill_bytearray(target: Any, joint: Joint) -> bool:
    if type(target) is not bytearray:
        return False
    target[:] = joint.children[0]
    return True


def _split_bytearray(value: bytearray) -> Parts:
    # Copied: a view would prevent its owner from resizing it during the commit.
    return Parts("bytearray", [bytes(value)])


def _split_bytesio(value: io.BytesIO) -> Parts:
    return Parts("BytesIO", [value.getvalue()], attrs=(("position", value.tell()),))


def _join_bytesio(joint: Joint) -> io.BytesIO:
    made = io.BytesIO(joint.children[0])
    made.seek(joint.attrs["position"])
    return made


def _join_random(joint: Joint) -> random.Random:
    made = random.Random()
    made.setstate(joint.children[0])
    return made


def _refill_random(target: Any, joint: Joint) -> bool:
    if type(target) is not random.Random:
        return False
    target.setstate(joint.children[0])
    return True


def _add_containers() -> None:
    for cls in (dict, Counter):
        add_container(cls, _split_mapping)
    add_container(OrderedDict, _split_ordered)
    add_container(defaultdict, _split_defaultdict)
    add_container(Named, _split_named)
    add_container(Names, _split_names)
    for sequence in (list, tuple):
        add_container(sequence, lambda value: Parts(type(value).__name__, value))
    add_container(deque, _split_deque)
    add_node_type("dict", "mapping", lambda joint: dict(joint.items()))
    add_node_type("Counter", "mapping", lambda joint: Counter(dict(joint.items())))
    add_node_type("OrderedDict", "mapping", _join_ordered)
    add_node_type("defaultdict", "mapping", _join_defaultdict)
    add_node_type("ranks", "mapping", lambda joint: dict(joint.items()))
    add_node_type(PARAMETERS, "mapping", lambda joint: dict(joint.items()))
    add_node_type(NAMES, "sequence", lambda joint: list(joint.attrs["names"]))
    add_node_type("list", "sequence", lambda joint: list(joint.children))
    add_node_type("tuple", "sequence", lambda joint: tuple(joint.children))
    add_node_type(
        "deque",
        "sequence",
        lambda joint: deque(joint.children, joint.attrs["maxlen"]),
        _refill_deque,
    )
    add_node_type("namedtuple", "record", _join_namedtuple)
    add_node_type("dataclass", "record", _join_dataclass, _refill_dataclass)


def _add_wrappers() -> None:
    add_container(bytearray, _split_bytearray)
    add_container(io.BytesIO, _split_bytesio)
    add_container(random.Random, lambda value: Parts("Random", [value.getstate()]))
    add_node_type(
        "bytearray", "wrapper", lambda joint: bytearray(joint.children[0]), _refill_bytearray
    )
    add_node_type("BytesIO", "wrapper", _join_bytesio)
    add_node_type("Random", "wrapper", _join_random, _refill_random)
    add_node_type("stateful", "wrapper", lambda joint: joint.children[0])
    add_node_type(
        "registered",
        "wrapper",
        lambda joint: values.registered_name(joint.attrs["name"]).decode(joint.children[0]),
    )
    # `inflate` decides whether the bytes may be unpickled.
    add_node_type("pickle", "wrapper", lambda joint: joint.children[0])


_add_containers()
_add_wrappers()
