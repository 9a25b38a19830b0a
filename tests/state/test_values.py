"""Encoder and decoder of values, from one table; invalid and damaged values are refused."""

import datetime as dt
import math
import random
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from fractions import Fraction
from itertools import product
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.state import values
from tests.state.carrying import assert_same, carry

SIGNALLING_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


class Name(StrEnum):
    A = "a"


class Rights(Flag):
    READ = 1
    WRITE = 2


for enum in (Colour, Level, Name, Rights):
    values.register_class(enum)

VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (0, 0),
    (-(2**53), -(2**53)),
    (2**53 + 1, ["int", "9007199254740993"]),
    (-(10**30), ["int", "-1" + "0" * 30]),
    (1.0, ["float", "3ff0000000000000"]),
    (-0.0, ["float", "8000000000000000"]),
    (math.inf, ["float", "7ff0000000000000"]),
    (SIGNALLING_NAN, ["float", "fff8000000000123"]),
    (5e-324, ["float", "0000000000000001"]),
    (complex(1, -0.0), ["complex", "3ff0000000000000", "8000000000000000"]),
    ("", ""),
    (
        "naïve \N{SNOWMAN} \0 \N{GRINNING FACE} \u2028",
        "naïve \N{SNOWMAN} \0 \N{GRINNING FACE} \u2028",
    ),
    ([], ["list"]),
    ([1, "a", None], ["list", 1, "a", None]),
    ([1, [2.0, (True,)]], ["list", 1, ["list", ["float", "4000000000000000"], ["tuple", True]]]),
    ((0.9, 0.999), ["tuple", ["float", "3feccccccccccccd"], ["float", "3feff7ced916872b"]]),
    ({3, 1}, ["set", 1, 3]),
    (frozenset({"b", "a"}), ["frozenset", "a", "b"]),
    ({10, 9, -1}, ["set", -1, 9, 10]),
    ({10, 9, "9"}, ["set", "9", 10, 9]),
    ([0.5] * 32, ["list", ["floats", "3fe0000000000000" * 32]]),
    ((0.5,) * 32, ["tuple", ["floats", "3fe0000000000000" * 32]]),
    (deque([1, 2], 3), ["deque", 3, 1, 2]),
    ([b"\0\xff"], ["list", ["bytes", "AP8="]]),
    (Colour.RED, ["enum", "tests.state.test_values.Colour", "RED"]),
    (Level.LOW, ["enum", "tests.state.test_values.Level", "LOW"]),
    (Name.A, ["enum", "tests.state.test_values.Name", "A"]),
    (Rights.READ | Rights.WRITE, ["flag", "tests.state.test_values.Rights", 3]),
    (torch.float8_e4m3fn, ["torch.dtype", "float8_e4m3fn"]),
    (torch.device("cuda", 1), ["torch.device", "cuda:1"]),
    (torch.sparse_csr, ["torch.layout", "torch.sparse_csr"]),
    (torch.channels_last, ["torch.memory_format", "torch.channels_last"]),
    (torch.per_channel_affine, ["torch.qscheme", "torch.per_channel_affine"]),
    (torch.Size([2, 3]), ["torch.Size", 2, 3]),
    (np.float32(1.5), ["numpy.scalar", "<f4", "0000c03f"]),
    (np.int64(-1), ["numpy.scalar", "<i8", "ff" * 8]),
    (np.bool_(True), ["numpy.scalar", "|b1", "01"]),
    (np.complex64(1j), ["numpy.scalar", "<c8", "000000000000803f"]),
    (np.datetime64("2026-01-02", "D"), ["numpy.scalar", "<M8[D]", "e74f000000000000"]),
    (np.str_("é"), ["numpy.scalar", "<U1", "e9000000"]),
    (np.str_(""), ["numpy.scalar", "<U0", "00000000"]),
    (np.bytes_(b"ab"), ["numpy.scalar", "|S2", "6162"]),
    (np.dtype("float16"), ["numpy.dtype", "<f2"]),
    (
        np.dtype([("a", "<i4"), ("b", "<f8", (2,))]),
        ["numpy.dtype", ["list", ["tuple", "a", "<i4"], ["tuple", "b", "<f8", ["tuple", 2]]]],
    ),
    (Decimal("1.10"), ["Decimal", "1.10"]),
    (Fraction(1, 3), ["Fraction", "1", "3"]),
    (UUID(int=1), ["UUID", "0" * 31 + "1"]),
    (range(0, 10, 3), ["range", "0", "10", "3"]),
    (slice(None, 3), ["slice", None, 3, None]),
    (..., ["Ellipsis"]),
    (dt.date(2026, 1, 2), ["date", "2026-01-02"]),
    (dt.timedelta(-1, 2, 3), ["timedelta", -1, 2, 3]),
    (dt.time(1, 2, 3, 4), ["time", "01:02:03.000004", 0, None]),
    (dt.datetime(2026, 1, 2, 3, 4, 5, 6), ["datetime", "2026-01-02T03:04:05.000006", 0, None]),
    (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), ["datetime", "2026-01-02T00:00:00", 0, [[0, 0, 0]]]),
    (
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        ["datetime", "2026-10-25T02:30:00", 1, "Europe/Berlin"],
    ),
    (dt.timezone(dt.timedelta(hours=2), "X"), ["timezone", [[0, 7200, 0], "X"]]),
    (ZoneInfo("UTC"), ["ZoneInfo", "UTC"]),
    (Path("a/b"), ["PosixPath", "a/b"]),
    (PurePosixPath("/x"), ["PurePosixPath", "/x"]),
    (PureWindowsPath("C:\\x"), ["PureWindowsPath", "C:\\x"]),
]


