"""Which Python values are stored as JSON, and how? A closed registry, open to the caller's types by
name (docs/values.md).

`encode_value` gives the canonical form of docs/format.md §6.1; `decode_value` returns an equal
value of the same type. Neither imports what a document names: a class comes from the registry or
from the target of a restore.
"""

import datetime as dt
import re
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise, repeat
from json.encoder import encode_basestring
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

import torch

from ckptstore.core.model import INLINE_BYTES
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.canonical import bits_float, float_bits
from ckptstore.state import number_sets, tensors
from ckptstore.state.stateful import (
    STORED_AS_THEY_ARE,
    Classes,
    class_name,
    class_named,
    no_classes,
    register_class,
    register_value,
    registered,
    registered_name,
)

__all__ = ["register_class", "register_value"]
"""For callers, who get them with all types that are stored as they are."""

NOT_A_VALUE: Final = object()
"""What `encode_value` returns for something that holds more than values, or is none."""

MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What decoding raises for JSON that is no encoding."""

_LARGEST = 2**53
_NESTING = 16
_MANY = 32
"""Floats of a sequence from which on they are one string, and rows that make a table."""
_BLOCKS = 128, 16
"""Rows of a table that are coded together: first as many as fill whole blocks of the first size,
then of the next. So rows that are appended change the last blocks, which are short."""
_SET = 1024
"""Integers of a set from which on they have places of their own."""
_PLAIN_TAGS = frozenset(
    ("float", "complex", "bytes", "list", "tuple", "set", "frozenset", "dict", "numpy.scalar")
)
"""What needs no class to be read."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Room(NamedTuple):
    """How much deeper lists may nest, whether mappings are values too (in attributes they are, in
    leaves they are containers), and whether only `_PLAIN_TAGS` may occur, in blocks."""

    depth: int
    mappings: bool
    plain: bool = False

    @property
    def below(self) -> "_Room":
        return self._replace(depth=self.depth - 1)


_Encode: TypeAlias = Callable[[Any, _Room], Iterable[Any] | None]
_Decode: TypeAlias = Callable[[list[Any], Classes], Any]

_ENCODERS: dict[type, tuple[str, _Encode]] = {}
"""The tag of each type, and what gives a value's payload, or None if this one is no value."""
_DECODERS: dict[str, _Decode] = {}


def encode_value(value: Any) -> Any:
    """The JSON of `value`, or `NOT_A_VALUE`. A list or tuple is a value if everything in it is.
    `InvalidInput` for a lone surrogate."""
    return _encode(value, _Room(_NESTING, mappings=False))


def encode_attribute(value: Any) -> Any:
    """As `encode_value`, but dicts are values too; for what a container needs beside its
    children."""
    return _encode(value, _Room(_NESTING, mappings=True))


def encode_plain(value: list[Any] | dict[Any, Any]) -> Any:
    """The JSON of a list or dict of plain values: numbers, strings, bytes, booleans, None, and
    collections of these. No class has to be known to read it. `NOT_A_VALUE` for any other, and for
    one whose parts could not be told by their paths."""
    try:
        return _encode(value, _Room(_NESTING, mappings=True, plain=True))
    except InvalidInput:  # the caller goes through the parts, and names the one that is refused
        return NOT_A_VALUE


def decode_value(encoded: Any, classes: Classes = no_classes) -> Any:
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
    if tag not in _DECODERS:
        raise Corrupt(
            f"unknown tag {tag[:40]!r} in a value; written by a newer ckptstore, or damaged: run "
            "`ckptstore fsck`"
        )
    try:
        return _DECODERS[tag](payload, classes)
    except CkptStoreError:
        raise
    except MALFORMED as error:
        raise Corrupt(
            f"not an encoded {tag}: {str(payload)[:80]} ({error}); run `ckptstore fsck`"
        ) from error


def encode_leaf(encoded: Any) -> bytes:
    """The bytes of a value leaf from the JSON of its value."""
    return canonical.encode(encoded)


