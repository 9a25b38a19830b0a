"""Values that the page may show: bounded texts, numbers that JSON has, names that are safe in URLs.

Everything that a store says passes through here on its way to a browser.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any

LABEL_CHARACTERS = 200
TEXT_CHARACTERS = 4_000


def clip(text: str, limit: int = LABEL_CHARACTERS) -> str:
    """`text`, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def run_key(run: str) -> str:
    """The name of a run in URLs: hexadecimal digits, whatever the run is called."""
    return hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def encode(value: Json) -> bytes:
    """`value` as JSON; floats that JSON lacks are the texts "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Json) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def thin(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` places, evenly apart, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [place * (count - 1) // (limit - 1) for place in range(limit)]