@pytest.mark.parametrize(
    ("value", "encoded"), VALUES, ids=[type(value).__name__ for value, _ in VALUES]
)
def test_a_value_has_one_encoding_and_comes_back_of_its_type(value: Any, encoded: Any) -> None:
    assert values.encode_value(value) == encoded
    assert_same(values.decode_value(canonical.decode(canonical.encode(encoded))), value)
    assert_same(carry({"v": value}).inflate()["v"], value)


@given(st.floats())
def test_a_float_keeps_its_bits(number: float) -> None:
    got = values.decode_leaf(values.encode_leaf(values.encode_value(number)))
    assert struct.pack(">d", got) == struct.pack(">d", number)


ITEMS = st.sampled_from(
    [
        st.integers(),
        st.integers(-(2**53), 2**53),
        st.floats(),
        st.text(),
        st.booleans(),
        st.none(),
        st.none() | st.integers() | st.text() | st.floats() | st.booleans(),
    ]
)
"""Of what a collection is made: of one kind mostly, which has a faster way."""


@given(
    ITEMS.flatmap(lambda items: st.lists(items, max_size=70)),
    st.sampled_from([list, tuple, deque, set, frozenset]),
)
def test_a_collection_comes_back_with_the_types_and_bits_of_its_items(
    items: list[Any], collection: Callable[[Any], Any]
) -> None:
    value = collection(items)
    got = values.decode_leaf(values.encode_leaf(values.encode_value(value)))
    assert type(got) is type(value)
    assert sorted(map(_exact, got)) == sorted(map(_exact, value))
    if collection not in (set, frozenset):
        assert list(map(_exact, got)) == list(map(_exact, value))


def _exact(item: Any) -> tuple[str, Any]:
    return type(item).__name__, struct.pack(">d", item) if type(item) is float else repr(item)


@given(st.sets(st.text()) | st.sets(st.integers() | st.booleans() | st.text()))
def test_the_items_of_a_set_are_in_the_order_of_their_bytes_but_integers(items: set[Any]) -> None:
    _, *encoded = values.encode_value(items)
    if {*map(type, items)} != {int}:
        assert encoded == sorted(encoded, key=canonical.encode)


@given(st.sets(st.integers(-(2**53), 2**53), min_size=1))
def test_integers_of_a_set_are_in_the_order_of_their_values(items: set[int]) -> None:
    assert values.encode_value(items) == ["set", *sorted(items)]


@pytest.mark.parametrize("bits", ["3fe0", "3FE0000000000000", "3fe00000 0000000", 1, None])
def test_floats_in_one_string_are_whole_and_of_lower_case_digits(bits: Any) -> None:
    with pytest.raises(Corrupt):
        values.decode_value(["list", ["floats", bits]])


@given(st.integers() | st.integers(-(10**6000), 10**6000))
def test_an_integer_of_any_size_comes_back(number: int) -> None:
    assert values.decode_leaf(values.encode_leaf(values.encode_value(number))) == number


@given(st.text())
def test_any_text_without_lone_surrogates_comes_back(text: str) -> None:
    assert values.decode_leaf(values.encode_leaf(values.encode_value(text))) == text


@pytest.mark.parametrize(
    "where",
    [{"a": "\ud800"}, {"a": ["x\udfff"]}, {"\ud800": 1}, {("\ud800",): 1}, {"a": Path("\udc80")}],
)
def test_a_lone_surrogate_is_refused_with_its_path(where: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^s.*lone surrogate"):
        carry(where)


def test_equal_sets_have_equal_bytes() -> None:
    words = [str(i) for i in range(100)]
    shuffled = random.sample(words, len(words))
    assert carry(set(words)).content == carry(set(shuffled)).content


def test_attributes_may_hold_dicts_and_leaves_may_not() -> None:
    metadata = OrderedDict([("", {"version": 1}), ("bn", {"version": 2, "n": Counter("aab")})])
    assert values.encode_value(metadata) is values.NOT_A_VALUE
    assert_same(values.decode_value(values.encode_attribute(metadata)), metadata)


class Plain:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and bool(self.data == other.data)

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"Plain({self.data!r})"


class Heavy(Plain):
    """Holds tensors."""


values.register_value("plain", Plain, lambda x: x.data, Plain)
values.register_value("heavy", Heavy, lambda x: {"data": x.data}, lambda d: Heavy(d["data"]))


@pytest.mark.parametrize(
    "state",
    [Plain(1), [Plain("a"), 2], {Plain(3): Plain(None)}, {"x": Plain(b"1")}, [Plain(b"1" * 1000)]],
)
def test_a_registered_type_comes_back_through_its_codec(state: Any) -> None:
    assert_same(carry(state).inflate(), state)


def test_a_registered_type_may_hold_tensors_and_containers() -> None:
    shared = torch.randn(3)
    got = carry({"a": Heavy({"t": shared}), "b": shared}).inflate()
    assert torch.equal(got["a"].data["t"], shared)
    assert got["a"].data["t"] is got["b"]


def test_a_codec_that_is_not_registered_here_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"'gone'.*register_value"):
        values.decode_value(["registered", "gone", 1])


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("", Heavy),
        ("a b", Heavy),
        ("plain", Colour),
        ("other", Plain),
        ("mine", int),
        ("mine", dict),
    ],
)
def test_a_codec_needs_a_name_and_a_class_of_its_own(name: str, cls: type) -> None:
    with pytest.raises(InvalidInput):
        values.register_value(name, cls, repr, repr)


