"""What becomes of an open store in a forked child? All handling of forks is in this module.

A child has a copy of its parent's memory, but only the thread that forked. So locks that another
thread may have held are free in the child (`lock`). Objects with threads, connections or work in
flight leave these to the parent (`survives_forks`). A library that cannot be forked during its work
is halted meanwhile (`halts_for_forks`). A call that only the parent can answer, such as waiting for
its commit in flight, is refused in the child.

Locks that an interrupt leaves free are here as well (`Condition`).
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partialmethod
from operator import attrgetter
from typing import Any, Generic, Protocol, Self, TypeVar, overload
from weakref import WeakSet

T = TypeVar("T")


class Forked(Protocol):
    """An object that a forked child may go on using."""

    def forked(self) -> None:
        """In the child: drop everything that a thread of the parent may have been changing, and
        everything that only the parent can use or end."""


class Halting(Forked, Protocol):
    """An object whose work must not be in progress at a fork."""

    def halt(self) -> None:
        """Before a fork: wait for the work in progress, and let none begin."""

    def go_on(self) -> None:
        """In the parent, after the fork. A child calls `forked` instead."""


_locks: "WeakSet[Any]" = WeakSet()
_surviving: "WeakSet[Forked]" = WeakSet()
_halting: "tuple[WeakSet[Halting], ...]" = (WeakSet(), WeakSet(), WeakSet())
"""One set for each turn of `halts_for_forks`."""
_one_fork = threading.Lock()
"""Held during a fork: those of two threads take turns."""
_halted: list[Halting] = []


def lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


class cached_property(Generic[T]):  # as the one of functools
    """As `functools.cached_property`, and computed once however many threads ask, on every version
    of Python. If another thread was computing it at a fork, the child computes it anew; the lock in
    functools' version would stay held there for ever."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.__doc__ = compute.__doc__
        self._compute = compute
        self._lock = threading.RLock()
        _locks.add(self._lock)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        with self._lock:
            values = vars(instance)
            if self._name not in values:
                values[self._name] = self._compute(instance)
            found: T = values[self._name]
            return found


class Condition(threading.Condition):
    """As threading's, but a KeyboardInterrupt in it harms nobody.

    `with` calls its lock itself. There, it calls functions in Python, and an interrupt as one
    begins or ends leaves the lock held for ever. One within `notify` leaves a waiter in the list
    that has woken up already, which the next `notify` would take for the one to wake: so each wakes
    all who wait.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    notify = partialmethod(threading.Condition.notify, sys.maxsize)
    notify_all = notify


def new_event() -> threading.Event:
    """An event with a condition of ours."""
    made = threading.Event()
    made._cond = Condition(threading.Lock())  # type: ignore[attr-defined]
    return made


def new_future() -> "Future[Any]":
    """A future with a condition of ours."""
    made: Future[Any] = Future()
    made._condition = Condition()
    return made


def survives_forks(owner: Forked) -> None:
    """Call `owner.forked` now, and in each forked child as long as `owner` lives."""
    owner.forked()
    _surviving.add(owner)


def halts_for_forks(owner: Halting, *, turn: int = 1) -> None:
    """Halt `owner` during each fork as long as it lives, after those of lower turns.

    Turn 0 has the garbage collector, whose finalizers enter the others. Turn 2 has what threads
    enter while they are inside others.
    """
    _halting[turn].add(owner)


def _before() -> None:
    _one_fork.acquire()
    for owner in (owner for turn in _halting for owner in list(turn)):
        owner.halt()
        _halted.append(owner)


def _in_parent() -> None:
    while _halted:
        _halted.pop().go_on()
    _one_fork.release()


def _in_child() -> None:
    _one_fork.release()
    for each in list(_locks):
        each._at_fork_reinit()
    while _halted:
        _halted.pop().forked()
    for owner in list(_surviving):
        owner.forked()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