def decode_leaf(data: bytes | memoryview, classes: Classes = no_classes) -> Any:
    """The value that a value leaf's bytes hold."""
    return decode_value(canonical.decode(bytes(data)), classes)


def encode_key(key: Any) -> Any:
    """The JSON of a mapping's key; `InvalidInput` if it is no value."""
    if type(key) is str and key.isascii():  # by far the most
        return key
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


def decode_key(encoded: Any, classes: Classes = no_classes) -> Any:
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
    cls: type, tag: str, encode: Callable[[Any], Iterable[Any] | None], decode: Callable[..., Any]
) -> None:
    """Enter a type whose values hold no others: `encode` gives the payload, or None if this one
    cannot be stored so; `decode` takes the payload's items."""
    _add(cls, tag, lambda value, room: encode(value), lambda payload, classes: decode(*payload))


def _add(cls: type, tag: str, encode: _Encode, decode: _Decode) -> None:
    STORED_AS_THEY_ARE.add(cls)
    _ENCODERS[cls], _DECODERS[tag] = (tag, encode), decode


def decimal_digits(value: int) -> str:
    """The decimal digits of any integer."""
    # str(int) is refused beyond 4,300 digits; Decimal is not, and is as exact.
    return str(value) if value.bit_length() < 14_000 else format(Decimal(value), "f")


def decode_digits(digits: str) -> int:
    """The inverse of `decimal_digits`."""
    # Not by Decimal, which takes an exponent too: "1E999999999" would be a billion digits.
    if len(digits) <= 4_000:
        return int(digits)
    if digits.startswith("-"):
        return -decode_digits(digits[1:])
    half = len(digits) // 2
    return decode_digits(digits[:-half]) * int(10**half) + decode_digits(digits[-half:])


def _encode(value: Any, room: _Room) -> Any:
    cls = type(value)
    if plain := _PLAIN.get(cls):
        return plain(value)
    tag, encode = _ENCODERS.get(cls) or _find_encoder(cls)
    if room.plain:
        if tag not in _PLAIN_TAGS:
            return NOT_A_VALUE
        if table := _encode_table(value, room):
            return table
    payload = encode(value, room)
    return NOT_A_VALUE if payload is None else [tag, *payload]


def _find_encoder(cls: type) -> tuple[str, _Encode]:
    if registered(cls):
        return "registered", _encode_registered
    if issubclass(cls, Enum):
        return ("flag", _encode_flag) if issubclass(cls, Flag) else ("enum", _encode_enum)
    return "", lambda value, room: None


def _encode_items(items: Collection[Any], room: _Room) -> list[Any] | None:
    if not room.depth:
        return None
    if _are_json(items):
        return list(items)
    below, encoded = room.below, []
    for item in items:
        json = _encode(item, below)
        if json is NOT_A_VALUE:
            return None
        encoded.append(json)
    return encoded


def _are_json(items: Collection[Any]) -> bool:
    """Whether all items are their own encoding, told in a few passes in C. False is no proof."""
    kinds = set(map(type, items))
    if not kinds <= _PLAIN.keys():
        return False
    numbers = items if kinds == {int} else [item for item in items if type(item) is int]
    if numbers and not -_LARGEST <= min(numbers) <= max(numbers) <= _LARGEST:
        return False
    text = "".join([item for item in items if type(item) is str] if str in kinds else ())
    return text.isascii() or not _SURROGATE.search(text)


def _encode_table(value: Any, room: _Room) -> list[Any] | None:
    """A large dict as keys and values, a list of dicts of the same keys as columns, in blocks;
    None for any other."""
    if type(value) not in (dict, list) or len(value) < _MANY or not room.depth:
        return None
    if type(value) is dict and set(map(type, value)) in ({str}, {int}):
        tag, cut = "items", _keys_and_values
    elif (
        set(map(type, value)) == {dict}
        and set(map(type, chain.from_iterable(value))) == {str}
        and len(set(map(tuple, value))) == 1
    ):
        tag, cut = "records", _columns
    else:
        return None
    blocks: list[Any] = [tag]
    rows = list(value.items() if type(value) is dict else value)
    for begin, end in pairwise(_cuts(len(rows))):
        block = [_encode(part, room.below) for part in cut(rows[begin:end])]
        if NOT_A_VALUE in block:
            return None
        blocks.append(block)
    return blocks


