"""Damage: bytes flipped, cut out, doubled or put in anywhere, and JSON that says something else."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after one to three random changes; never equal to it."""
    result = data
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(result) - 1, 0)))
        stop = draw(st.integers(start, min(start + 16, len(result))))
        result = result[:start] + draw(st.binary(max_size=16)) + result[stop:]
    return result if result != data else data[:-1]


@st.composite
def reworded(draw: st.DrawFn, data: bytes) -> bytes:
    """JSON that says something else in one to three places: another value, one from elsewhere in
    it, one less or one twice."""
    document = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        sites = list(_sites(document))
        if not sites:
            break
        container, key = draw(st.sampled_from(sites))
        scenario = draw(st.sampled_from(["replace", "copy", "remove", "double"]))
        if scenario == "replace":
            container[key] = deepcopy(draw(st.sampled_from(STRANGE)))
        elif scenario == "copy":
            other, there = draw(st.sampled_from(sites))
            container[key] = deepcopy(other[there])
        elif scenario == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**40,
    2**53,
    10**30,
    "",
    "x",
    "../..",
    "0" * 64,
    "float32",
    [],
    {},
    [[]],
    {"": 0},
    [2**40],
]


def _sites(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested lists and dicts, as a container and a key."""
    keys = (
        range(len(value))
        if isinstance(value, list)
        else list(value)
        if isinstance(value, dict)
        else ()
    )
    for key in keys:
        yield value, key
        yield from _sites(value[key])
