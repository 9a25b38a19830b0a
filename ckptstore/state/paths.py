"""How is a leaf named? By the keys of all levels, escaped and joined by `/` (docs/format.md §5).

Keys are *encoded*: a string, an integer within 2^53, or a value array `[tag, payload…]`
(docs/values.md). No torch here.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ckptstore.core.model import Node, Schema
from ckptstore.errors import InvalidInput
from ckptstore.objects import canonical

_ESCAPED = re.compile(r"%([0-9A-F]{2})")
_UNSAFE = re.compile(r"[%/\x00-\x1f\x7f]")


def escape(text: str) -> str:
    """`text` without `/` and control characters; two texts never become one."""
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def segment(name: str) -> str:
    """The segment of a string key."""
    return escape(name) or "%empty"


def segments(keys: Sequence[Any]) -> list[str]:
    """The segments of the encoded keys of one mapping, in order; `InvalidInput` if two of them
    cannot be told apart."""
    if set(map(type, keys)) <= {str}:
        # Most keys are their own segments; one look at all of them is cheaper than one at each.
        plain = all(keys) and not _UNSAFE.search("".join(keys))
        return list(keys) if plain else list(map(segment, keys))
    names = {segment(key) for key in keys if type(key) is str}
    found = [segment(key) if type(key) is str else _typed_segment(key, names) for key in keys]
    if len(set(found)) != len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise InvalidInput(
            f"two keys of one mapping are both called {twice!r}; use keys that differ in more than "
            "their bits"
        )
    return found


def unescape(name: str) -> str:
    """The string key that `segment` made `name` of; `InvalidInput` for the segment of another kind
    of key."""
    text = "" if name == "%empty" else _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)
    if segment(text) != name:
        raise InvalidInput(
            f"{name!r} is no segment of a string key; write '%25' for '%', and '%2F' for '/' in a "
            "key"
        )
    return text


def below(node: Node, path: str) -> list[str]:
    """The paths of a node's children: a wrapper's child has the wrapper's own."""
    if node.keys is not None:
        return [f"{path}/{name}" for name in segments(node.keys)]
    if node.type == "stateful":
        return [path]
    return [f"{path}/{i}" for i in range(len(node.children))]


def pickled(schema: Schema) -> list[str]:
    """The paths of the leaves that are pickles."""
    return [schema.paths[leaf] for leaf in _pickles(schema.skeleton)]


def _pickles(node: Node | int) -> Iterator[int]:
    if isinstance(node, int):
        return
    for child in node.children:
        if isinstance(child, int) and node.type == "pickle":
            yield child
        yield from _pickles(child)


def _typed_segment(key: Any, names: set[str]) -> str:
    if type(key) is int or key[0] == "int":
        decimal = str(key if type(key) is int else key[1])
        return f"%int:{decimal}" if decimal in names else decimal
    tag, *payload = key
    return f"%{tag}:{escape(_key_text(tag, payload))}"


def _key_text(tag: str, payload: list[Any]) -> str:
    match tag:
        case "none":
            return ""
        case "bool":
            return "true" if payload[0] else "false"
        case "float":
            return repr(canonical.bits_float(payload[0]))
    return canonical.encode(payload).decode()
