"""How is text written for people, in lines and in tables, how does it lose its secrets, and which
paths match a glob?

Tables are plain text, or fitted to a terminal.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, Literal, TypeAlias
from unicodedata import east_asian_width

from ckptstore.errors import InvalidInput

SECOND_NS = 1_000_000_000

_AGES = ((60, 1, "s"), (3_600, 60, "min"), (2 * 86_400, 3_600, "h"), (30 * 86_400, 86_400, "d"))


def bytes_text(n: float) -> str:
    """`1536` is `1.5 KiB`; whole numbers below 1 KiB."""
    if abs(n) < 1024:
        return f"{int(n)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        n /= 1024
        if abs(n) < 1024 or unit == "TiB":
            break
    return f"{n:.1f} {unit}" if abs(n) < 100 else f"{n:.0f} {unit}"


def seconds_text(s: float) -> str:
    """`0.0123` is `12 ms`, `4.2` is `4.2 s`, `90` is `1 min 30 s`."""
    if s < 0.9995:
        return f"{s * 1000:.0f} ms"
    if s < 59.95:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count_text(n: int, noun: str, plural: str = "") -> str:
    """`1 commit`, `2 commits`, `12,000 commits`; `plural` where it is not the noun and an s."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def age_text(time_ns: int, now_ns: int) -> str:
    """`12 s`, `3 min`, `5 h`, `12 d`; the local date if it is over a month ago or in the future."""
    seconds = (now_ns - time_ns) // SECOND_NS
    if seconds >= 0:
        for limit, unit_s, unit in _AGES:
            if seconds < limit:
                return f"{seconds // unit_s} {unit}"
    return local_text(time_ns)[:10]


def local_text(time_ns: int) -> str:
    """`2026-11-20 23:22:01 +0100`, in the time zone of the reader."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time_ns // SECOND_NS))


def utc_text(time_ns: int) -> str:
    """`2026-11-20T22:22:01Z`: sorts as it is, and has no spaces."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns // SECOND_NS))


def exact_text(time_ns: int) -> str:
    """`2026-11-20T22:22:01.000000042Z`: every nanosecond."""
    return f"{utc_text(time_ns)[:-1]}.{time_ns % SECOND_NS:09d}Z"


def unicode_text(name: str) -> str:
    """A file's name as text that can be stored: bytes that are not Unicode become escapes."""
    return name.encode(errors="backslashreplace").decode()


def near(wanted: str, names: Iterable[str], count: int = 3) -> str:
    """`"; did you mean 'a' or 'b'?"`, or an empty text if no name is similar."""
    import difflib  # only here: seldom needed

    found = difflib.get_close_matches(wanted, list(names), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


MASK = "***"

_SECRET_NAME = re.compile(
    r"key|secret|token|passw|pwd|credential|sas|signature$|^sig$", re.IGNORECASE
)
_USER_INFO = re.compile(
    r"(?<=://)(?:[^/@:\s]*:\S*|[^/\s]*)@|(?<![^\s'\"=(])[^/@:\s'\"=(]+:(?!//)[^\s'\"]*@"
)
"""An unquoted password may contain any character, `/` and `@` too: it runs from the colon to the
last `@`. Without a scheme in front (`USER:PASSWORD@HOST/DATABASE`), it ends at a quote."""

_SECRET_OPTION = re.compile(
    r"([?&](?:[^=&\s]*(?:key|secret|token|passw|pwd|credential|signature)[^=&\s]*|sig|sas)=)[^&\s'\"]*",
    re.IGNORECASE,
)
_PLAIN_NAME = (
    r"\w*(?:secret|passw(?:or)?d|pwd|credential)\w*"
    r"|\w*(?:access|account|api|session)_?(?:key|token)\w*"
)
_ASSIGNED = re.compile(
    rf"""(?<![\w/.-])((?:(?:{_PLAIN_NAME})\s*=\s*|(['"])(?:{_PLAIN_NAME})\2\s*:\s*|(?=\w*_)(?:{_PLAIN_NAME}):\s*)(['"]?))"""
    r"""((?<=')[^']*|(?<=")[^"]*|(?<!['"])[^\s'",;)}\]&]+)""",
    re.IGNORECASE,
)
"""As connection strings, JSON and Python write it: `password=…`, `"secret": "…"`,
`aws_secret_access_key: …`."""

_SHORTEST = 6
"""Shorter values are ordinary words (`test`), not secrets."""


def redact(text: str) -> str:
    """`text` with the user part of every URL, and every value named like a secret, replaced by
    `***`."""
    return _ASSIGNED.sub(
        rf"\1{MASK}", _SECRET_OPTION.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))
    )


