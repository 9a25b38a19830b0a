"""Tables as plain text and fitted to a terminal; leaves folded; values in words."""

import pytest

from ckptstore.cli.commits import first_line
from ckptstore.core.text import BOLD, Column, Table, Terminal, fields, printable
from ckptstore.plugins.reports.difference import value_text
from ckptstore.plugins.reports.listing import fold
from ckptstore.state.values import encode_leaf, encode_value

TABLE = Table(
    (
        Column("id", "id"),
        Column("size", "count"),
        Column("extra", spare=True),
        Column("spare", spare=True),
        Column("message", fit="cut"),
    ),
    (("aaaa", 1, "x" * 10, "y" * 10, "m" * 30), ("bb", 222, None, "y", "m")),
)


def on_terminal(table: Table, width: int, *, colors: bool = False) -> list[str]:
    return list(table.lines(Terminal(width, colors, 0)))


def test_plain_text_is_aligned_cut_nowhere_and_says_what_is_empty() -> None:
    assert str(TABLE.without("message")).splitlines() == [
        "ID    SIZE  EXTRA       SPARE",
        "aaaa     1  xxxxxxxxxx  yyyyyyyyyy",
        "bb     222  -           y",
    ]


def test_fields_have_no_header_and_a_title_indents_them() -> None:
    assert str(fields("Bytes", [("new", "1 B", "what"), ("logical", "2 B")])).splitlines() == [
        "",
        "Bytes",
        "  new      1 B  what",
        "  logical  2 B",
    ]


def test_each_kind_of_value_is_written_its_way() -> None:
    columns = (
        Column("commit", "id"),
        Column("step", "step"),
        Column("n", "count"),
        Column("size", "bytes"),
        Column("time", "time"),
        Column("loss", "metric"),
        Column("tags"),
    )
    table = Table(columns, [("0123456789abcdef", 12_000, 12_000, 2048, 0, 0.5, ("a", "b"))])
    wanted = "0123456789ab 12000 12,000 2.0 KiB 1970-01-01T00:00:00Z 0.5 a, b"
    assert str(table).splitlines()[1].split() == wanted.split()
    names, row = on_terminal(table, 200)
    assert names.split() == ["commit", "step", "n", "size", "age", "loss", "tags"]
    assert row.split() == ["01234567", "12000", "12,000", "2.0", "KiB", "0", "s", "0.5", "a,", "b"]


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
    header, first, _ = on_terminal(TABLE, width)
    assert header.split() == names
    assert first.endswith("m" * message if message == 30 else "  " + "m" * (message - 1) + "…")
    assert width < 24 or len(first) <= width


def test_a_long_path_wraps_within_its_column() -> None:
    table = Table((Column("path", fit="wrap"), Column("n", "count")), [("abc " * 5, 1)])
    assert on_terminal(table, 15) == ["path          n", "abc abc abc   1", "abc abc"]


def test_a_path_breaks_behind_its_separators_and_a_part_only_if_it_is_too_long() -> None:
    table = Table(
        (Column("path", fit="wrap", least=16), Column("n", "count"), Column("shape", spare=True)),
        [("model/layers.10.self_attn.weight", 1, "[3, 4]"), ("漢字/abcdefghijklmnopqr", 2, "[]")],
    )
    assert on_terminal(table, 20) == [
        "path               n",
        "model/layers.10.   1",
        "self_attn.weight",
        "漢字/              2",
        "abcdefghijklmnopq",
        "r",
    ]
    assert on_terminal(table, 28)[0] == "path               n  shape"


def test_characters_of_double_width_count_twice() -> None:
    table = Table((Column("a", fit="cut"), Column("b")), [("漢字漢字漢字", "x"), ("kanji", "y")])
    assert on_terminal(table, 11) == ["a         b", "漢字漢…   x", "kanji     y"]


def test_colors_are_around_the_text_alone() -> None:
    table = Table((Column("a", style=BOLD), Column("b", "id")), [("x", "0" * 64)], "T")
    assert on_terminal(table, 80, colors=True) == [
        "",
        "\x1b[1;4mT\x1b[0m",
        "  \x1b[2ma\x1b[0m  \x1b[2mb\x1b[0m       ".rstrip(),
        "  \x1b[1mx\x1b[0m  \x1b[33m00000000\x1b[0m",
    ]


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
