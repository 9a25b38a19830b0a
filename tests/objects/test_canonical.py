"""Canonical JSON: one value, one sequence of bytes; no other bytes get in."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.canonical import (
    MAX_DEPTH,
    MAX_INTEGER,
    bits_float,
    decode,
    encode,
    encode_joined,
    field,
    float_bits,
)
from tests.support.mutations import damaged

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)

TABLE = [
    (None, b"null"),
    (True, b"true"),
    (-MAX_INTEGER, b"-9007199254740992"),
    ([], b"[]"),
    ({"b": 1, "a": [2, {}]}, b'{"a":[2,{}],"b":1}'),
    ("é\u2028\x7f/", '"é\u2028\x7f/"'.encode()),
    ('"\\\b\f\n\r\t\x00\x1f', rb'"\"\\\b\f\n\r\t\u0000\u001f"'),
    ({"\U0001f600": 1, "\uffff": 2}, '{"\uffff":2,"\U0001f600":1}'.encode()),
    ("1.5 e+10 99999999999999999999", b'"1.5 e+10 99999999999999999999"'),
    ('a"1.5"\\', rb'"a\"1.5\"\\"'),
]


@pytest.mark.parametrize(("value", "data"), TABLE)
def test_a_value_has_one_encoding(value: object, data: bytes) -> None:
    assert encode(value) == data
    assert decode(data) == value


@given(VALUES)
def test_what_is_encoded_comes_back(value: object) -> None:
    data = encode(value)
    assert decode(data) == value
    assert encode(decode(data)) == data
    assert json.loads(data) == value


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_an_object_of_encoded_values_is_encoded_as_one_of_values(value: dict[str, object]) -> None:
    assert encode_joined({key: encode(each) for key, each in value.items()}) == encode(value)


def test_a_key_that_json_cannot_hold_is_refused_beside_encoded_values_too() -> None:
    with pytest.raises(InvalidInput, match="key"):
        encode_joined({"\ud800": b"1"})


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        1e300,
        1e-300,
        -0.0,
        math.nan,
        math.inf,
        [0.1],
        {"a": 2.0},
        MAX_INTEGER + 1,
        -MAX_INTEGER - 1,
        10**40,
        "\ud800",
        b"",
        {1},
        object,
    ],
    ids=repr,
)
def test_what_json_cannot_hold_exactly_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nul",
        b"1.5",
        b"1e5",
        b"NaN",
        b"-Infinity",
        b'{"a":1,"a":1}',
        b'"\\ud800"',
        b'"\\\\\\udfff"',
        b"\xff",
        b'"\xed\xa0\x80"',
        b"9" * 5000,
    ],
)
def test_what_is_not_canonical_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data)


def test_an_escaped_backslash_is_no_surrogate() -> None:
    assert decode(rb'"\\ud800 \u000b"') == "\\ud800 \x0b"


def test_both_directions_allow_the_same_depth() -> None:
    deepest: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest, [], "[[["]
    assert decode(encode(deepest)) == deepest
    too_deep = json.dumps([deepest]).encode()
    with pytest.raises(InvalidInput):
        encode([deepest])
    with pytest.raises(Corrupt):
        decode(too_deep)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000]
)
def test_abysmal_nesting_is_corrupt_and_no_recursion_error(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidInput):
        encode(loop)


@given(VALUES.map(encode).flatmap(damaged))
def test_damaged_json_is_json_or_corrupt(data: bytes) -> None:
    try:
        decode(data)
    except Corrupt:
        return


@given(st.integers(0, 2**64 - 1))
def test_floats_keep_every_bit(bits: int) -> None:
    assert struct.pack(">d", bits_float(f"{bits:016x}")) == bits.to_bytes(8, "big")
    assert float_bits(1.0) == "3ff0000000000000"


@pytest.mark.parametrize(
    "text",
    ["", "3FF0000000000000", "3ff000000000000", "3ff00000000000000", "xff0000000000000", 1.0, None],
)
def test_bits_of_a_float_have_one_form(text: object) -> None:
    with pytest.raises(Corrupt):
        bits_float(text)


@pytest.mark.parametrize("obj", [None, [], {}, {"a": "1"}, {"a": True}, {"a": None}])
def test_a_field_of_another_type_is_corrupt(obj: object) -> None:
    with pytest.raises(Corrupt, match="'a'"):
        field(obj, "a", int)
