"""Print what a command has to say: a page with colors on a terminal, plain text in a pipe, or one
JSON document."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from shutil import get_terminal_size
from typing import Any, TextIO, TypeAlias

from ckptstore.core.text import BOLD, CYAN, DIM, TAG, Column, Table, Terminal, printable, style

PROGRESS_PAUSE_S = 0.1
_ASCII = str.maketrans(
    {**dict(zip("●○│─╯╮├┤┼┴┬×", "*o|-'.+++'.x", strict=True)), "…": "...", "→": "->"}
)
"""For terminals that cannot show the originals."""

_COLUMNS = {
    column.name: column
    for column in (
        *(Column(name, "id") for name in ("commit", "latest")),
        *(Column(name, "step") for name in ("step", "pid")),
        *(Column(name, "count") for name in ("commits", "chunks", "ranks", "unchanged")),
        *(Column(name, "bytes") for name in ("bytes", "tensor bytes", "new", "exclusive", "of")),
        *(Column(name, fit="wrap") for name in ("what", "types", "placed as", "seen")),
        Column("leaves", "count", spare=True),
        Column("path", fit="wrap", least=24),
        Column("run", fit="wrap", least=16),
        Column("shape", spare=True),
        *(Column(name, fit="cut") for name in ("message", "value")),
        *(Column(name, "time") for name in ("time", "forgotten")),
        Column("still", "seconds"),
        Column("waiting packs", "count"),
        Column("logical", "bytes", spare=True),
        Column("same memory as", fit="wrap", spare=True),
        Column("tags", fit="cut", style=TAG),
        Column("tag", style=TAG),
        Column("key", style=BOLD),
        Column("dtype", spare=True, style=CYAN),
    )
}


def columns(*names: str) -> tuple[Column, ...]:
    """Columns of a table. Equal names look alike in all tables; a name without a look of its own is
    plain text."""
    return tuple(_COLUMNS.get(name) or Column(name) for name in names)


class Hint(str):
    """A line for a person: printed on a terminal only."""


Part: TypeAlias = object
"""A part of a page: a table, which is fitted to a terminal, or anything that `str` makes lines
of."""


class Screen:
    """Standard output and standard error, as a command uses them. `json` is what the user asked
    for; `terminal` is None unless a person is looking."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._out: TextIO = sys.stdout
        self._unicode = (self._out.encoding or "").lower().replace("-", "") == "utf8"
        self.terminal: Terminal | None = None
        if not json and self._out.isatty() and os.environ.get("TERM") != "dumb":
            colors = not os.environ.get("NO_COLOR")
            self.terminal = Terminal(get_terminal_size().columns, colors, time.time_ns())

    def document(self, document: Mapping[str, object]) -> None:
        """Print the one JSON document of a command. Nothing without `--json`."""
        if self.json:
            indent = 2 if self._out.isatty() else None
            print(json.dumps(to_json(document), allow_nan=False, indent=indent), file=self._out)

    def print(self, parts: Iterable[Part]) -> None:
        """Print a page. Nothing with `--json`."""
        if not self.json:
            for part in parts:
                for line in self.lines(part):
                    print(line if self._unicode else line.translate(_ASCII), file=self._out)
            self._out.flush()

    def complain(self, text: str) -> None:
        """Print a problem on standard error."""
        self._out.flush()
        print(f"ckptstore: {printable(text)}", file=sys.stderr)

    def ask(self, question: str) -> bool:
        """Whether a person says yes; no without a terminal to type at."""
        if not sys.stdin.isatty():
            return False
        print(f"{question} [y/N] ", end="", file=self._out, flush=True)
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):
            print(file=self._out)
        return answer.strip().lower() in ("y", "yes")

    @contextmanager
    def progress(self, doing: str = "") -> Iterator[Callable[[str, int, int], None]]:
        """Show the progress of a long job on standard error: a line that changes on a terminal,
        JSON Lines with `--json`, else nothing.

        The function takes the phase, the work done and the total. The beginning and the end of each
        phase are always shown.
        """
        show = _print_json if self.json else _print_line if sys.stderr.isatty() else None
        next_s = 0.0

        def shown(phase: str, done: int, total: int) -> None:
            nonlocal next_s
            if show and (time.monotonic() >= next_s or not done or done == total):
                next_s = time.monotonic() + PROGRESS_PAUSE_S
                show(phase, done, total)

        if show is not _print_line:
            yield shown
            return
        self._out.flush()
        if doing:
            _print_line(f"{doing} …", 0, 0)
        try:
            yield shown
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def lines(self, part: Part) -> Iterable[str]:
        """A part of a page as lines."""
        if isinstance(part, Table):
            return part.lines(self.terminal)
        if isinstance(part, Hint):
            terminal = self.terminal
            return [style(printable(part), DIM if terminal.colors else "")] if terminal else []
        return map(printable, str(part).split("\n"))


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """These fields of `value`, by their names, as a part of a document."""
    return {name: getattr(value, name) for name in names}


def to_json(value: Any) -> Any:
    """`value` as JSON has it: dataclasses and named tuples are objects, bytes hexadecimal, and
    floats that JSON lacks the strings `"NaN"`, `"Infinity"` and `"-Infinity"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return [to_json(item) for item in value] if isinstance(value, Iterable) else str(value)


def _print_json(phase: str, done: int, total: int) -> None:
    print(json.dumps({"phase": phase, "done": done, "total": total}), file=sys.stderr, flush=True)


def _print_line(phase: str, done: int, total: int) -> None:
    share = f" {done / total:.0%}" if total else ""
    print(f"\r\x1b[K{printable(phase)}{share}", end="", file=sys.stderr, flush=True)