def without(text: str, secrets: frozenset[str]) -> str:
    """`redact(text)` with every occurrence of `secrets` replaced, too."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return redact(text)


def secrets_of(options: Mapping[str, Any]) -> frozenset[str]:
    """The values in `options`, at any depth, whose names mark them as secret."""
    return frozenset(value for value in _secrets(options) if len(value) >= _SHORTEST)


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and _SECRET_NAME.search(str(name)):
            yield value


def selector(select: str | Sequence[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    """A predicate for paths that match the glob, or one of several, in full or below their key; a
    function is the predicate already.

    `*`, `?` and `[…]` work as in `fnmatch`, and `*` also matches `/`. A glob that matches a
    container selects its content. The literal text of a path matches even if it has brackets.
    Raises `InvalidInput` for anything else.
    """
    if callable(select):
        return select
    globs = (
        (select,) if isinstance(select, str) or not isinstance(select, Sequence) else tuple(select)
    )
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise InvalidInput(
            f"select is {select!r:.80}; wanted a glob such as 'layers.*', or several"
        )
    found = re.compile("|".join(_pattern(glob.rstrip("/") or glob) for glob in globs)).match

    def is_selected(path: str) -> bool:
        below = path.partition("/")[2]
        return bool(found(path) or (below and found(below)))

    return is_selected


def _pattern(glob: str) -> str:
    literal = rf"(?s:{re.escape(glob)}(?:/.*)?)\Z"
    return f"{translate(glob)}|{translate(f'{glob}/*')}|{literal}"


GAP = 2
ID_DIGITS = 12
ID_DIGITS_ON_TERMINALS = 8

Kind: TypeAlias = Literal["text", "id", "step", "count", "bytes", "time", "seconds", "metric"]

_BREAKS = re.compile(r"(?<=\s)(?=\S)|(?<=[/.])(?=[^\W\d])")
"""Where a wrapped cell may be broken: not before the digits of `1.5` and `layers.0`."""

_STYLES: dict[str, str] = {"id": "33", "metric": "36"}
"""The colors of kinds, as parameters of the terminal's SGR sequence."""

_LEFT: tuple[Kind, ...] = ("text", "id")
"""The kinds of columns whose cells begin on the left."""

