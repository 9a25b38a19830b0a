"""Which types and classes of the caller's may documents name? Registered ones, and those of a
restore's target. Documents only name classes: none is imported.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

import torch

from ckptstore.errors import InvalidInput
from ckptstore.state.stateful import state_of

Classes: TypeAlias = Callable[[str], type | None]
"""Classes by name that decoding may use besides the registered ones."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True, slots=True)
class Registered:
    """A type of the caller's: `encode` turns it into something that can be stored, `decode`
    back."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


STORED_AS_THEY_ARE: set[type] = set()
"""Types that need no codec of the caller's (`values.add_codec`)."""

_REGISTERED: dict[type, Registered] = {}
_REGISTERED_NAMES: dict[str, Registered] = {}
_CLASSES: dict[str, type] = {}
_CLASS_NAMES: dict[type, str] = {}


def register_value(
    name: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Store every `cls` as what `encode` makes of it, under `name`; `decode` makes the object
    again.

    `encode` may return anything that can be stored, tensors and dicts included. `name` is what
    documents hold: keep it when the class moves. Raises `InvalidInput` if `name` or `cls` is taken
    by another.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} cannot name a codec: wanted letters, digits and _ . : -, beginning with a "
            "letter or _"
        )
    if cls in STORED_AS_THEY_ARE:
        raise InvalidInput(f"{class_name(cls)} is stored as it is; register a class of your own")
    for known in (_REGISTERED.get(cls), _REGISTERED_NAMES.get(name)):
        if known and (known.name, known.cls) != (name, cls):
            raise InvalidInput(
                f"codec {name!r} for {class_name(cls)}: {known.name!r} already stands for "
                f"{class_name(known.cls)}"
            )
    _REGISTERED[cls] = _REGISTERED_NAMES[name] = Registered(name, cls, encode, decode)


def register_class(cls: type, name: str | None = None) -> type:
    """Let documents refer to `cls`, an Enum, a namedtuple, a dataclass or a tensor subclass, by
    `name` (else by module and qualified name).

    Restoring into a target that holds an object of the class needs no registration. Returns `cls`,
    so it can decorate.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if _CLASSES.get(name, cls) is not cls:
        raise InvalidInput(
            f"class name {name!r} already stands for {_CLASSES[name]!r}; choose another"
        )
    _CLASSES[name], _CLASS_NAMES[cls] = cls, name
    return cls


def registered(cls: type) -> Registered | None:
    """The caller's codec for `cls`."""
    return _REGISTERED.get(cls)


def registered_name(name: str) -> Registered:
    """The caller's codec called `name`; `InvalidInput` if it is not registered here."""
    if name not in _REGISTERED_NAMES:
        raise InvalidInput(
            f"stored with the codec {name!r}, which is not registered here; call "
            "ckptstore.register_value first"
        )
    return _REGISTERED_NAMES[name]


def class_name(cls: type) -> str:
    """The name under which documents hold `cls`."""
    return _CLASS_NAMES.get(cls) or f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: str, classes: Classes) -> type:
    """The class that a document calls `name`: registered, or present in the target. It is never
    imported."""
    found = _CLASSES.get(name) or classes(name)
    if found is None:
        raise InvalidInput(
            f"the class {name} is neither registered nor in the target, and ckptstore imports no "
            "class that a document names; "
            f"call ckptstore.register_class on it, or restore into a target that holds one"
        )
    return found


def no_classes(name: str) -> None:
    """No class besides the registered ones."""


def classes_in(target: Any) -> Classes:
    """The classes of the objects in `target`; looked for when the first is asked for."""
    found = cache(lambda: {class_name(cls): cls for cls in _classes_in(target, set())})
    return lambda name: found().get(name)


def _classes_in(value: Any, seen: set[int]) -> Iterator[type]:
    if id(value) in seen:
        return
    seen.add(id(value))
    cls = type(value)
    if isinstance(value, Enum | torch.Tensor) or is_dataclass(cls) or hasattr(cls, "_fields"):
        yield cls
    value = state_of(value)
    below: Any = ()
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        if isinstance(factory, type):
            yield factory
        below = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        below = value
    elif is_dataclass(type(value)):
        below = [getattr(value, field.name, None) for field in fields(value)]
    for child in below:
        yield from _classes_in(child, seen)