def _cuts(count: int) -> list[int]:
    """Where `count` rows are cut into blocks."""
    cuts = [0]
    for size in _BLOCKS:
        cuts += range(cuts[-1] + size, count + 1, size)
    return cuts if cuts[-1] == count else [*cuts, count]


def _keys_and_values(rows: list[Any]) -> Iterable[list[Any]]:
    return [key for key, _ in rows], [value for _, value in rows]


def _columns(rows: list[Any]) -> Iterable[list[Any]]:
    keys = list(rows[0])
    return keys, *([row[key] for row in rows] for key in keys)


def _decode_items(payload: list[Any], classes: Classes) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    rows = 0
    for block in payload:
        keys, found = (_decoded_list(part, classes) for part in block)
        made.update(zip(keys, found, strict=True))
        rows += len(keys)
    if len(made) != rows:
        raise ValueError("a key occurs twice")
    return made


def _decode_records(payload: list[Any], classes: Classes) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for block in payload:
        keys, *columns = (_decoded_list(part, classes) for part in block)
        if len(set(keys)) != len(keys) or len(keys) != len(columns) or not columns:
            raise ValueError(f"{len(columns)} columns of {len(set(keys))} keys")
        # in C, and of equal lengths, as was compared above
        made += map(dict, map(zip, repeat(keys), zip(*columns, strict=True)))
    return made


def _decoded_list(encoded: Any, classes: Classes) -> list[Any]:
    found = decode_value(encoded, classes)
    if type(found) is not list:
        raise ValueError(f"a {type(found).__name__} in the place of a list")
    return found


def _encode_sequence(value: list[Any] | tuple[Any, ...], room: _Room) -> list[Any] | None:
    """The payload of a list or tuple; of one of many floats their bits in one string."""
    if len(value) < _MANY or set(map(type, value)) != {float} or not room.depth:
        return _encode_items(value, room)
    return [["floats", struct.pack(f">{len(value)}d", *value).hex()]]


def _decode_sequence(
    cls: type[list[Any] | tuple[Any, ...]], payload: list[Any], classes: Classes
) -> Any:
    match payload:
        case [["floats", str(text)]]:
            data = bytes.fromhex(text)
            if data.hex() != text or len(data) % 8:
                raise ValueError("wanted 16 lower-case hex digits for each float")
            return cls(struct.unpack(f">{len(data) // 8}d", data))
    return cls(_decode_all(payload, classes))


def _are_integers(items: Set[Any]) -> bool:
    """Whether JSON has all items as numbers."""
    return set(map(type, items)) == {int} and -_LARGEST <= min(items) <= max(items) <= _LARGEST


def _encode_set(value: Set[Any], room: _Room) -> list[Any] | None:
    if len(value) >= _SET and room.depth and _are_integers(value):
        width, table = number_sets.encode(value)
        return [["table", width, b64encode(table).decode()]]
    items = _encode_items(value, room)
    if not items:
        return items
    match {*map(type, items)}:
        case kinds if kinds == {int}:  # so that a larger one comes last, and the rest stays
            return sorted(items)
        case kinds if kinds == {str}:
            return sorted(items, key=encode_basestring)
    return sorted(items, key=canonical.encode)


def _decode_set(payload: list[Any], classes: Classes) -> Collection[Any]:
    match payload:
        case [["table", int(width), str(text)]]:
            items = number_sets.decode(width, b64decode(text, validate=True))
            if len(found := set(items)) != len(items):
                raise ValueError("an integer occurs twice")
            return found
    return _decode_all(payload, classes)


def _encode_deque(value: deque[Any], room: _Room) -> list[Any] | None:
    items = _encode_items(value, room)
    return None if items is None else [value.maxlen, *items]


def _decode_deque(payload: list[Any], classes: Classes) -> Any:
    maxlen, *items = payload
    return deque(_decode_all(items, classes), maxlen)


