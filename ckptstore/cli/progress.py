"""How far a long job is, on standard error: a line that changes for people, JSON Lines for
programs, nothing in a pipe."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.cli.screen import Screen
from ckptstore.cli.table import printable

PAUSE_S = 0.1


@contextmanager
def progress(screen: Screen) -> Iterator[Callable[[str, int, int], None]]:
    """A function that takes the phase, what is done of it and what there is to do; each phase's
    beginning and end are always shown."""
    if screen.json:
        yield _Shown(_print_json)
    elif sys.stderr.isatty():
        screen.flush()
        try:
            yield _Shown(_print_line)
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    else:
        yield lambda phase, done, total: None


class _Shown:
    """Shows not every step, but some of each second."""

    def __init__(self, show: Callable[[str, int, int], None]) -> None:
        self._show = show
        self._next_s = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or not done or done == total:
            self._next_s = now_s + PAUSE_S
            self._show(phase, done, total)


def _print_json(phase: str, done: int, total: int) -> None:
    print(json.dumps({"phase": phase, "done": done, "total": total}), file=sys.stderr, flush=True)


def _print_line(phase: str, done: int, total: int) -> None:
    share = f"{done / total:.0%}" if total else ""
    print(f"\r\x1b[K{printable(phase)} {share}", end="", file=sys.stderr, flush=True)
