"""What becomes of an open store in a forked child? The one place that knows of forks.

A child has a copy of its parent's memory, and of its threads only the one that forked. So each lock
that another thread may have held is free in the child (`lock`), each object that has threads,
connections or work in flight leaves them to the parent (`survives_forks`), and a library that does
not bear a fork in the midst of its work is halted meanwhile (`halts_for_forks`). What only the
parent can answer, such as a commit in flight, is refused where it is asked for.
"""

import os
import threading
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """An object that a forked child may go on using."""

    def forked(self) -> None:
        """Have nothing that a thread of the parent may have been changing, and nothing that only
        the parent can use or end."""


class Halting(Forked, Protocol):
    """An object whose work must not be in progress at a fork."""

    def halt(self) -> None:
        """Before a fork: wait for the work in progress, and let none begin."""

    def go_on(self) -> None:
        """In the parent, after the fork. A child calls `forked` instead."""


_locks: "WeakSet[threading.Lock]" = WeakSet()
_surviving: "WeakSet[Forked]" = WeakSet()
_halting: "WeakSet[Halting]" = WeakSet()
_innermost: "WeakSet[Halting]" = WeakSet()
_one_fork = threading.Lock()
"""Held during a fork: those of two threads take turns."""
_halted: list[Halting] = []


def lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def survives_forks(owner: Forked) -> None:
    """Call `owner.forked` now, and in each forked child as long as `owner` lives."""
    owner.forked()
    _surviving.add(owner)


def halts_for_forks(owner: Halting, *, innermost: bool = False) -> None:
    """Halt `owner` during each fork as long as it lives. One that threads enter while they are
    within the work of others, also through the garbage collector, is `innermost`: it is halted
    after the others."""
    (_innermost if innermost else _halting).add(owner)


def _before() -> None:
    _one_fork.acquire()
    for owner in (*_halting, *_innermost):
        owner.halt()
        _halted.append(owner)


def _in_parent() -> None:
    while _halted:
        _halted.pop().go_on()
    _one_fork.release()


def _in_child() -> None:
    _one_fork.release()
    for each in list(_locks):
        each._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` and `logging` do
    while _halted:
        _halted.pop().forked()
    for owner in list(_surviving):
        owner.forked()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
