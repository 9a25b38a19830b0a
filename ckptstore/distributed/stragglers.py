"""Says whom a rank waits for, long before the time-out ends the wait."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger("ckptstore")

PART = 10
"""After one such part of the time-out it is said, once."""


@contextmanager
def told(what: str, timeout_s: float, absent: Callable[[], str]) -> Iterator[None]:
    """Log a warning if the block takes long. `absent`, asked on another thread, says who is waited
    for; nothing if it is nobody."""
    after_s = timeout_s / PART

    def tell() -> None:
        if who := absent():
            logger.warning(
                "%s has waited %.3g s for %s; it gives up after %g s", what, after_s, who, timeout_s
            )

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started: then nothing is said
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def named(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
