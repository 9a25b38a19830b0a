"""How work that makes many objects and drops none of them is spared Python's cycle collector.

A walk over 10,000 tensors keeps some 60,000 new objects; meanwhile the collector looks through all
that the process has, torch's included, once or twice, which takes longer than the walk. Only short
work without I/O belongs here: the whole process goes without it meanwhile, and cycles that hold a
device's memory are freed later.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it no collection begins by itself. Threads may be inside at once: the last one out
    turns the collector on again, if the first one in turned it off."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _was_on
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside = max(_inside - 1, 0)
        if _inside == 0 and _was_on:
            gc.enable()


def _in_child() -> None:
    """A process that was forked meanwhile has none of the threads that are inside."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


os.register_at_fork(after_in_child=_in_child)
