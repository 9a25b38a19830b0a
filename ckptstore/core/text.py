"""How are sizes, times, counts and suggestions written for people?"""

import difflib
from collections.abc import Iterable


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


def count_text(n: int, noun: str) -> str:
    """`1 commit`, `2 commits`, `12,000 commits`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def unicode_text(name: str) -> str:
    """A file's name as text that can be stored: bytes that are not Unicode become escapes."""
    return name.encode(errors="backslashreplace").decode()


def near(wanted: str, names: Iterable[str], count: int = 3) -> str:
    """`"; did you mean 'a' or 'b'?"`, or an empty text if no name is similar."""
    found = difflib.get_close_matches(wanted, list(names), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
