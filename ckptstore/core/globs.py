"""Which leaves a glob selects: those whose path it matches, in full or below its key.

`*`, `?` and `[…]` are those of `fnmatch`, and `*` does not stop at `/`. A glob that matches a
container selects what is in it. Text that stands in a path as it is matches even where it has
brackets.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from ckptstore.errors import InvalidInput


def selector(select: str | Sequence[str]) -> Callable[[str], bool]:
    """Whether a path is selected by the glob, or by one of several. Raises `InvalidInput` for what
    is no glob."""
    globs = (
        (select,) if isinstance(select, str) or not isinstance(select, Sequence) else tuple(select)
    )
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise InvalidInput(
            f"select is {select!r:.80}; wanted a glob such as 'layers.*', or several"
        )
    found = re.compile(
        "|".join(
            alternative for glob in globs for alternative in _alternatives(glob.rstrip("/") or glob)
        )
    ).match

    def is_selected(path: str) -> bool:
        below = path.partition("/")[2]
        return bool(found(path) or (below and found(below)))

    return is_selected


def _alternatives(glob: str) -> tuple[str, ...]:
    return translate(glob), translate(f"{glob}/*"), rf"(?s:{re.escape(glob)}(?:/.*)?)\Z"
