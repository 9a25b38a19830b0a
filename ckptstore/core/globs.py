"""Which leaves does a glob select?

Those whose path it matches, in full or below its key. `*`, `?` and `[…]` work as in `fnmatch`,
and `*` also matches `/`. A glob that matches a container selects its content. The literal text
of a path matches even if it has brackets.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from ckptstore.errors import InvalidInput


def selector(select: str | Sequence[str]) -> Callable[[str], bool]:
    """A predicate for paths that match the glob, or one of several. Raises `InvalidInput` for
    anything else."""
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
