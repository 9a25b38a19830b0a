"""How thousands of leaves fit on a screen: paths that differ only in their numbers become one
pattern, which `ls` takes as a glob. Pure."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

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
