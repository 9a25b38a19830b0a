"""How is text written for people, how does it lose its secrets, and which paths match a glob?"""

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

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


def selector(select: str | Sequence[str]) -> Callable[[str], bool]:
    """A predicate for paths that match the glob, or one of several, in full or below their key.

    `*`, `?` and `[…]` work as in `fnmatch`, and `*` also matches `/`. A glob that matches a
    container selects its content. The literal text of a path matches even if it has brackets.
    Raises `InvalidInput` for anything else.
    """
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
