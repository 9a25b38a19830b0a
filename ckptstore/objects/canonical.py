"""How does a value become canonical JSON, so that equal documents have equal hashes
(docs/format.md §2)?

Values are None, bool, int within ±2^53, str, lists or tuples, and dicts with string keys, nested
at most `MAX_DEPTH` deep. Floats are stored as the 16 hex digits of their bits. Readers hash the
bytes they read and never encode again.
"""

import json
import re
import struct
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from ckptstore.errors import Corrupt, InvalidInput

T = TypeVar("T")

MAX_DEPTH = 200
MAX_INTEGER = 1 << 53

_encoder = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), sort_keys=True
)
_LONG_INTEGER = re.compile(rb"[0-9]{16,}")
_SURROGATE = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")
_FLOAT_BITS = re.compile(r"[0-9a-f]{16}")
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def encode(value: Any) -> bytes:
    """Canonical JSON of a value. Raises `InvalidInput` for floats, large integers, lone
    surrogates and deeper nesting."""
    try:
        text = _encoder.encode(value)
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"canonical JSON cannot hold this value: {error}") from error
    bare = _without_strings(text)
    if b"." in bare or b"e+" in bare or b"e-" in bare:
        raise InvalidInput("canonical JSON has no floats; wanted the 16 hex digits of float_bits")
    if b"0" * 16 in bare.translate(_DIGITS_TO_ZERO) and any(
        int(n) > MAX_INTEGER for n in _LONG_INTEGER.findall(bare)
    ):
        raise InvalidInput("canonical JSON has no integers beyond 2^53; wanted a string")
    if _deeper_than_allowed(bare):
        raise InvalidInput(
            f"canonical JSON is nested {MAX_DEPTH} deep at most; use flatter containers"
        )
    return data


def encode_joined(parts: Mapping[str, bytes]) -> bytes:
    """The object of these keys with values that are already encoded; many may be the same. The
    caller checks the nesting. Raises `InvalidInput` for a key with a lone surrogate."""
    try:
        return (
            b"{"
            + b",".join(
                [b"%b:%b" % (_encoder.encode(key).encode(), parts[key]) for key in sorted(parts)]
            )
            + b"}"
        )
    except ValueError as error:
        raise InvalidInput(f"canonical JSON cannot hold this key: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    """The inverse of `encode`, for any JSON without floats. Raises `Corrupt` otherwise, also for
    duplicate keys."""
    try:
        text = str(data, "utf-8")
        value = _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not canonical JSON: {error}; run `ckptstore fsck`") from error
    if "\\u" in text and _SURROGATE.search(text):
        raise Corrupt(
            "not canonical JSON: half a character (a lone surrogate); run `ckptstore fsck`"
        )
    if _deeper_than_allowed(_without_strings(text)):
        raise Corrupt(
            f"not canonical JSON: nested more than {MAX_DEPTH} deep; run `ckptstore fsck`"
        )
    return value


def float_bits(x: float) -> str:
    """The big-endian IEEE-754 bits of `x` in hex; every NaN keeps its payload."""
    return struct.pack(">d", x).hex()


def bits_float(text: object) -> float:
    """The inverse of `float_bits`; raises `Corrupt`."""
    if not isinstance(text, str) or not _FLOAT_BITS.fullmatch(text):
        raise Corrupt(
            f"not the bits of a float: {str(text)[:80]!r}; wanted 16 hex digits; run `ckptstore "
            "fsck`"
        )
    x: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return x


def field(obj: Any, key: str, kind: type[T]) -> T:
    """`obj[key]` if `obj` is a dict that has it and it is a `kind` (a bool is no int); else
    `Corrupt`."""
    value = obj.get(key) if isinstance(obj, dict) else None
    if type(value) is not kind:
        raise Corrupt(
            f"a document's {key!r} is damaged: wanted {kind.__name__}, got {str(value)[:80]!r}; "
            "run `ckptstore fsck`"
        )
    return value


def _without_strings(text: str) -> bytes:
    """Valid JSON with its strings removed: plain ASCII."""
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    return "".join(text.split('"')[::2]).encode()


def _deeper_than_allowed(bare: bytes) -> bool:
    """Whether JSON without strings nests deeper than `MAX_DEPTH`. Each round removes the
    innermost brackets."""
    brackets = bare.translate(_BRACES_TO_BRACKETS, _BUT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no integer")


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_refuse_number, parse_constant=_refuse_number
)