BOLD, DIM, BLUE, CYAN, TITLE, TAG = "1", "2", "34", "36", "1;4", "1;32"


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` says how values are written. `fit` says what happens to a cell that is too wide for
    the terminal: it is `cut`, `wrap`ped, or kept.

    If a terminal is too narrow for all columns, the `spare` ones are left out, the last one first.
    A cut or wrapped cell keeps at least `least` characters. `style` is a parameter of the
    terminal's SGR sequence.
    """

    name: str
    kind: Kind = "text"
    fit: Literal["keep", "cut", "wrap"] = "keep"
    spare: bool = False
    style: str = ""
    least: int = 8


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal that shows a page, and the time of the reader."""

    width: int
    colors: bool
    now_ns: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values, one value per column; None is an empty cell. Without `header`, the names of
    columns are not shown, and `hidden` ones are not shown at all."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    header: bool = True
    hidden: frozenset[str] = frozenset()

    def without(self, *names: str) -> "Table":
        """The table without the columns `names`."""
        return replace(self, hidden=self.hidden.union(names))

    def without_empty(self, *names: str) -> "Table":
        """The table without those columns of `names` that have no value."""
        used = {column.name for column, values in self.by_column() if any(values)}
        return self.without(*(name for name in names if name not in used))

    def by_column(self) -> Iterator[tuple[Column, Sequence[Any]]]:
        """Each column that is shown, with its values from the first row to the last."""
        values = zip(*self.rows, strict=True) if self.rows else repeat((), len(self.columns))
        for column, down in zip(self.columns, values, strict=True):
            if column.name not in self.hidden:
                yield column, down

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, terminal: Terminal | None = None) -> Iterator[str]:
        """The aligned lines, with an empty line above a title.

        Plain text has names in capitals and `-` for an empty cell, and cuts nothing. On a terminal,
        spare columns go if even the least widths of all columns are too much; then cells are cut or
        wrapped, those on the right first.
        """
        if not (self.rows or self.header):
            return
        indent, gap = " " * GAP if self.title else "", " " * GAP
        if self.title:
            yield ""
            yield style(printable(self.title), TITLE if terminal and terminal.colors else "")
        shown = [_Shown(*each, terminal, header=self.header) for each in self.by_column()]
        width = terminal.width if terminal else sys.maxsize
        fitted = _fitted(shown, width - len(indent))
        blanks = [" " * each.width for each in fitted]
        for row in zip(*(each.cells() for each in fitted), strict=True):
            line = gap.join(row)
            if "\n" in line:  # the last line of each cell is blank, where others are higher
                cells = [
                    (*cell.split("\n"), blank) for cell, blank in zip(row, blanks, strict=True)
                ]
                for n in range(max(map(len, cells)) - 1):
                    yield (
                        indent + gap.join([cell[min(n, len(cell) - 1)] for cell in cells]).rstrip()
                    )
            else:
                yield indent + line.rstrip()


class _Shown:
    """A column with its texts (the first may be the column's name) and its width."""

    def __init__(
        self, column: Column, values: Iterable[Any], terminal: Terminal | None, *, header: bool
    ) -> None:
        self.column, self._header, self._terminal = column, header, terminal
        write, empty = _writer(column.kind, terminal), "-" if header and not terminal else ""
        self._texts = ["" if value is None else write(value) for value in values]
        if not "".join(self._texts).isprintable():
            self._texts = list(map(printable, self._texts))
        self._texts = [text or empty for text in self._texts]
        if header:
            self._texts.insert(0, printable(_name(column, terminal)))
        self._is_ascii = "".join(self._texts).isascii()
        self.width = self._whole = max(map(len if self._is_ascii else _width, self._texts))
        self.least = self.width if column.fit == "keep" else min(self.width, column.least)

    def cells(self) -> Iterable[str]:
        """The cells, as wide as the column: several lines each where they are folded."""
        column, width = self.column, self.width
        colors = self._terminal is not None and self._terminal.colors
        if self._is_ascii and width == self._whole and not colors:  # there may be millions
            pad = str.ljust if column.kind in _LEFT else str.rjust
            return [pad(text, width) for text in self._texts]
        look = column.style or _STYLES.get(column.kind, "") if colors else ""
        head = DIM if colors and self._header else look
        return (
            self._cell(text, look if number else head) for number, text in enumerate(self._texts)
        )

    def _cell(self, text: str, parameter: str) -> str:
        fits = _width(text) <= self.width
        lines = [text] if fits else _folded(text, self.column.fit, self.width)
        return "\n".join([self._padded(line, parameter) for line in lines])

    def _padded(self, text: str, parameter: str) -> str:
        space, shown = " " * (self.width - _width(text)), style(text, parameter)
        return shown + space if self.column.kind in _LEFT else space + shown


def fields(title: str, pairs: Sequence[tuple[str, ...]]) -> Table:
    """Names with their values and, in third place, what the values mean."""
    columns = (Column("name", style=BOLD), Column("value", fit="wrap"), Column("", fit="cut"))
    rows = [(name, value, *(why or ("",))) for name, value, *why in pairs]
    return Table(columns, rows, title, header=False).without_empty("")


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
    return column.name.upper() if not terminal else "age" if column.name == "time" else column.name


def _writer(kind: Kind, terminal: Terminal | None) -> Callable[[Any], str]:
    """The function that writes values of a kind."""
    match kind:
        case "id":
            return itemgetter(slice(ID_DIGITS_ON_TERMINALS if terminal else ID_DIGITS))
        case "count":
            return "{:,}".format
        case "bytes":
            return bytes_text
        case "time":
            return partial(age_text, now_ns=terminal.now_ns) if terminal else utc_text
        case "seconds":
            return seconds_text
        case "metric":
            return "{:.6g}".format
    return _text


def _text(item: Any) -> str:
    return ", ".join(item) if isinstance(item, tuple) else str(item)


def _fitted(columns: Sequence[_Shown], width: int) -> Sequence[_Shown]:
    """The columns that are left on so wide a terminal, with the widths that they get there."""
    left = list(columns)
    for each in reversed(columns):
        if each.column.spare and _total([one.least for one in left]) > width:
            left.remove(each)
    for each in reversed(left):
        excess = _total([one.width for one in left]) - width
        each.width -= min(each.width - each.least, max(excess, 0))
    return left


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _width(text: str) -> int:
    """The columns of a terminal that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


def _folded(cell: str, fit: str, width: int) -> list[str]:
    """The lines of a cell that is too wide. Those of a wrapped one end at a space, or behind the
    `/` or `.` of a path, where that is possible."""
    if fit != "wrap":
        return [f"{_head(cell, width - 1)}…"]
    lines = [""]
    for part in _BREAKS.split(cell):
        if lines[-1] and _width(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while _width(lines[-1].rstrip()) > width:
            head = _head(lines[-1], width)
            lines[-1:] = [head, lines[-1].removeprefix(head)]
    return [line.rstrip() for line in lines]


def _head(text: str, width: int) -> str:
    """The beginning of `text` that is as wide as this at most, and at least one character."""
    text = text[: max(width, 1)]
    while len(text) > 1 and _width(text) > width:
        text = text[:-1]
    return text
