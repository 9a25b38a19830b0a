"""How are slow or missing ranks reported? By a warning while others wait, and then as the cause in
the error."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger("ckptstore")

PART = 10
"""A warning names the missing ranks after the timeout divided by this."""

SOON_S = 5.0
"""The first time that ranks are late for a call, a warning names them after this time at most."""

EVERY_RANK = (
    "every rank has to make this call, not only one under `if rank == 0:`; a rank that works alone "
    "passes ranks=Ranks(process_group='alone')"
)
"""The advice about ranks that did not come. Of `torch.save` the habit is that one rank calls it."""

MEETINGS = {
    "commit: plan": "store.commit",
    "commit: begin": "store.commit_async",
    "every: decide": "store.every",
    "restore: bind": "restore",
    "resume: choose": "store.resume",
}
"""The first rounds of calls that every rank has to make."""


@contextmanager
def warning_when_slow(
    what: str, timeout_s: float, absent: Callable[[], str], *, soon: bool = False, advice: str = ""
) -> Iterator[None]:
    """Log a warning, with `advice`, if the block takes long, or already `soon`. `absent` runs on
    another thread and names the missing ranks; an empty string suppresses the warning.
    """
    after_s = min(timeout_s / PART, SOON_S) if soon else timeout_s / PART

    def tell() -> None:
        if missing := absent():
            logger.warning(
                "%s has waited %.3g s for %s; it gives up after %g s%s",
                what,
                after_s,
                missing,
                timeout_s,
                f"; {advice}" if advice else "",
            )

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started: wait without a warning
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def named(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def told(error: BaseException) -> str:
    """The first sentence of a link's error, without gloo's source location before it."""
    line = str(error).partition("\n")[0].partition(". ")[0]
    return re.sub(r"^\[\S+:[0-9]+\] ", "", line)[:200]


def silent(heads: Mapping[int, tuple[Any, bytearray]]) -> str:
    """The ranks that have sent nothing yet. A head that has arrived contains the round's name."""
    found = [rank for rank, (_, head) in heads.items() if not any(head)]
    return f"{named(found)}, silent so far" if found else ""
