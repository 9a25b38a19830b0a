"""Tables that reports and commands print, as plain text or fitted to a terminal. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, Literal, TypeAlias
from unicodedata import east_asian_width

from ckptstore.core.text import age_text, bytes_text, utc_text

GAP = 2
LEAST_WIDTH = 8
"""The least width of a cell that is cut or wrapped."""
ID_DIGITS = 12
ID_DIGITS_ON_TERMINALS = 8

Kind: TypeAlias = Literal["text", "id", "step", "count", "bytes", "time", "metric"]

_STYLES: dict[str, str] = {"id": "33", "metric": "36"}
"""The colors of kinds, as parameters of the terminal's SGR sequence."""

BOLD, DIM, BLUE, CYAN, TITLE, TAG = "1", "2", "34", "36", "1;4", "1;32"


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` says how values are written. `fit` says what happens to a cell that is too wide for
    the terminal: it is `cut`, `wrap`ped, or kept.

    If a terminal is too narrow for all columns, those with a `spare` above 0 are left out, the
    largest first. `style` is a parameter of the terminal's SGR sequence.
    """

    name: str
    kind: Kind = "text"
    fit: Literal["keep", "cut", "wrap"] = "keep"
    spare: int = 0
    style: str = ""
    right: bool = False


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal that shows a page, and the time of the reader."""

    width: int
    colors: bool
    now_ns: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values, one value per column; None is an empty cell. Without `header`, the names of
    columns are not shown."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    header: bool = True

    def without(self, name: str) -> "Table":
        """The table without its column `name`."""
        keep = [i for i, column in enumerate(self.columns) if column.name != name]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in keep),
            rows=[[row[i] for i in keep] for row in self.rows],
        )

    def without_empty(self, *names: str) -> "Table":
        """The table without those columns of `names` that have no value."""
        table = self
        for i, column in enumerate(self.columns):
            if column.name in names and not any(row[i] for row in self.rows):
                table = table.without(column.name)
        return table

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, terminal: Terminal | None = None) -> Iterator[str]:
        """The aligned lines, with an empty line above a title.

        Plain text has names in capitals and `-` for an empty cell, and cuts nothing. On a terminal,
        spare columns go if even the least widths of all columns are too much; then cells are cut or
        wrapped, those on the right first.
        """
        columns = self.columns
        grid = [[printable(_name(column, terminal)) for column in columns]] if self.header else []
        for row in self.rows:
            cells = zip(row, columns, strict=True)
            grid.append([printable(_cell(value, column.kind, terminal)) for value, column in cells])
        indent = " " * GAP if self.title else ""
        if terminal:
            columns, grid, widths = _fitted(columns, grid, terminal.width - len(indent))
        else:
            if self.header:
                grid[1:] = [[cell or "-" for cell in row] for row in grid[1:]]
            widths = _widths(grid, len(columns))
        styled = terminal is not None and terminal.colors
        if self.title:
            yield ""
            yield style(printable(self.title), TITLE if styled else "")
        for i, row in enumerate(grid):
            for line in _lines(row, columns, widths, styled, header=self.header and not i):
                yield indent + line


def fields(title: str, pairs: Sequence[tuple[str, ...]]) -> Table:
    """Names with their values and, in third place, what the values mean."""
    columns = (Column("name", style=BOLD), Column("value", fit="wrap"), Column("", fit="cut"))
    width = max((len(pair) for pair in pairs), default=2)
    rows = [(*pair, *[""] * (width - len(pair))) for pair in pairs]
    return Table(columns[:width], rows, title, header=False)


def printable(text: str) -> str:
    """`text` with control characters as escapes, so that a terminal obeys nothing in it.

    Everything that a command prints passes through here, because any text in a store, and in an
    error about it, may come from somebody else.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def style(text: str, parameter: str) -> str:
    """`text` between the escape sequences of a style; unchanged without one."""
    return f"\x1b[{parameter}m{text}\x1b[0m" if parameter and text else text


def _name(column: Column, terminal: Terminal | None) -> str:
    return column.name.upper() if not terminal else "age" if column.kind == "time" else column.name


def _cell(value: Any, kind: Kind, terminal: Terminal | None) -> str:
    if value is None:
        return ""
    match kind:
        case "id":
            return str(value[: ID_DIGITS_ON_TERMINALS if terminal else ID_DIGITS])
        case "count":
            return f"{value:,}"
        case "bytes":
            return bytes_text(value)
        case "time":
            return age_text(value, terminal.now_ns) if terminal else utc_text(value)
        case "metric":
            return f"{value:.6g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _fitted(
    columns: Sequence[Column], grid: list[list[str]], width: int
) -> tuple[tuple[Column, ...], list[list[str]], list[int]]:
    """The columns that fit, their cells and their widths."""
    natural = _widths(grid, len(columns))
    least = [
        wide if column.fit == "keep" else min(wide, LEAST_WIDTH)
        for column, wide in zip(columns, natural, strict=True)
    ]
    keep = list(range(len(columns)))
    while _total([least[i] for i in keep]) > width and any(columns[i].spare for i in keep):
        keep.remove(max(keep, key=lambda i: columns[i].spare))
    widths = [natural[i] for i in keep]
    for at, i in reversed(list(enumerate(keep))):
        widths[at] -= min(widths[at] - least[i], max(_total(widths) - width, 0))
    return tuple(columns[i] for i in keep), [[row[i] for i in keep] for row in grid], widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _widths(rows: Sequence[Sequence[str]], count: int) -> list[int]:
    return [max((_width(row[i]) for row in rows), default=0) for i in range(count)]


def _width(text: str) -> int:
    """The columns of a terminal that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    text = text[:width]
    while _width(text) >= width:
        text = text[:-1]
    return f"{text}…"


def _lines(
    row: Sequence[str],
    columns: Sequence[Column],
    widths: Sequence[int],
    styled: bool,
    *,
    header: bool,
) -> Iterator[str]:
    """One line of text for a row, more if cells wrap."""
    cells = [
        (wrap(cell, width, break_on_hyphens=False) or [""])
        if column.fit == "wrap" and _width(cell) > width
        else [_cut(cell, width)]
        for cell, column, width in zip(row, columns, widths, strict=True)
    ]
    for i in range(max(map(len, cells), default=1)):
        parts = []
        for cell, column, width in zip(cells, columns, widths, strict=True):
            text = cell[i] if i < len(cell) else ""
            space = " " * (width - _width(text))
            parameter = DIM if header else column.style or _STYLES.get(column.kind, "")
            shown = style(text, parameter if styled else "")
            right = column.right or column.kind not in ("text", "id")
            parts.append(space + shown if right else shown + space)
        yield (" " * GAP).join(parts).rstrip()
