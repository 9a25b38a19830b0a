"""How commits, steps, metrics and values are written for people, in every command alike. Pure.

The shapes of the `--json` documents that several commands share (docs/cli.md): full ids, exact
integers. Pure.

How thousands of leaves fit on a screen: paths that differ only in their numbers become one
pattern, which `ls` takes as a glob. Pure.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ckptstore.cli.timestamps import exact_text
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitInfo
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical

ID_DIGITS = 12
VALUE_CHARACTERS = 60

_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}")}


def short(commit: CommitId) -> str:
    """As much of an id as people read; enough for a ref."""
    return commit[:ID_DIGITS]


def step_text(step: int | None) -> str:
    return "" if step is None else str(step)


def commit_text(info: CommitInfo) -> str:
    """`8f3a1c9e02b7 (step 100)`."""
    return short(info.id) if info.step is None else f"{short(info.id)} (step {info.step})"


def metric_text(value: float) -> str:
    return f"{value:.6g}"


def first_line(message: str) -> str:
    """What of a message fits into a table."""
    line, _, more = message.strip().partition("\n")
    return f"{line} …" if more else line


def type_text(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    """`float32[768, 768]`, or what else a leaf is."""
    return f"{dtype}[{', '.join(map(str, shape))}]" if kind == "tensor" else kind


def value_text(data: bytes) -> str:
    """The value of a value leaf as Python would write it, as far as that can be said without its
    class; cut at `VALUE_CHARACTERS`."""
    try:
        text = _value(canonical.decode(data))
    except (Corrupt, LookupError, TypeError, ValueError):
        text = data.decode("utf-8", "backslashreplace")
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 1] + "…"


def _value(encoded: Any) -> str:
    if not isinstance(encoded, list):
        return repr(encoded)
    tag: str = encoded[0]
    payload: list[Any] = encoded[1:]
    if tag == "float":
        return repr(canonical.bits_float(payload[0]))
    if tag == "int":
        return str(payload[0])
    items = ", ".join(map(_value, payload))
    if tag in _BRACKETS:
        left, right = _BRACKETS[tag]
        return f"{left}{items}{',' if tag == 'tuple' and len(payload) == 1 else ''}{right}"
    return f"{tag}({items})"


def commit_document(info: CommitInfo) -> dict[str, Any]:
    """One commit as `log` and `show` give it."""
    return {
        "id": info.id,
        "content": info.content,
        "entry": info.n,
        "session": info.session,
        "run": info.run,
        "step": info.step,
        "message": info.message,
        "time": exact_text(info.time_ns),
        "time_ns": info.time_ns,
        "parents": list(info.parents),
        "metrics": info.metrics,
        "tags": list(info.tags),
        "logical_bytes": info.logical_bytes,
        "new_bytes": info.new_bytes,
        "leaves": info.leaves,
        "forgotten": info.forgotten,
    }


T = TypeVar("T")

FOLD_ABOVE = 40
"""Terminals show more lines than this folded."""

_NUMBER = re.compile(r"(?<![^./_])[0-9]+(?![^./_])")


def fold(items: Iterable[T], key: Callable[[T], tuple[str, object]]) -> list[tuple[str, list[T]]]:
    """Items by pattern, in the order of each group's first.

    `key` gives an item's path and what else must be equal within a group. A group of one keeps its
    path as it is.
    """
    groups: dict[tuple[str, object], list[T]] = {}
    for item in items:
        path, kind = key(item)
        groups.setdefault((_NUMBER.sub("*", path), kind), []).append(item)
    return [
        (pattern if len(group) > 1 else key(group[0])[0], group)
        for (pattern, _), group in groups.items()
    ]
