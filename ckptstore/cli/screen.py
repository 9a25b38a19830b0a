"""Where an answer goes: to a terminal with colours, to a pipe as plain text, or to a program as one
JSON document.

rich is imported for a terminal only; it would cost a pipe a tenth of a second.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO

from ckptstore.cli.format import ID_DIGITS
from ckptstore.cli.table import GAP, Table, fitted, plain, printable

if TYPE_CHECKING:
    from rich.console import Console

RICH_ROWS = 500
"""rich takes a millisecond and more per row; longer tables are plain on a terminal too."""


class Screen:
    """Standard output as a command sees it. `json` is what the user asked for; `terminal` whether a
    person is looking."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.out: TextIO = sys.stdout
        self.terminal = not json and self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.id_digits = 8 if self.terminal else ID_DIGITS
        self.unicode = (self.out.encoding or "").lower().replace("-", "") == "utf8"

    def document(self, document: dict[str, Any]) -> None:
        """Print the one JSON document of this command."""
        text = json.dumps(
            _exact(document), allow_nan=False, indent=2 if self.out.isatty() else None
        )
        print(text, file=self.out)

    def table(self, table: Table) -> None:
        """Print a table, with an empty line above if it has a title."""
        if self.terminal and len(table.rows) <= RICH_ROWS:
            self._rich_table(*fitted(table, get_terminal_size().columns))
        else:
            print(*([""] if table.title else []), *plain(table), sep="\n", file=self.out)

    def line(self, text: str = "") -> None:
        """Print one line."""
        print(printable(text), file=self.out)

    def hint(self, text: str) -> None:
        """Print what only a person wants to know; nothing in a pipe."""
        if self.terminal:
            self._console().print(printable(text), style="dim")

    def complain(self, text: str) -> None:
        """Say on standard error what went wrong."""
        self.out.flush()
        print(f"ckptstore: {printable(text)}", file=sys.stderr)

    def flush(self) -> None:
        self.out.flush()

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Say on standard error what takes a while, as long as it does, if somebody is looking
        there."""
        if not sys.stderr.isatty():
            yield
            return
        self.out.flush()
        print(f"{printable(text)} …", end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _console(self, least_width: int = 0) -> "Console":
        from rich.console import Console

        width = max(least_width, get_terminal_size().columns)
        return Console(file=self.out, highlight=False, markup=False, emoji=False, width=width)

    def _rich_table(self, table: Table, widths: Sequence[int]) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        if table.title:
            self._console().print()
            self._console().print(table.title, style="bold underline")
        grid = RichTable(
            box=None,
            show_header=table.header,
            header_style="dim",
            pad_edge=False,
            padding=(0, GAP, 0, 0),
        )
        for column, width in zip(table.columns, widths, strict=True):
            grid.add_column(
                Text(column.name),
                justify="right" if column.right else "left",
                style=column.style,
                no_wrap=column.fit != "wrap",
                overflow="fold" if column.fit == "wrap" else "ellipsis",
                width=width,
            )
        for row in table.rows:
            grid.add_row(*(Text(cell) for cell in row))
        # Where even the least widths are too much, the terminal wraps the lines: a cut id would be
        # no use.
        self._console(sum(widths) + GAP * len(widths)).print(grid, crop=False)
        if table.footer:
            self._console().print(table.footer, style="dim")


def _exact(value: Any) -> Any:
    """`value` with the floats that JSON lacks as strings: `"NaN"`, `"Infinity"`, `"-Infinity"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return value
