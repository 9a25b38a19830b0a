"""Each leaf of a nested state has its own path; a key that cannot be in a path is refused."""

from typing import Any

import pytest
import torch

from ckptstore.errors import InvalidInput
from ckptstore.state.flatten import flatten
from tests.state.carrying import assert_same, carry
from tests.state.test_structures import Counting, Point

PATHS = [
    ({"a": {"b": 1}}, ["s/a/b"]),
    ([torch.ones(1), {"x": 1}], ["s/0", "s/1/x"]),
    ([1, 2, 3], ["s"]),
    ({0: 1, "0": 2}, ["s/%int:0", "s/0"]),
    ({0: 1, -1: 2}, ["s/0", "s/-1"]),
    ({2**60: 1, str(2**60): 2}, [f"s/%int:{2**60}", f"s/{2**60}"]),
    ({"a/b": 1, "a": {"b": 2}}, ["s/a%2Fb", "s/a/b"]),
    ({"%int:0": 1, 0: 2, "0": 3}, ["s/%25int:0", "s/%int:0", "s/0"]),
    ({"": 1, "%empty": 2}, ["s/%empty", "s/%25empty"]),
    ({"\n\x7f": 1}, ["s/%0A%7F"]),
    ({None: 1, "None": 2}, ["s/%none:", "s/None"]),
    ({True: 1, "True": 2, "true": 3}, ["s/%bool:true", "s/True", "s/true"]),
    ({1.5: 1, "1.5": 2}, ["s/%float:1.5", "s/1.5"]),
    ({(1, "a/b"): 1}, ['s/%tuple:[1,"a%2Fb"]']),
    ({b"x": 1}, ['s/%bytes:["eA=="]']),
    (Point(1, {"z": 2}), ["s/x", "s/y/z"]),
    ({"m": torch.nn.Parameter(torch.ones(1))}, ["s/m"]),
    ({"m": torch.eye(2).to_sparse()}, ["s/m/indices", "s/m/values"]),
]


@pytest.mark.parametrize(("state", "wanted"), PATHS, ids=lambda x: repr(x)[:40])
def test_a_path_says_which_leaf_it_is(state: Any, wanted: list[str]) -> None:
    assert list(carry(state).schema.paths) == wanted


def test_a_key_of_the_state_is_escaped_as_well() -> None:
    assert flatten({"a/b": {"c": 1}, "": 2}).keys() == {"a/b", ""}
    assert [flat.schema.paths for flat in flatten({"a/b": {"c": 1}, "": 2}).values()] == [
        ("a%2Fb/c",),
        ("%empty",),
    ]


def test_a_key_of_the_state_must_be_a_string() -> None:
    with pytest.raises(InvalidInput, match="key 1"):
        flatten({1: {}})  # type: ignore[dict-item]


def test_keys_that_differ_in_nothing_a_path_can_show_are_refused() -> None:
    with pytest.raises(InvalidInput, match="%float:nan"):
        carry({float("nan"): 1, float("-nan"): 2})


@pytest.mark.parametrize("key", [object(), torch.ones(1), lambda: 0, frozenset({object()})])
def test_a_key_that_is_no_value_is_refused(key: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^s/a: .* cannot be a key"):
        carry({"a": {key: 1}})


def cycle_of_lists() -> Any:
    items: list[Any] = [torch.ones(1)]
    items.append({"again": items})
    return {"a": items}


def cycle_of_plain_lists() -> Any:
    items: list[Any] = [1]
    items.append([items])
    return {"a": items}


def cycle_of_objects() -> Any:
    thing = Counting(None)
    thing.state = {"me": [thing]}
    return {"a": thing}


@pytest.mark.parametrize("make", [cycle_of_lists, cycle_of_plain_lists, cycle_of_objects])
def test_a_cycle_is_refused_with_its_path(make: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^s/a/.* cycle"):
        carry(make())


def test_one_object_in_two_places_is_no_cycle() -> None:
    shared = {"t": torch.ones(1)}
    assert_same(carry([shared, shared]).inflate(), [shared, shared])
