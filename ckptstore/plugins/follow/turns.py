"""Who may use a target now? Several readers, or one writer, each within a bounded wait.

A writer that waits goes before new readers, so that readers who overlap cannot keep it out. A
thread that reads already may read again at any time: it would wait for a writer that waits for it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.work import Condition


class Turns:
    """The turns of readers and writers of one target. Threads share it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._readers: dict[object, int] = {}
        self._waiting: set[object] = set()
        self._writer: object = None
        self.passed = 0
        """How often readers came or went. Who writes has read it before; no reader is within."""

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Within it, nothing is written. Raises `Unavailable` after `timeout_s`."""
        turn, me = object(), threading.get_ident()
        try:
            with self._changed:
                if me not in self._readers.values():
                    self._await(
                        lambda: self._writer is None and not self._waiting,
                        timeout_s,
                        "a commit is being applied to the target, or waits for its readers",
                    )
                self._readers[turn] = me
                self.passed += 1
            yield
        finally:
            # First, and in C: an interrupt may end anything that is written in Python.
            self.passed += 1
            self._readers.pop(turn, None)
            with self._changed:
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raise `InvalidInput` in a thread that reads."""
        if threading.get_ident() in list(self._readers.values()):
            raise InvalidInput(
                "wait() within frozen() would wait for itself; nothing was applied; call it outside"
            )

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[None]:
        """Within it, nobody reads. Raises `Unavailable` after `timeout_s`."""
        turn = object()
        try:
            with self._changed:
                self._waiting.add(turn)
                self._await(
                    lambda: self._writer is None and not self._readers,
                    timeout_s,
                    "readers are within frozen()",
                )
                self._writer = turn
            yield
        finally:
            if self._writer is turn:
                self._writer = None
            self._waiting.discard(turn)
            with self._changed:
                self._changed.notify_all()

    def _await(self, is_my_turn: Callable[[], bool], timeout_s: float, why: str) -> None:
        if not self._changed.wait_for(is_my_turn, timeout_s):
            raise Unavailable(
                f"waited {timeout_s:g} s: {why}; the target is unchanged; repeat, or allow more "
                "with turn_timeout_s"
            )
