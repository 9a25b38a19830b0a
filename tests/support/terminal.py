"""What a person at a terminal sees of a command, and answers when it asks."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterable, Iterator

COLUMNS = 160
"""As wide as a page's lines: narrower, a table would break where an id or an age is longer."""

SILENCE_S = 300.0
_PROMPT = re.compile(r"\[y/N\] \Z")
_ANSWER = re.compile(r"\[y/N\] (\w*)$", re.MULTILINE)
_ERASED = re.compile(r"[^\n]*\r\x1b\[K")


def open_terminal() -> tuple[int, int]:
    """The descriptors of our side of a new terminal, and of the side of the commands."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    return ours, theirs


def answers_in(shown: str) -> list[str]:
    """What a page shows as typed at the questions of a command."""
    return _ANSWER.findall(shown)


def lines_seen(ours: int, answers: Iterable[str] = ()) -> Iterator[str]:
    """The lines that appear, until the other side is closed. Each question is answered by the next
    of `answers`, or by return alone; a line of progress that is erased does not count."""
    typed, unseen = iter(answers), ""
    while data := _read(ours):
        unseen += data.replace("\r\n", "\n")
        if _PROMPT.search(unseen):
            os.write(ours, f"{next(typed, '')}\n".encode())
        *whole, unseen = unseen.split("\n")
        yield from (f"{_ERASED.sub('', line)}\n" for line in whole)
    if unseen:
        yield _ERASED.sub("", unseen)


def _read(ours: int) -> str:
    """What has appeared; nothing once the other side is closed."""
    data = b""
    while True:
        if not select.select([ours], [], [], SILENCE_S)[0]:
            raise AssertionError(f"nothing appeared for {SILENCE_S:.0f} s; the last was {data!r}")
        try:
            piece = os.read(ours, 65_536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return data.decode(errors="replace")
        data += piece
        # A line ending, or a character, may have arrived by half.
        if not piece or not (data.endswith(b"\r") or _is_cut(data)):
            return data.decode(errors="replace")


def _is_cut(data: bytes) -> bool:
    """Whether the last character has not arrived whole."""
    for length in range(1, min(4, len(data) + 1)):
        byte = data[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def environment_of_terminal() -> dict[str, str]:
    """Variables of a terminal without colors."""
    return {"TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": str(COLUMNS), "TZ": "UTC"}
