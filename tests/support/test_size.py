"""The figures of the size counter, on sources written by hand."""

from pathlib import Path

import pytest

from tests.support.size import PLUGINS, Piece, main, measure, report, shares, sources_in

SMALL = b'''"""Docstring."""  # comment


def one(a, *, b=2):
    # comment
    return a + b  # comment


class Two:
    @property
    def three(self) -> int:
        """Docstring
        of two lines."""

        def inner():
            pass

        return (1
                + 2)
'''
TOKENS = sum(
    [
        1,  # the module's docstring
        len(["def", "one", "(", "a", ",", "*", ",", "b", "=", "2", ")", ":"])
        + len(["return", "a", "+", "b"]),
        len(["class", "Two", ":"]),
        len(["@", "property", "def", "three", "(", "self", ")", "->", "int", ":"]) + 1,
        len(["def", "inner", "(", ")", ":", "pass"]),
        len(["return", "(", "1", "+", "2", ")"]),
    ]
)


def test_tokens_are_counted_without_comments_and_layout() -> None:
    assert measure([("small.py", SMALL)]).tokens == TOKENS


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        (b"", 0),
        (b"\n\n# comment\n", 0),
        (b"x", 1),
        (b"x = 1\n", 3),
        (b"x = [\n  1,  # one\n\n  2,\n]\n", 8),
        (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", 3),
        (b"if a:\n    b\n    c\nd\n", 6),
        (b"f'{a}'\n", 1),
    ],
)
def test_tokens_of_small_sources(source: bytes, tokens: int) -> None:
    assert measure([("x.py", source)]).tokens == tokens


def test_functions_are_as_long_as_from_their_decorator_to_their_last_line() -> None:
    assert measure([("small.py", SMALL)]).functions == (
        Piece("small.py:4 one", 3),
        Piece("small.py:11 three", 10),
        Piece("small.py:15 inner", 2),
    )


def test_files_and_tokens_add_up() -> None:
    size = measure([("a.py", SMALL), ("b.py", b"x = 1")])
    assert (size.tokens, size.files) == (TOKENS + 3, (Piece("a.py", 19), Piece("b.py", 1)))


def function(lines: int) -> bytes:
    return b"def f():\n" + b"    x\n" * (lines - 1)


def test_offenders_are_what_is_over_the_limit_the_longest_first() -> None:
    size = measure(
        [
            ("fits.py", function(60)),
            ("long.py", function(61)),
            ("longer.py", function(451)),
            ("exact.py", b"x\n" * 450),
        ]
    )
    assert size.long_functions == (Piece("longer.py:1 f", 451), Piece("long.py:1 f", 61))
    assert size.large_files == (Piece("longer.py", 451),)


def test_the_report_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "package" / "part").mkdir(parents=True)
    (tmp_path / "package" / "a.py").write_bytes(function(2))
    (tmp_path / "package" / "part" / "b.py").write_bytes(function(4))
    (tmp_path / "package" / "part" / "c.txt").write_text("no Python")
    assert [name for name, _ in sources_in(tmp_path / "package")] == [
        "package/a.py",
        "package/part/b.py",
    ]
    main([str(tmp_path / "package")])
    assert capsys.readouterr().out.splitlines() == [
        "tokens            14",
        "files             2",
        "lines             6",
        "largest file      4 lines, package/part/b.py",
        "functions         2",
        "longest function  4 lines, package/part/b.py:1 f",
        "median function   3 lines",
        "",
        "files over 450 lines: 0",
        "",
        "functions over 60 lines: 0",
    ]


def test_a_folder_without_sources_has_a_report_too() -> None:
    assert report(measure([])).startswith("tokens            0\nfiles             0\n")


def test_each_plugin_has_its_files_and_the_core_the_rest() -> None:
    sources = sources_in(Path(__file__).parents[2] / "ckptstore")
    below = [name.partition("/")[2] for name, _ in sources]
    for plugin, begins in PLUGINS.items():
        for start in begins:
            assert any(name.startswith(start) for name in below), f"{plugin} has no {start}"
    some = sources[::10]
    found = shares(some)
    assert sum(found.values()) == measure(some).tokens
    assert shares([("x/plugins/ui/a.py", b"x"), ("x/plugins/uint.py", b"x = 1")]) == {
        **dict.fromkeys(found, 0),
        "ui": 1,
        "core": 3,
    }