def _encode_mapping(value: Mapping[Any, Any], room: _Room) -> list[Any] | None:
    # An attribute of the mapping itself would have no place in its payload.
    is_value = room.mappings and not getattr(value, "__dict__", None)
    if room.plain and set(map(type, value)) not in (set(), {str}, {int}):
        return None  # two keys might have one path
    items = _encode_items([*map(list, value.items())], room) if is_value else None
    return items and [item[1:] for item in items]


def _decode_all(payload: list[Any], classes: Classes) -> list[Any]:
    if set(map(type, payload)) <= _PLAIN.keys():
        return payload
    return [decode_value(item, classes) for item in payload]


def _encode_registered(value: Any, room: _Room) -> list[Any] | None:
    known = registered(type(value))
    assert known is not None
    payload = _encode_items([known.content_of(value)], room)
    return payload and [known.name, *payload]


def _decode_registered(payload: list[Any], classes: Classes) -> Any:
    return registered_name(payload[0]).object_of(decode_value(payload[1], classes))


def _encode_enum(value: Enum, room: _Room) -> list[Any]:
    return [class_name(type(value)), value.name]


def _decode_enum(payload: list[Any], classes: Classes) -> Any:
    name, member = payload
    cls = class_named(name, classes)
    if not issubclass(cls, Enum) or member not in cls.__members__:
        raise InvalidInput(
            f"{name} has no member {member!r} any more; restore with the code that wrote it, or "
            "give it that member"
        )
    return cls[member]


def _encode_flag(value: Flag, room: _Room) -> list[Any]:
    return [class_name(type(value)), _encode_int(value.value)]


def _decode_flag(payload: list[Any], classes: Classes) -> Any:
    return class_named(payload[0], classes)(decode_value(payload[1]))


def _encode_str(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"a string with a lone surrogate cannot be stored: {value[:40]!a}; store "
                "os.fsencode of it"
            ) from error
    return value


def _encode_int(value: int) -> Any:
    return value if -_LARGEST <= value <= _LARGEST else ["int", decimal_digits(value)]


def _encode_bytes(value: bytes) -> list[Any] | None:
    # Large bytes within a list become leaves of their own; base64 would blow them up.
    return None if len(value) > INLINE_BYTES else [b64encode(value).decode()]


def _encode_slice(value: slice) -> list[Any] | None:
    bounds = [value.start, value.stop, value.step]
    plain = all(bound is None or type(bound) is int for bound in bounds)
    return list(map(encode_value, bounds)) if plain else None


def _encode_timezone(zone: dt.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        # the one way to its name as given
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [_span(offset), *name]
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    raise InvalidInput(
        f"the time zone {zone!r} cannot be stored; use datetime.timezone, or zoneinfo.ZoneInfo "
        "with a key"
    )


def _decode_timezone(encoded: Any) -> dt.tzinfo | None:
    if encoded is None:
        return None
    if isinstance(encoded, str):
        return ZoneInfo(encoded)
    offset, *name = encoded
    return dt.timezone(_timedelta(offset), *name)


def _span(delta: dt.timedelta) -> list[int]:
    return [delta.days, delta.seconds, delta.microseconds]


def _timedelta(span: Iterable[int]) -> dt.timedelta:
    days, seconds, microseconds = span
    return dt.timedelta(days, seconds, microseconds)


def _encode_clock(value: dt.datetime | dt.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _encode_timezone(value.tzinfo)]


def _decode_clock(cls: type[dt.datetime | dt.time], text: str, fold: int, zone: Any) -> Any:
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=_decode_timezone(zone))


def _encode_path(value: PurePath) -> list[Any] | None:
    """None where Python reads the text as another path: before 3.12, that of a Windows server
    without a share."""
    return [encode_value(str(value))] if type(value)(str(value)) == value else None


def _decode_path(cls: type[PurePath], text: str) -> PurePath:
    # A PosixPath of a checkpoint opened on Windows becomes that system's own kind of path, since it
    # could not be made.
    return Path(text) if issubclass(cls, Path) else cls(text)


