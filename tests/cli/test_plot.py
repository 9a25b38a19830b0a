"""Charts of a store: in files, on a terminal, and as numbers."""

import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.plugins.analysis.charts import Chart, Series, draw, text_of
from ckptstore.plugins.analysis.plot import LINES
from tests.cli.running import call, run_on_terminal
from tests.cli.test_analysis import train

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
pytest.importorskip("plotext", reason="the extra `plot` is not installed")

KINDS = {
    "metrics": "metrics loss --log",
    "size": "size",
    "tensor": "tensor *.weight --of drift_first --run right",
    "diff": "diff right@10 right@100",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("charts") / "store"
    train(place, "right")
    with ckptstore.open(place, run="right") as store:
        state = store.checkout().state_dict()
        for step in (110, 120):
            store.commit(state, step=step, metrics={"loss": 1 / step, "$odd\x1b[31m": 2.0})
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_a_chart_is_written_and_its_numbers_are_those_of_the_store(
    kind: str, place: Path, tmp_path: Path
) -> None:
    for suffix, begins in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"chart{suffix}"
        result = call("plot", *KINDS[kind].split(), "-o", str(path), "-s", str(place), "--json")
        assert result.code == 0, result.err
        assert path.read_bytes().startswith(begins)
    found = result.document
    if kind == "metrics":
        assert [line["x"] for line in found["lines"]] == [[110, 120]]
        assert [line["y"] for line in found["lines"]] == [[1 / 110, 1 / 120]]
    elif kind == "diff":
        leaves = {"model/0.weight", "model/0.bias", "model/2.weight", "model/2.bias"}
        assert {bar["name"] for bar in found["bars"]} == leaves
    else:
        assert [len(line["x"]) for line in found["lines"]] == [12, 12]


def test_a_terminal_shows_the_chart(place: Path) -> None:
    shown = run_on_terminal("plot", "diff", "right@10", "right@100", "-s", str(place), columns=80)
    lines = shown.out.replace("\x1b[K", "").splitlines()  # what erases the line of progress
    assert any("model/2.bias" in line and "█" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((1e30, 3e30), ("1e+30", "3e+30")),
        ((1e300, 1e299), ("1e+299", "1e+300")),
        ((1e-300, 1e30), ("1e-300", "1e+30")),
        ((5e-324, 1.7e308), ("4.94e-324", "1.7e+308")),
        ((sys.float_info.max,) * 2, ("1.8e+308",)),
        ((-1.7e308, 1.7e308), ("-1.7e+308", "0", "1.7e+308")),
        ((1_000, 20_000), ("1000", "20000")),
        ((100.001, 100.002), ("100.001", "100.002")),
        ((0, 0), ("0",)),
    ],
)
def test_numbers_of_any_size_leave_the_terminal_to_the_chart(
    numbers: tuple[float, ...], texts: tuple[str, ...], log: bool
) -> None:
    if log and min(numbers) <= 0:
        return
    series = Series("loss", tuple(range(len(numbers))), numbers)
    lines = text_of(Chart("metrics", "step", "", [series], log=log), 60).splitlines()
    marks = [line.partition("┤")[0].strip() for line in lines if "┤" in line]
    assert set(texts) <= set(marks) and len(set(marks)) == len(marks)
    assert max(map(len, marks)) < 12
    assert any("▀" in line or "▄" in line for line in lines)


@pytest.mark.parametrize("log", [False, True])
def test_the_shorter_bar_is_that_of_the_smaller_number(log: bool) -> None:
    bars = [("large", 3e300), ("small", 1e30), ("least", 1e-9)]
    chart = text_of(Chart("changes", "change", "", bars=bars, log=log), 60)
    lengths = [line.count("█") for line in chart.splitlines() if "█" in line]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 40
    assert not log or lengths[1] not in (lengths[0], lengths[2])


def test_names_of_a_hostile_store_are_text(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.svg"
    assert call("plot", "metrics", "-o", str(path), "-s", str(place)).code == 0
    chart = Chart("$x", "step", "", [Series("<b>$\\frac{\x1b[2J", (1.0, 2.0), (1.0, 2.0))])
    draw(chart, str(path))
    assert "<b>" not in path.read_text()
    assert "\x1b" not in text_of(chart, 60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("size", "-o FILE is missing: standard output is no terminal"),
        ("size -o chart.txt", "wanted a name that ends in .svg, .png, .pdf"),
        ("size loss right -o chart.svg", "plot size takes no further words, not 'loss' 'right'"),
        ("diff right@10 -o chart.svg", "takes two commits"),
        ("metrics nothing -o chart.svg", "there is nothing to plot"),
        ("diff right@110 right@120 -o chart.svg", "no tensor differs"),
        ("size -o /nowhere/chart.svg", "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_said(words: str, message: str, place: Path) -> None:
    result = call("plot", *words.split(), "-s", str(place))
    assert result.code in (1, 2)
    assert message in result.err


def test_too_many_lines_are_cut_and_that_is_said(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in (1, 2):
            store.commit({"x": step}, step=step, metrics={f"m{i}": 1.0 for i in range(LINES + 1)})
    result = call("plot", "metrics", "-s", str(tmp_path / "store"), "-o", str(tmp_path / "a.svg"))
    assert f"the first {LINES} of {LINES + 1} lines are drawn" in result.err


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("metrics", "metrics of run right"),
        ("size --run right", "size of all commits of run right"),
        ("diff 10 100 --run right", "largest changes from 10 to 100 of run right"),
    ],
)
def test_a_title_names_the_runs(words: str, title: str, place: Path) -> None:
    assert call("plot", *words.split(), "-s", str(place), "--json").document["title"] == title
