"""How are the values of log entries and commit documents encoded as JSON? One table per document
drives both directions (docs/format.md §7, §8)."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ckptstore.core.ids import parse_chunk_id, parse_commit_id, parse_pack_id, parse_session_id
from ckptstore.core.model import PackRecord
from ckptstore.errors import Corrupt

Setting: TypeAlias = str | int | tuple[str, ...] | None

_LARGEST = 1 << 53
_TIMES = 1 << 63
_ATTEMPT = re.compile(r"[0-9a-f]{32}")


class Field(NamedTuple):
    """The JSON encoding of one value; `decode` raises for values that `encode` cannot have
    written."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def decode_fields(fields: Mapping[str, Field], document: Any, what: str) -> dict[str, Any]:
    """The values of `fields` in `document`. Raises `Corrupt`, naming the field, for one that is
    missing or invalid."""
    found = {}
    for name, field in fields.items():
        try:
            found[name] = field.decode(document[name])
        except (KeyError, TypeError, ValueError, AttributeError, Corrupt) as error:
            raise Corrupt(f"{what}'s {name!r} is damaged: {error}; run `ckptstore fsck`") from error
    return found


def as_it_is(value: Any) -> Any:
    return value


def parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"wanted a string, got {value!r:.80}")
    return value


def parse_integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise TypeError(f"wanted an integer, got {value!r:.80}")
    return value


def parse_count(value: Any) -> int:
    if parse_integer(value) < 0:
        raise ValueError(f"wanted an integer of at least 0, got {value}")
    return int(value)


def parse_items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"wanted an array, got {value!r:.80}")
    return value


def sorted_items(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"wanted an object, got {value!r:.80}")
    return sorted(value.items())


def parse_hash(value: Any) -> str:
    """Parse a BLAKE3-256 in hex. It names a schema, a content or an entry, and has the form of a
    chunk id."""
    return parse_chunk_id(value).hex()


def parse_attempt(value: Any) -> str:
    if not _ATTEMPT.fullmatch(parse_text(value)):
        raise ValueError(f"wanted 32 hex digits, got {value!r:.80}")
    return str(value)


def parse_time(value: Any) -> int:
    """Parse nanoseconds since 1970, within the range of every index: up to the year 2262."""
    number = int(parse_text(value))
    if str(number) != value or not -_TIMES <= number < _TIMES:
        raise ValueError(
            f"wanted a time in nanoseconds as a decimal number of 63 bits, got {value!r:.80}"
        )
    return number


def parse_link(value: Any) -> tuple[str, int]:
    prev_hash, prev_bytes = parse_items(value)
    return parse_hash(prev_hash), parse_count(prev_bytes)


def set_to_json(numbers: frozenset[int]) -> list[Any]:
    """Encode a bitmap without its runs of zero bytes: the size depends on the count of numbers, not
    on their distance.

    Pack numbers grow for the life of the store, and a commit relies on a few old packs and many of
    the newest.
    """
    if not numbers:
        return [0, ""]
    first = min(numbers)
    bits: dict[int, int] = {}
    for number in numbers:
        at = (number - first) >> 3
        bits[at] = bits.get(at, 0) | 1 << ((number - first) & 7)
    coded, end = bytearray(), 0
    for start, bitmap in _stretches(bits):
        coded += _varint(start - end) + _varint(len(bitmap)) + bitmap
        end = start + len(bitmap)
    return [first, base64.b64encode(coded).decode()]


def parse_set(value: Any) -> frozenset[int]:
    """The inverse of `set_to_json`. Memory use depends only on the count of numbers."""
    first, text = parse_items(value)
    coded, at, end, numbers = (
        base64.b64decode(parse_text(text), validate=True),
        0,
        parse_count(first),
        set(),
    )
    while at < len(coded):
        skipped, at = _read_varint(coded, at)
        length, at = _read_varint(coded, at)
        bitmap, at, end = coded[at : at + length], at + length, end + 8 * skipped
        bits = bin(int.from_bytes(bitmap, "little"))[:1:-1]
        numbers |= {number for number, bit in enumerate(bits, end) if bit == "1"}
        end += 8 * length
    found = frozenset(numbers)
    if end > _LARGEST or set_to_json(found) != value:
        raise ValueError(f"wanted a set of numbers, got {value!r:.80}")
    return found


def _stretches(bits: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """Split a bitmap into runs of nonzero bytes, keyed by position."""
    start, stretch = 0, bytearray()
    for at in sorted(bits):
        if at != start + len(stretch):
            yield start, bytes(stretch)
            start, stretch = at, bytearray()
        stretch.append(bits[at])
    yield start, bytes(stretch)


def _varint(value: int) -> bytes:
    """Encode an integer as LEB128."""
    coded = bytearray()
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*coded, value))


def _read_varint(coded: bytes, at: int) -> tuple[int, int]:
    """Decode an integer; returns it and the position after it."""
    value = shift = 0
    while shift < _LARGEST.bit_length() and at < len(coded):
        byte = coded[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("wanted a number of at most 53 bits, got no end of it")


def packs_to_json(packs: tuple[PackRecord, ...]) -> list[Any]:
    return [[p.number, p.id, p.bytes, p.chunks, int(p.metadata)] for p in packs]


def parse_pack(value: Any) -> PackRecord:
    number, pack, size, chunks, kind = parse_items(value)
    if kind not in (0, 1):
        raise ValueError(f"wanted 0 or 1 as the kind of a pack, got {kind!r:.80}")
    return PackRecord(
        parse_pack_id(pack), parse_count(size), parse_count(chunks), bool(kind), parse_count(number)
    )


def parse_setting(value: Any) -> Setting:
    if isinstance(value, list):
        return tuple(parse_text(item) for item in value)
    return value if value is None or isinstance(value, str) else parse_integer(value)


def tuple_of(decode_item: Callable[[Any], Any]) -> Field:
    return Field(list, lambda value: tuple(decode_item(item) for item in parse_items(value)))


def optional(decode_value: Callable[[Any], Any]) -> Field:
    return Field(as_it_is, lambda value: None if value is None else decode_value(value))


def pairs_of(encode_value: Callable[[Any], Any], decode_value: Callable[[Any], Any]) -> Field:
    return Field(
        lambda pairs: {name: encode_value(value) for name, value in pairs},
        lambda value: tuple((name, decode_value(item)) for name, item in sorted_items(value)),
    )


def setting_to_json(value: Setting) -> Any:
    return list(value) if isinstance(value, tuple) else value


TEXT = Field(as_it_is, parse_text)
COUNT = Field(as_it_is, parse_count)
SESSION = Field(as_it_is, parse_session_id)
COMMITS = tuple_of(parse_commit_id)
NUMBERS = Field(set_to_json, parse_set)
PACKS = Field(packs_to_json, lambda value: tuple(parse_pack(item) for item in parse_items(value)))