def _named(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise InvalidInput(
            f"this torch ({torch.__version__}) has no {name[:60]!r}; read with the torch that "
            "wrote it or a newer one"
        )
    return known[name]


def _add_set(cls: type) -> None:
    def decode(payload: list[Any], classes: Classes) -> Any:
        return cls(_decode_set(payload, classes))

    _add(cls, cls.__name__, _encode_set, decode)


def _add_mapping(cls: type[dict[Any, Any]]) -> None:
    def decode(payload: list[Any], classes: Classes) -> Any:
        return cls(
            {decode_value(key, classes): decode_value(item, classes) for key, item in payload}
        )

    _add(cls, cls.__name__, _encode_mapping, decode)


def _add_builtins() -> None:
    _DECODERS["none"] = lambda payload, classes: None
    _DECODERS["bool"] = lambda payload, classes: bool(payload[0])
    _DECODERS["int"] = lambda payload, classes: decode_digits(payload[0])
    _DECODERS.update(enum=_decode_enum, flag=_decode_flag, registered=_decode_registered)
    _DECODERS.update(items=_decode_items, records=_decode_records)
    for sequence in (list, tuple):
        _add(sequence, sequence.__name__, _encode_sequence, partial(_decode_sequence, sequence))
    for unordered in (set, frozenset):
        _add_set(unordered)
    for mapping in (dict, OrderedDict, Counter):
        _add_mapping(mapping)
    _add(deque, "deque", _encode_deque, _decode_deque)
    add_codec(float, "float", lambda x: [float_bits(x)], bits_float)
    add_codec(bytes, "bytes", _encode_bytes, partial(b64decode, validate=True))
    add_codec(type(...), "Ellipsis", lambda x: [], lambda: ...)


def _add_standard_library() -> None:
    add_codec(
        complex,
        "complex",
        lambda x: [float_bits(x.real), float_bits(x.imag)],
        lambda real, imag: complex(bits_float(real), bits_float(imag)),
    )
    add_codec(Decimal, "Decimal", lambda x: [str(x)], Decimal)
    add_codec(
        Fraction,
        "Fraction",
        lambda x: [*map(decimal_digits, x.as_integer_ratio())],
        lambda *digits: Fraction(*map(decode_digits, digits)),
    )
    add_codec(
        range,
        "range",
        lambda x: [*map(decimal_digits, (x.start, x.stop, x.step))],
        lambda *digits: range(*map(decode_digits, digits)),
    )
    add_codec(slice, "slice", _encode_slice, lambda *bounds: slice(*map(decode_value, bounds)))
    add_codec(UUID, "UUID", lambda x: [x.hex], UUID)
    add_codec(dt.timedelta, "timedelta", _span, lambda *span: _timedelta(span))
    add_codec(dt.date, "date", lambda x: [x.isoformat()], dt.date.fromisoformat)
    for zone in (dt.timezone, ZoneInfo):
        add_codec(zone, zone.__name__, lambda x: [_encode_timezone(x)], _decode_timezone)
    for clock in (dt.time, dt.datetime):
        add_codec(clock, clock.__name__, _encode_clock, partial(_decode_clock, clock))
    for path in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath):
        add_codec(path, path.__name__, _encode_path, partial(_decode_path, path))


def _add_torch() -> None:
    add_codec(torch.dtype, "torch.dtype", lambda x: [tensors.DTYPE_NAMES[x]], tensors.dtype_of)
    add_codec(torch.device, "torch.device", lambda x: [str(x)], torch.device)
    for cls in (torch.layout, torch.memory_format, torch.qscheme):
        known = {str(each): each for each in vars(torch).values() if isinstance(each, cls)}
        add_codec(cls, f"torch.{cls.__name__}", lambda x: [str(x)], partial(_named, known))
    add_codec(torch.Size, "torch.Size", list, lambda *lengths: torch.Size(lengths))


_PLAIN: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _encode_str,
    int: _encode_int,
}
"""What JSON has."""

STORED_AS_THEY_ARE.update(_PLAIN)
_add_builtins()
_add_standard_library()
_add_torch()
