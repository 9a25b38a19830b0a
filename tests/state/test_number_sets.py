"""Large sets of integers: a table for each set, of which one more integer changes a few places."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import Corrupt
from ckptstore.state import number_sets
from ckptstore.state.values import decode_leaf, decode_value, encode_leaf, encode_value

LARGEST = 2**53
numbers = st.integers(-LARGEST, LARGEST) | st.integers(-(2**31), 2**31) | st.integers(-9, 9)


@given(st.sets(numbers, min_size=1, max_size=200), st.randoms(use_true_random=False))
def test_a_table_holds_its_set_and_knows_nothing_of_how_it_came_to_be(
    found: set[int], rng: random.Random
) -> None:
    width, table = number_sets.encode(found)
    items = number_sets.decode(width, table)
    assert len(items) == len(found) and set(items) == found
    others = rng.sample(range(10**6), 50)
    again = {*others}
    again |= set(rng.sample(sorted(found), len(found)))
    again -= {other for other in others if other not in found}
    assert number_sets.encode(again) == (width, table)


@pytest.mark.parametrize("step", [1, 3, 1 << 20, 1 << 32, 1 << 40])
def test_one_more_integer_changes_few_places_and_not_the_length(step: int) -> None:
    found = {i * step for i in range(8000)}
    width, before = number_sets.encode(found)
    changed = []
    for i in range(8000, 8100):
        found.add(i * step)
        now, after = number_sets.encode(found)
        if len(after) == len(before) and now == width:
            places = np.frombuffer(before, f"<i{width}") != np.frombuffer(after, f"<i{width}")
            changed.append(int(places.sum()))
        width, before = now, after
    assert len(changed) >= 98 and sum(changed) <= 40 * len(changed)


@given(st.sets(numbers), st.integers(0, LARGEST // 2000), st.sampled_from([set, frozenset]))
def test_a_large_set_of_integers_comes_back(some: set[int], step: int, cls: type) -> None:
    found = some | {i * (step + 1) for i in range(1024)}
    encoded = encode_value(cls(found))
    assert encoded[0] == cls.__name__ and encoded[1][0] == "table"
    again = decode_leaf(encode_leaf(encoded))
    assert type(again) is cls and again == found and set(map(type, again)) == {int}


def test_sets_of_other_items_have_no_table() -> None:
    large = set(range(2000))
    for other in (large | {1.5}, large | {2**53 + 1}, (large - {1}) | {True}, large | {"a"}):
        encoded = encode_value(other)
        assert len(encoded) == len(other) + 1
        again = decode_value(encoded)
        assert sorted(map(repr, again)) == sorted(map(repr, other))


@pytest.mark.parametrize(
    "payload",
    [
        ["table", 4, "AQAAAAEAAAA="],  # twice
        ["table", 4, "AQAA"],  # not whole
        ["table", 3, "AQAA"],
        ["table", True, "AQAA"],
        ["table", 4, "?"],
        ["table", 4, "é"],
        ["table", 8],
        ["table", 2**70, "AQAA"],
    ],
)
def test_a_damaged_table_is_corrupt(payload: list[object]) -> None:
    with pytest.raises(Corrupt):
        decode_value(["set", payload])