def test_registering_the_same_again_replaces_the_codec() -> None:
    values.register_value("plain", Plain, lambda x: x.data, Plain)


class Unregistered(Enum):
    X = 1


def test_a_class_is_never_imported_because_a_document_names_it() -> None:
    carried = carry({"e": Unregistered.X})
    with pytest.raises(InvalidInput, match="Unregistered is neither registered nor in the target"):
        carried.inflate()
    assert carried.restore({"e": Unregistered.X}) == {"e": Unregistered.X}


def test_an_enum_member_that_is_gone_is_named() -> None:
    with pytest.raises(InvalidInput, match="no member 'BLUE'"):
        values.decode_value(["enum", "tests.state.test_values.Colour", "BLUE"])


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: print,
        lambda: int,
        lambda: memoryview(b"x"),
        lambda: {torch.ones(1)},
    ],
)
def test_unsupported_values_are_refused_with_path_and_advice(make: Callable[[], Any]) -> None:
    with pytest.raises(
        InvalidInput, match=r"^s/a/1: .*(register_value.*allow_pickle=True|use a list)"
    ):
        carry({"a": [1, make()]})


@pytest.mark.parametrize(
    "make", [lambda: lambda x: x, lambda: (x for x in ()), lambda: pytest, lambda: _local()]
)
def test_pickling_is_no_advice_for_what_cannot_be_pickled(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^s/f: .* neither stored nor pickled; leave it out"):
        carry({"f": make()})


def _local() -> object:
    class Local:
        pass

    return Local()


def test_a_path_that_python_reads_as_another_one_is_refused_and_every_other_comes_back() -> None:
    """Before Python 3.12, the text of a Windows path of a server without a share is that of a path
    without a server."""
    for length in range(6):
        for text in map("".join, product("aB\\:", repeat=length)):
            path = PureWindowsPath(text)
            if PureWindowsPath(str(path)) == path:
                assert_same(carry([path]).inflate(), [path])
            else:
                with pytest.raises(InvalidInput, match=r"^s/0: "):
                    carry([path])


DAMAGED = [
    [],
    [1],
    {},
    1.5,
    ["nothing"],
    ["int", "x"],
    ["int"],
    ["int", 1],
    ["int", "1" * 5000 + "E9"],
    ["range", "0", "-" + "1" * 5000 + "E9", "1"],
    ["float", "zz"],
    ["float", 3],
    ["complex", "3ff0000000000000"],
    ["bytes", "%%"],
    ["deque", "x"],
    ["deque"],
    ["set", ["list"]],
    ["dict", [1]],
    ["dict", 1],
    ["enum"],
    ["registered"],
    ["torch.device", "nowhere"],
    ["torch.Size", "x"],
    ["numpy.scalar", "<f4", "00"],
    ["numpy.scalar", "|O", "00" * 8],
    ["numpy.scalar", ["list", "x"], "00"],
    ["date", "2026"],
    ["datetime", "2026-01-02", 0, "No/Where"],
    ["timedelta", 1],
    ["UUID", "x"],
    ["Decimal", "x"],
    ["range", "0", "1", "0"],
    ["slice"],
    ["PosixPath"],
]


@pytest.mark.parametrize("encoded", DAMAGED, ids=repr)
def test_a_damaged_value_is_corrupt(encoded: Any) -> None:
    with pytest.raises(Corrupt):
        values.decode_value(encoded)


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=3), below, max_size=2)
    ),
    max_leaves=8,
)
tags = st.sampled_from(
    sorted(
        {encoded[0] for _, encoded in VALUES if isinstance(encoded, list)}
        | {"dict", "OrderedDict", "Counter", "bool", "none"}
    )
)


@given(st.tuples(tags, st.lists(json, max_size=4)))
def test_any_json_under_any_tag_is_a_value_or_an_error_of_ours(
    drawn: tuple[str, list[Any]],
) -> None:
    tag, payload = drawn
    with suppress(CkptStoreError):
        values.decode_value([tag, *payload])
