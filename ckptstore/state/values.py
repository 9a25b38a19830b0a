"""Which Python values are stored as JSON, and how? A closed registry, open to the caller's types by
name (docs/values.md).

`encode_value` gives the canonical form of docs/format.md §6.1; `decode_value` returns an equal
value of the same type. Neither imports what a document names: a class comes from the registry or
from the target of a restore. No torch here: `standard_values` and `numpy_values` add their types
when such a value or tag first appears.
"""

import re
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, Flag
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ckptstore.core.model import INLINE_BYTES
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.objects import canonical

Classes: TypeAlias = Mapping[str, type]
"""Classes by name that decoding may use besides the registered ones: those of a restore's
target."""

NO_CLASSES: Final[Classes] = MappingProxyType({})

NOT_A_VALUE: Final = object()
"""What `encode_value` returns for something that holds more than values, or is none."""

_LARGEST = 2**53
_NESTING = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")
_PROVIDERS = {"torch": "ckptstore.state.standard_values", "numpy": "ckptstore.state.numpy_values"}
_STANDARD = "ckptstore.state.standard_values"

_Encoder: TypeAlias = Callable[[Any, "_Room"], Any]
_Decoder: TypeAlias = Callable[[list[Any], Classes], Any]


@dataclass(frozen=True, slots=True)
class _Room:
    """How much deeper lists may nest, and whether mappings are values too (in attributes they are,
    in leaves they are containers)."""

    depth: int
    mappings: bool

    def below(self) -> "_Room":
        return _Room(self.depth - 1, self.mappings)


@dataclass(frozen=True, slots=True)
class Registered:
    """A type of the caller's: `encode` turns it into something that can be stored, `decode`
    back."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_ENCODERS: dict[type, _Encoder] = {}
_DECODERS: dict[str, _Decoder] = {}
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
    if cls in _ENCODERS:
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
    found = _CLASSES.get(name) or classes.get(name)
    if found is None:
        raise InvalidInput(
            f"the class {name} is neither registered nor in the target, and ckptstore imports no "
            "class that a document names; "
            f"call ckptstore.register_class on it, or restore into a target that holds one"
        )
    return found


def encode_value(value: Any) -> Any:
    """The JSON of `value`, or `NOT_A_VALUE`. A list or tuple is a value if everything in it is.
    `InvalidInput` for a lone surrogate."""
    return _encode(value, _LEAF_ROOM)


def encode_attribute(value: Any) -> Any:
    """As `encode_value`, but dicts are values too; for what a container needs beside its
    children."""
    return _encode(value, _ATTRIBUTE_ROOM)


def decode_value(encoded: Any, classes: Classes = NO_CLASSES) -> Any:
    """The value that `encode_value` encoded. `Corrupt` if it is no such JSON, `InvalidInput` for a
    codec or class not known here."""
    if encoded is None or isinstance(encoded, str | int):
        return encoded
    if type(encoded) is not list or not encoded or type(encoded[0]) is not str:
        raise Corrupt(
            f"not an encoded value: {str(encoded)[:80]}; wanted [tag, payload…]; run `ckptstore "
            "fsck`"
        )
    tag, *payload = encoded
    decoder = _decoder(tag)
    try:
        return decoder(payload, classes)
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
            f"not an encoded {tag}: {str(payload)[:80]} ({error}); run `ckptstore fsck`"
        ) from error


def encode_leaf(encoded: Any) -> bytes:
    """The bytes of a value leaf from the JSON of its value."""
    return canonical.encode(encoded)


def decode_leaf(data: bytes | memoryview, classes: Classes = NO_CLASSES) -> Any:
    """The value that a value leaf's bytes hold."""
    return decode_value(canonical.decode(bytes(data)), classes)


def encode_key(key: Any) -> Any:
    """The JSON of a mapping's key; `InvalidInput` if it is no value."""
    if key is None:
        return ["none"]
    if type(key) is bool:
        return ["bool", key]
    encoded = encode_value(key)
    if encoded is NOT_A_VALUE:
        raise InvalidInput(
            f"{key!r:.80}, a {class_name(type(key))}, cannot be a key; use a string, a number, an "
            "Enum or a tuple of these"
        )
    return encoded


def decode_key(encoded: Any, classes: Classes = NO_CLASSES) -> Any:
    """The key that `encode_key` encoded."""
    if type(encoded) is str:
        return encoded
    key = decode_value(encoded, classes)
    try:
        hash(key)
    except TypeError as error:
        raise Corrupt(
            f"not an encoded key: {str(encoded)[:80]} ({error}); run `ckptstore fsck`"
        ) from error
    return key


def add_codec(
    cls: type, tag: str, encode: Callable[[Any], list[Any] | None], decode: _Decoder
) -> None:
    """Enter a type whose values hold no others: `encode` gives the payload, or None if this one
    cannot be stored so."""

    def encode_tagged(value: Any, room: _Room) -> Any:
        payload = encode(value)
        return NOT_A_VALUE if payload is None else [tag, *payload]

    _ENCODERS[cls] = encode_tagged
    _DECODERS[tag] = decode


def decode_all(payload: list[Any], classes: Classes) -> Iterable[Any]:
    """Every item of a payload, decoded."""
    return (decode_value(item, classes) for item in payload)


def _encode(value: Any, room: _Room) -> Any:
    cls = type(value)
    encoder = _ENCODERS.get(cls) or _find_encoder(cls)
    return encoder(value, room) if encoder else NOT_A_VALUE


def _find_encoder(cls: type) -> _Encoder | None:
    if cls in _REGISTERED:
        return _encode_registered
    if issubclass(cls, Enum):
        return _encode_enum
    import_module(_PROVIDERS.get(cls.__module__.partition(".")[0], _STANDARD))
    return _ENCODERS.get(cls)


