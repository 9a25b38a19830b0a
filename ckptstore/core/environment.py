"""Which settings does the environment give? Names are `$CKPTSTORE_` and the argument of `open`.

`core.settings` checks all of them with pydantic. Commands that must start quickly take the two
that they need from here.
"""

import os

from ckptstore.core.config import DEFAULT_RUN, THREADS_MAX, default_threads
from ckptstore.core.ids import check_run
from ckptstore.errors import InvalidInput


def setting(name: str) -> str | None:
    """The text of `$CKPTSTORE_NAME`; None if it is not set."""
    return os.environ.get(f"CKPTSTORE_{name.upper()}")


def run_or_default(given: str | None) -> str:
    """The run `given`, else `$CKPTSTORE_RUN`, else `main`. Raises `InvalidInput`."""
    return check_run(given or setting("run") or DEFAULT_RUN)


def threads_or_default() -> int:
    """`$CKPTSTORE_THREADS`, else a number by the processors. Raises `InvalidInput`."""
    text = setting("threads")
    if text is None:
        return default_threads()
    if text.isdecimal() and 1 <= int(text) <= THREADS_MAX:
        return int(text)
    raise InvalidInput(
        f"$CKPTSTORE_THREADS is {text!r:.40}; wanted a whole number from 1 to {THREADS_MAX}"
    )
