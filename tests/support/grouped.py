"""Flat keywords, as tables of tests have them, in the groups that `ckptstore` takes."""

from dataclasses import fields
from typing import Any

from ckptstore import Async, Ranks, Storage

GROUPS = {"storage": Storage, "background": Async, "ranks": Ranks}


def grouped(*groups: str, **flat: Any) -> dict[str, Any]:
    """`flat`, in which the fields of `groups` became one argument each, if any of them is given."""
    found: dict[str, Any] = {}
    for name in groups:
        known = {field.name for field in fields(GROUPS[name])}
        if own := {key: flat.pop(key) for key in known & set(flat)}:
            found[name] = GROUPS[name](**own)
    return {**flat, **found}
