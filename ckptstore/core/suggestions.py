"""A few names that somebody who mistyped may have meant."""

import difflib
from collections.abc import Iterable


def near(wanted: str, names: Iterable[str], count: int = 3) -> str:
    """`"; did you mean 'a' or 'b'?"`, or nothing where no name is near."""
    found = difflib.get_close_matches(wanted, list(names), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
