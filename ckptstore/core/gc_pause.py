"""How does short work that creates many objects avoid Python's cycle collector?

A walk over 10,000 tensors keeps about 60,000 new objects. Meanwhile the collector scans every
object of the process, torch's included, once or twice, which takes longer than the walk. Use it
only for short work without I/O: it affects the whole process, and cycles that hold device memory
are freed later.
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
    """No automatic collection begins within the block. Threads may enter it concurrently: the
    last one out enables the collector again, if the first one disabled it."""
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
    """A forked child has none of the threads that were inside."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


os.register_at_fork(after_in_child=_in_child)
