"""Print what a command has to say: a page with colors on a terminal, plain text in a pipe, or one
JSON document."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import Any, TextIO, TypeAlias

from ckptstore.plugin.text import BOLD, CYAN, DIM, TAG, Column, Table, Terminal, printable, style

PROGRESS_PAUSE_S = 0.1
QUIET_S = 2.0
"""A command that has been silent for so long says on a terminal that it works, """
TICK_S = 1.0
"""and for how long, again after each such time."""
ERASE = "\r\x1b[K"
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


class _Working:
    """The line of a terminal that says what a command does: the phase, its share of the work, and
    the time since the beginning. Its thread shows it again, so that it changes while the command
    waits. It may be used by several threads."""

    def __init__(self, out: TextIO, doing: str) -> None:
        self._out, self._doing = out, doing
        self._began_s = self._said_s = time.monotonic()
        self._text, self._is_shown, self._is_hidden = "", False, False
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: what is told is shown all the same
            self._thread.start()

    def say(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Show what is being done now; with an empty phase, nothing before `QUIET_S` have gone."""
        with self._lock:
            self._said_s = time.monotonic()
            self._text = f"{printable(phase)}{f' {done / total:.0%}' if total else ''}"
            if phase and not self._is_hidden:
                self._show()
            elif not phase:
                self._erase()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Leave the terminal to others within the block."""
        with self._lock:
            before, self._is_hidden = self._is_hidden, True
            self._erase()
        try:
            yield
        finally:
            with self._lock:
                self._is_hidden, self._said_s = before, time.monotonic()

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._erase()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                silent_s = time.monotonic() - self._said_s
                if not self._is_hidden and (self._is_shown or silent_s >= QUIET_S):
                    self._show()

    def _show(self) -> None:
        took_s = int(time.monotonic() - self._began_s)
        text = f"{self._text or self._doing}{f', {took_s} s' if took_s >= QUIET_S else ''}"
        cut = text[: _width() - 1]  # what is wrapped is not erased
        print(f"{ERASE}{cut}", end="", file=self._out, flush=True)
        self._is_shown = True

    def _erase(self) -> None:
        if self._is_shown:
            print(ERASE, end="", file=self._out, flush=True)
            self._is_shown = False


def _width() -> int:
    """The width of the terminal."""
    from shutil import get_terminal_size  # a command in a pipe does without it

    return get_terminal_size().columns


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
            self.terminal = Terminal(_width(), colors, time.time_ns())
        self._working: _Working | None = None

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """On a terminal, show that a command works whenever it has been silent for `QUIET_S`, on
        standard error; nothing with `--json`, or with an empty `doing`."""
        if self.json or not doing or not sys.stderr.isatty():
            yield
            return
        self._working = _Working(sys.stderr, doing)
        try:
            yield
        finally:
            self._working.end()
            self._working = None

    def left_to_others(self) -> AbstractContextManager[None]:
        """Show no progress within the block: a person, or another program, has the terminal."""
        return self._working.hidden() if self._working else nullcontext()

    def document(self, document: Mapping[str, object]) -> None:
        """Print the one JSON document of a command. Nothing without `--json`."""
        if self.json:
            indent = 2 if self._out.isatty() else None
            print(json.dumps(to_json(document), allow_nan=False, indent=indent), file=self._out)

    def print(self, parts: Iterable[Part]) -> None:
        """Print a page. Nothing with `--json`."""
        if not self.json:
            for part in parts:
                lines = [*self.lines(part)]
                with self.left_to_others():
                    for line in lines:
                        print(line if self._unicode else line.translate(_ASCII), file=self._out)
                    self._out.flush()

    def complain(self, text: str) -> None:
        """Print a problem on standard error."""
        self._out.flush()
        with self.left_to_others():
            print(f"ckptstore: {printable(text)}", file=sys.stderr)

    def ask(self, question: str) -> bool:
        """Whether a person says yes; no without a terminal to type at."""
        if not sys.stdin.isatty():
            return False
        with self.left_to_others():
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
        line = self._working
        show = _print_json if self.json else line.say if line else None
        next_s = 0.0

        def shown(phase: str, done: int, total: int) -> None:
            nonlocal next_s
            if show and (time.monotonic() >= next_s or not done or done == total):
                next_s = time.monotonic() + PROGRESS_PAUSE_S
                show(phase, done, total)

        self._out.flush()
        if line and doing:
            line.say(f"{doing} …")
        try:
            yield shown
        finally:
            if line:
                line.say("")

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
