"""Tables as plain text and fitted to a terminal; leaves folded; values in words."""

import pytest

from ckptstore.cli.format import first_line, fold, value_text
from ckptstore.cli.table import GAP, Column, Table, fields, fitted, plain, printable
from ckptstore.state.values import encode_leaf, encode_value

TABLE = Table(
    (
        Column("id"),
        Column("size", right=True),
        Column("extra", spare=1),
        Column("spare", spare=2),
        Column("message", fit="cut"),
    ),
    (("aaaa", "1", "x" * 10, "y" * 10, "m" * 30), ("bb", "222", "", "y", "m")),
)


def test_plain_text_is_aligned_cut_nowhere_and_says_what_is_empty() -> None:
    assert plain(TABLE.without("message")) == [
        "ID    SIZE  EXTRA       SPARE",
        "aaaa     1  xxxxxxxxxx  yyyyyyyyyy",
        "bb     222  -           y",
    ]


def test_fields_have_no_header_and_a_title_indents_them() -> None:
    assert plain(fields("Bytes", [("new", "1 B", "what"), ("logical", "2 B")])) == [
        "Bytes",
        "  new      1 B  what",
        "  logical  2 B",
    ]


@pytest.mark.parametrize(
    ("width", "names", "message"),
    [
        (200, ["id", "size", "extra", "spare", "message"], 30),
        (60, ["id", "size", "extra", "spare", "message"], 24),
        (40, ["id", "size", "extra", "message"], 16),
        (24, ["id", "size", "message"], 12),
        (5, ["id", "size", "message"], 8),
    ],
)
def test_a_narrow_terminal_loses_messages_first_and_then_spare_columns(
    width: int, names: list[str], message: int
) -> None:
    table, widths = fitted(TABLE, width)
    assert [column.name for column in table.columns] == names
    assert widths[-1] == message
    assert width < 24 or sum(widths) + GAP * (len(widths) - 1) <= width


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain ü 漢", "plain ü 漢"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("tab\tnul\0", "tab\\tnul\\x00"),
        ("\x9b1m", "\\x9b1m"),
        ("\u202e", "\\u202e"),
    ],
)
def test_a_terminal_is_never_handed_what_it_would_obey(text: str, safe: str) -> None:
    assert printable(text) == safe


def test_paths_that_differ_in_numbers_fold_if_their_kind_is_equal() -> None:
    items = [
        ("a.0.w", 1),
        ("a.1.w", 1),
        ("a.10.w", 2),
        ("a.h2.w", 1),
        ("b_1", 1),
        ("b_2", 1),
        ("x/7/y/8", 1),
        ("x/7/y/9", 1),
    ]
    folded = fold(items, lambda item: item)
    assert [(pattern, len(group)) for pattern, group in folded] == [
        ("a.*.w", 2),
        ("a.10.w", 1),
        ("a.h2.w", 1),
        ("b_*", 2),
        ("x/*/y/*", 2),
    ]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(2**70), 0.1, float("-inf"), "text", [1, [2.5, "a"], None], (1,), (1, 2)],
)
def test_a_value_reads_as_python_writes_it(value: object) -> None:
    assert value_text(encode_leaf(encode_value(value))) == repr(value)


def test_other_values_are_cut_and_never_fail() -> None:
    assert value_text(b"not json") == "not json"
    assert value_text(encode_leaf("x" * 100)) == "'" + "x" * 58 + "…"
    assert value_text(b'["float","not bits"]') == '["float","not bits"]'
    assert value_text(b'["Decimal","1.5"]') == "Decimal('1.5')"


def test_a_message_is_shown_by_its_first_line() -> None:
    assert first_line("\n one\ntwo\n") == "one …"
    assert first_line("one") == "one"
