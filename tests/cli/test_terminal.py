"""What a person sees on a terminal: tables that fit, the lineage, colours if they are wanted, and
nothing that a terminal would obey."""

import re
from pathlib import Path

import pytest

import ckptstore
from tests.cli.running import run, run_on_terminal

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("words", ["log", "show best", "tag", "stats"])
def test_tables_fit_the_terminal(made_store: Path, words: str, columns: int) -> None:
    result = run_on_terminal(*words.split(), "-s", str(made_store), columns=columns)
    assert result.code == 0
    bare = ESCAPE.sub("", result.out.replace("\r\x1b[K", "\n"))
    assert max(map(len, bare.splitlines())) <= columns


@pytest.mark.parametrize(
    "words", ["log", "tag", "stats", "stats --what-if --keep-last 1", "forget -n --keep-last 1"]
)
def test_a_long_name_of_a_run_is_shown_whole_on_a_narrow_terminal(
    words: str, tmp_path: Path
) -> None:
    run_name = "experiments/2026-11-20/learning-rate-sweep/lr-3e-4-warmup-2000"
    for name in ("main", run_name):
        with ckptstore.open(tmp_path / "s", run=name) as store:
            store.commit({"x": 1}, step=1_000, tag=f"{name[:4]}-best", metrics={"loss": 1 / 3})
    result = run_on_terminal(*words.split(), "-s", str(tmp_path / "s"), columns=80)
    assert result.code == 0
    lines = ESCAPE.sub("", result.out.replace("\r\x1b[K", "\n")).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "  run  " in f"  {line}") :]
    assert max(map(len, table)) <= 80
    parts = ("experiments/", "2026-11-20/", "learning-", "sweep/", "lr-3e-4-", "2000")
    assert all(any(part in line for line in table) for part in parts)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("ls", "number_*."),
        ("ls latest model", "model/layers.*.weight"),
        ("ls -l 200 progress", "progress/epoch"),
        ("diff main@100 tune@210", "model/embedding"),
        ("forget -n --keep-last 2", "newest"),
    ],
)
def test_a_terminal_of_40_columns_breaks_no_name(made_store: Path, words: str, name: str) -> None:
    result = run_on_terminal(*words.split(), "-s", str(made_store), columns=40)
    assert result.code == 0
    lines = ESCAPE.sub("", result.out).splitlines()
    header = next(i for i, line in enumerate(lines) if re.search(r"\b(path|because)\b", line))
    row = next(i for i, line in enumerate(lines) if name in line)
    assert max(map(len, lines[header : row + 1])) <= 40


def test_log_draws_the_lineage_where_it_branches(made_store: Path) -> None:
    assert "●" in run_on_terminal("log", "-s", str(made_store)).out
    assert "●" not in run_on_terminal("log", "--run", "main", "-s", str(made_store)).out
    assert "●" not in run_on_terminal("log", "--no-graph", "-s", str(made_store)).out
    assert "●" in run_on_terminal("log", "--run", "main", "--graph", "-s", str(made_store)).out


def test_a_terminal_without_unicode_gets_lines_of_ascii(made_store: Path) -> None:
    result = run_on_terminal(
        "log", "--graph", "-s", str(made_store), env={"PYTHONIOENCODING": "ascii"}
    )
    assert result.code == 0
    assert result.out.isascii()
    assert "*" in result.out


def test_colours_are_for_terminals_that_want_them(made_store: Path) -> None:
    assert "\x1b[33m" in run_on_terminal("log", "-s", str(made_store)).out
    assert not re.search(
        r"\x1b\[3[0-9]m", run_on_terminal("log", "-s", str(made_store), env={"NO_COLOR": "1"}).out
    )
    assert "\x1b" not in run_on_terminal("log", "-s", str(made_store), env={"TERM": "dumb"}).out
    assert "\x1b" not in run("log", "-s", str(made_store)).out


def test_messages_and_values_cannot_control_the_terminal(made_store: Path) -> None:
    for words in ("log", "show 200", "ls -l 200 progress", "diff 100 200"):
        shown = ESCAPE.sub(
            "",
            run_on_terminal(*words.split(), "-s", str(made_store), columns=200).out.replace(
                "\r\x1b[K", ""
            ),
        )
        assert "\x1b" not in shown, words
        assert "\x07" not in shown, words


def test_ls_folds_what_does_not_fit_and_says_how_to_unfold_it(made_store: Path) -> None:
    folded = run_on_terminal("ls", "-s", str(made_store)).out
    assert "layers.*.weight" in folded
    assert "--all lists every one" in folded
    assert len(folded.splitlines()) < 40
    assert len(run_on_terminal("ls", "--all", "-s", str(made_store)).out.splitlines()) > 700
    assert "fold" not in run_on_terminal("ls", "latest", "progress", "-s", str(made_store)).out


def test_json_on_a_terminal_is_indented_and_has_no_colours(made_store: Path) -> None:
    result = run_on_terminal("tag", "--json", "-s", str(made_store))
    assert result.out.startswith('{\n  "store": ')
    assert len(result.document["tags"]) == 3


def test_what_takes_a_while_is_said_and_wiped_off(made_store: Path) -> None:
    out = run_on_terminal("stats", "-s", str(made_store)).out
    assert re.search(r"share …(, \d+ s)?\r\x1b\[K", out)  # a slow machine is told the seconds too
    assert run("stats", "-s", str(made_store)).err == ""


def test_a_terminal_is_told_which_bucket_it_waits_for() -> None:
    result = run_on_terminal("log", "-s", "memory://nobody/here", columns=80)
    assert result.code == 10
    assert "asking memory://nobody/here" in result.out
