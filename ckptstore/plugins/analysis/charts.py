"""Draw a chart: with matplotlib into a file, or with plotext in text for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.files import check_path
from ckptstore.plugin.text import printable

FORMATS = (".svg", ".png", ".pdf")
MARKERS = "●x+o*#@%&="
BARS = 40
"""A chart has at most so many bars, the largest."""
LINES = 16
MARKS = 7


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
    scale = _scale(chart)
    for number, line in enumerate(chart.lines):
        marker = MARKERS[number % len(MARKERS)] if len(chart.lines) > 1 else "hd"
        y = [*map(scale.place, line.y)]
        figure.plot(list(line.x), y, label=printable(line.name), marker=marker)
    if chart.bars:
        names, values = zip(*reversed(chart.bars), strict=True)
        lengths = [*map(scale.place, values)]
        labels = [*map(printable, names)]
        figure.bar(labels, lengths, orientation="horizontal", width=0.3, marker="█")
        height = len(names) + 5
    marks = scale.marks()
    ticks = figure.xticks if chart.bars else figure.yticks
    ticks([*map(scale.place, marks)], _texts(marks))
    figure.plotsize(width, height)
    text: str = figure.uncolorize(figure.build())
    return text.rstrip("\n")


@dataclass(frozen=True, slots=True)
class _Scale:
    """An axis of numbers from `least` to `most`. plotext is handed places on it: its own arithmetic
    overflows with large numbers, its bars have no logarithm, and its marks no exponent."""

    least: float
    most: float
    log: bool

    def place(self, number: float) -> float:
        if self.log:
            return math.log10(number) - math.log10(self.least)
        return number / (max(abs(self.least), abs(self.most)) or 1.0)

    def marks(self) -> list[float]:
        """Numbers at equal distances."""
        shares = [i / (MARKS - 1) for i in range(MARKS)]
        if self.log:
            marks = [self.least ** (1 - share) * self.most**share for share in shares]
        else:
            marks = [self.least * (1 - share) + self.most * share for share in shares]
        return [min(max(mark, self.least), self.most) for mark in marks]


def _scale(chart: Chart) -> _Scale:
    """The axis of a chart's numbers; bars begin at 0, or at a power of ten below all of them."""
    numbers = [y for line in chart.lines for y in line.y] + [value for _, value in chart.bars]
    least, most = min(numbers), max(numbers)
    if chart.bars:
        least = 10.0 ** (math.ceil(math.log10(least)) - 1) if chart.log else 0.0
    return _Scale(least, most, chart.log)


def _texts(marks: Sequence[float]) -> list[str]:
    """The marks of an axis as short texts that differ."""
    for digits in range(3, 18):
        texts = [_short(mark, digits) for mark in marks]
        if len(set(texts)) == len(set(marks)):
            break
    return texts


def _short(number: float, digits: int) -> str:
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text and abs(number) < 1e6 else text


def _plain(text: str) -> str:
    """A text that matplotlib takes for no formula."""
    return printable(text).replace("$", r"\$")
