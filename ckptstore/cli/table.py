"""What a command prints for people: tables with named columns, laid out as plain text or narrowed
to a terminal. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

GAP = 2
LEAST_WIDTH = 8
"""A cell that is cut or wrapped keeps so many characters."""


@dataclass(frozen=True, slots=True)
class Column:
    """`fit` says what happens to a cell that is too wide for the terminal: it may be `cut`,
    `wrap`ped, or must be kept.

    Columns with a `spare` above 0 are left out of a terminal that is too narrow for all, the
    largest first. `style` is rich's.
    """

    name: str
    right: bool = False
    fit: Literal["keep", "cut", "wrap"] = "keep"
    spare: int = 0
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, one cell per column. `title` stands above, `footer` below; without `header`,
    columns have no names on display."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    footer: str = ""
    header: bool = True

    def without(self, name: str) -> "Table":
        """The table without its column `name`."""
        keep = [i for i, column in enumerate(self.columns) if column.name != name]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in keep),
            rows=tuple(tuple(row[i] for i in keep) for row in self.rows),
        )


def fields(title: str, pairs: Sequence[tuple[str, ...]]) -> Table:
    """Names with their values and, where there is a third item, what the value means."""
    columns = (
        Column("name", style="bold"),
        Column("value", fit="wrap"),
        Column("meaning", fit="cut", style="dim"),
    )
    width = max((len(pair) for pair in pairs), default=2)
    rows = tuple((*pair, *[""] * (width - len(pair))) for pair in pairs)
    return Table(columns[:width], rows, title=title, header=False)


def printable(text: str) -> str:
    """`text` without anything that a terminal would obey: control characters as escapes.

    Whatever a command prints passes through here, since all text in a store, and in an error about
    it, may be somebody else's.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def shown(table: Table) -> Table:
    """The table with nothing in it that a terminal would obey. Names of columns come from a store
    too: metrics have any."""
    columns = tuple(replace(column, name=printable(column.name)) for column in table.columns)
    rows = tuple(tuple(map(printable, row)) for row in table.rows)
    return replace(
        table,
        columns=columns,
        rows=rows,
        title=printable(table.title),
        footer=printable(table.footer),
    )


def plain(table: Table) -> list[str]:
    """The table as aligned lines: names in capitals, `-` for an empty cell, nothing ever cut."""
    table = shown(table)
    names = [tuple(column.name.upper() for column in table.columns)] if table.header else []
    empty = "-" if table.header else ""
    cells = [*names, *(tuple(cell or empty for cell in row) for row in table.rows)]
    widths = _widths(cells, len(table.columns))
    indent = "  " if table.title else ""
    lines = [indent + _line(row, table.columns, widths) for row in cells]
    return [
        *([table.title] if table.title else []),
        *lines,
        *([table.footer] if table.footer else []),
    ]


def fitted(table: Table, width: int) -> tuple[Table, list[int]]:
    """The table as it is `shown` on a terminal of `width` characters, and its columns' widths.

    Spare columns go where even the least widths of all columns are too much; then cells are cut or
    wrapped, those on the right first.
    """
    table = shown(table)
    while _total(_least(table)) > width and any(column.spare for column in table.columns):
        table = table.without(max(table.columns, key=lambda column: column.spare).name)
    widths, least = _natural(table), _least(table)
    for i in reversed(range(len(widths))):
        widths[i] -= min(widths[i] - least[i], max(_total(widths) - width, 0))
    return table, widths


def _natural(table: Table) -> list[int]:
    names = [tuple(column.name for column in table.columns)] if table.header else []
    return _widths([*names, *table.rows], len(table.columns))


def _least(table: Table) -> list[int]:
    pairs = zip(table.columns, _natural(table), strict=True)
    return [width if column.fit == "keep" else min(width, LEAST_WIDTH) for column, width in pairs]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _widths(rows: Sequence[Sequence[str]], count: int) -> list[int]:
    return [max((len(row[i]) for row in rows), default=0) for i in range(count)]


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(row, columns, widths, strict=True)
    )
    return (" " * GAP).join(padded).rstrip()
