"""Progress on stderr: one line that renews itself on a terminal, nothing but the phases
elsewhere."""

import sys


def note(text: str) -> None:
    """A detail, replaced by the next one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:120]}", end="", file=sys.stderr, flush=True)


def phase(text: str) -> None:
    """A line that stays."""
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
