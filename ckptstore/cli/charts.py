"""Draw a chart: with matplotlib into a file, or with plotext in text for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.core.paths import check_path
from ckptstore.core.text import printable
from ckptstore.errors import InvalidInput, Unavailable

FORMATS = (".svg", ".png", ".pdf")
MARKERS = "●x+o*#@%&="
BARS = 40
"""A chart has at most so many bars, the largest."""
LINES = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a name and its points."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a number, or bars by name; a logarithmic axis has positive numbers alone."""

    title: str
    x: str
    y: str
    lines: Sequence[Series] = ()
    bars: Sequence[tuple[str, float]] = ()
    log: bool = False


def check_file(path: str) -> None:
    """Raise `InvalidInput` unless a chart can be written as this kind of file."""
    check_path(Path(path))
    if Path(path).suffix.lower() not in FORMATS:
        raise InvalidInput(f"{path!r}: wanted a name that ends in {', '.join(FORMATS)}")


def draw(chart: Chart, path: str) -> None:
    """Write a chart to a file. Raises `InvalidInput` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput(f"charts in files: {error}; install ckptstore[plot]") from error
    height = max(3.5, 0.22 * len(chart.bars) + 1.2)
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    for line in chart.lines:
        marker = "." if len(line.x) < 60 else ""
        axes.plot(line.x, line.y, label=_plain(line.name), linewidth=1.4, marker=marker)
    if chart.bars:
        names, values = zip(*reversed(chart.bars), strict=True)
        axes.barh(range(len(names)), values, height=0.7)
        axes.set_yticks(range(len(names)), list(map(_plain, names)), fontsize=8)
        axes.margins(y=0.01)
    if chart.log:
        (axes.set_xscale if chart.bars else axes.set_yscale)("log")
    axes.set(title=_plain(chart.title), xlabel=_plain(chart.x), ylabel=_plain(chart.y))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror or error}") from error


def text_of(chart: Chart, width: int, height: int = 20) -> str:
    """A chart in characters. Raises `InvalidInput` without plotext."""
    try:
        import plotext
    except ImportError as error:
        raise InvalidInput(f"charts in a terminal: {error}; install ckptstore[plot]") from error
    figure: Any = plotext
    figure.clear_figure()
    figure.theme("clear")
    figure.title(printable(chart.title))
    figure.xlabel(printable(chart.x))
    for number, line in enumerate(chart.lines):
        marker = MARKERS[number % len(MARKERS)] if len(chart.lines) > 1 else "hd"
        figure.plot(list(line.x), list(line.y), label=printable(line.name), marker=marker)
    if chart.bars:
        names, values = zip(*reversed(chart.bars), strict=True)
        labels = [printable(name) for name in names]
        figure.bar(labels, list(values), orientation="horizontal", width=0.3, marker="█")
        height = len(names) + 5
    if chart.log:
        (figure.xscale if chart.bars else figure.yscale)("log")
    figure.plotsize(width, height)
    text: str = figure.uncolorize(figure.build())
    return text.rstrip("\n")


def _plain(text: str) -> str:
    """A text that matplotlib takes for no formula."""
    return printable(text).replace("$", r"\$")
