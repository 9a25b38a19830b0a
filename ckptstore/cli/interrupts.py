"""How does Ctrl-C end a command at once, also while threads work, or wait for a server?

The first one raises `KeyboardInterrupt`, so that files that are not complete are removed. If the
process has not ended soon after, or at a second one, it ends as if it was killed, which a store
survives at any moment.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

from ckptstore.cli.call import Exit

GRACE_S = 1.5

told = threading.Event()
"""Whether the command has said that it was interrupted."""


def end_at_once() -> None:
    """From now on, Ctrl-C ends this process within about `GRACE_S`. Nothing changes for a process
    that ignores Ctrl-C or handles it otherwise."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _kill)
    with suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=_kill_later, name="interrupted", daemon=True).start()
    signal.default_int_handler(number, frame)


def _kill_later() -> None:
    time.sleep(GRACE_S)
    _kill()


def _kill(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    with suppress(OSError):
        if told.is_set():
            os._exit(Exit.INTERRUPTED)
        erase = "\r\x1b[K" if os.isatty(2) else ""
        os.write(2, f"{erase}ckptstore: interrupted\n".encode())
    os._exit(Exit.INTERRUPTED)