def _decoder(tag: str) -> _Decoder:
    if tag not in _DECODERS:
        import_module(_PROVIDERS.get(tag.partition(".")[0], _STANDARD))
    if tag not in _DECODERS:
        raise Corrupt(
            f"unknown tag {tag[:40]!r} in a value; written by a newer ckptstore, or damaged: run "
            "`ckptstore fsck`"
        )
    return _DECODERS[tag]


def _encode_items(items: Iterable[Any], room: _Room) -> list[Any] | None:
    if not room.depth:
        return None
    below, encoded = room.below(), []
    for item in items:
        json = _encode(item, below)
        if json is NOT_A_VALUE:
            return None
        encoded.append(json)
    return encoded


def _sequence(tag: str) -> _Encoder:
    def encode(value: Any, room: _Room) -> Any:
        items = _encode_items(value, room)
        return NOT_A_VALUE if items is None else [tag, *items]

    return encode


def _unordered(tag: str) -> _Encoder:
    def encode(value: Any, room: _Room) -> Any:
        items = _encode_items(value, room)
        return NOT_A_VALUE if items is None else [tag, *sorted(items, key=canonical.encode)]

    return encode


def _mapping(tag: str) -> _Encoder:
    def encode(value: Any, room: _Room) -> Any:
        items = (
            _encode_items((list(item) for item in value.items()), room) if room.mappings else None
        )
        return NOT_A_VALUE if items is None else [tag, *(item[1:] for item in items)]

    return encode


def _encode_deque(value: deque[Any], room: _Room) -> Any:
    items = _encode_items(value, room)
    return NOT_A_VALUE if items is None else ["deque", value.maxlen, *items]


def _encode_registered(value: Any, room: _Room) -> Any:
    known = _REGISTERED[type(value)]
    payload = _encode_items([known.encode(value)], room)
    return NOT_A_VALUE if payload is None else ["registered", known.name, *payload]


def _encode_enum(value: Enum, room: _Room) -> Any:
    name = class_name(type(value))
    if isinstance(value, Flag):
        return ["flag", name, _encode_int(value.value, room)]
    return ["enum", name, value.name]


def _decode_enum(payload: list[Any], classes: Classes) -> Any:
    name, member = payload
    cls = class_named(name, classes)
    if not issubclass(cls, Enum) or member not in cls.__members__:
        raise InvalidInput(
            f"{name} has no member {member!r} any more; restore with the code that wrote it, or "
            "give it that member"
        )
    return cls[member]


def _encode_str(value: str, room: _Room) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"a string with a lone surrogate cannot be stored: {value[:40]!a}; store "
                "os.fsencode of it"
            ) from error
    return value


def _encode_int(value: int, room: _Room) -> Any:
    return value if -_LARGEST <= value <= _LARGEST else ["int", decimal_digits(value)]


def decimal_digits(value: int) -> str:
    """The decimal digits of any integer."""
    # str(int) is refused beyond 4,300 digits; Decimal is not, and is as exact.
    return str(value) if value.bit_length() < 14_000 else format(Decimal(value), "f")


def decode_digits(digits: str) -> int:
    """The inverse of `decimal_digits`."""
    return int(digits) if len(digits) < 4_000 else int(Decimal(digits))


def _encode_bytes(value: bytes, room: _Room) -> Any:
    # Large bytes within a list become leaves of their own; base64 would blow them up.
    return NOT_A_VALUE if len(value) > INLINE_BYTES else ["bytes", b64encode(value).decode()]


def _add_plain() -> None:
    """The types that JSON has, and those that hold other values."""
    for cls in (type(None), bool):
        _ENCODERS[cls] = lambda value, room: value
    _ENCODERS.update(
        {str: _encode_str, int: _encode_int, bytes: _encode_bytes, deque: _encode_deque}
    )
    _ENCODERS.update(
        {
            list: _sequence("list"),
            tuple: _sequence("tuple"),
            set: _unordered("set"),
            frozenset: _unordered("frozenset"),
        }
    )
    _ENCODERS.update({cls: _mapping(cls.__name__) for cls in (dict, OrderedDict, Counter)})
    add_codec(
        float, "float", lambda x: [canonical.float_bits(x)], lambda p, _: canonical.bits_float(p[0])
    )
    _DECODERS["none"] = lambda payload, classes: None
    _DECODERS["bool"] = lambda payload, classes: bool(payload[0])
    _DECODERS["int"] = lambda payload, classes: decode_digits(payload[0])
    _DECODERS["bytes"] = lambda payload, classes: b64decode(payload[0], validate=True)
    for kind in (list, tuple, set, frozenset):
        _DECODERS[kind.__name__] = lambda payload, classes, kind=kind: kind(
            decode_all(payload, classes)
        )  # type: ignore[misc]
    for mapping in (dict, OrderedDict, Counter):
        _DECODERS[mapping.__name__] = lambda payload, classes, mapping=mapping: mapping(  # type: ignore[misc]
            {decode_value(key, classes): decode_value(item, classes) for key, item in payload}
        )
    _DECODERS["deque"] = lambda payload, classes: deque(
        decode_all(payload[1:], classes), payload[0]
    )
    _DECODERS["enum"] = _decode_enum
    _DECODERS["flag"] = lambda payload, classes: class_named(payload[0], classes)(
        decode_value(payload[1], classes)
    )
    _DECODERS["registered"] = lambda payload, classes: registered_name(payload[0]).decode(
        decode_value(payload[1], classes)
    )


_LEAF_ROOM = _Room(_NESTING, mappings=False)
_ATTRIBUTE_ROOM = _Room(_NESTING, mappings=True)
_add_plain()
