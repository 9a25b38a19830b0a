"""An interrupt that comes before a call has begun, and ends it, is raised."""

import threading

import pytest

from ckptstore.repository import thread_pool
from tests.support.interrupts import interrupting


@pytest.mark.parametrize("after", range(1, 40, 2))
def test_who_is_interrupted_hears_of_that_and_of_nothing_else(after: int) -> None:
    stop, begun = threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        if stop.wait(0.02):
            raise ValueError("it was told to stop")

    raised = False
    try:
        with interrupting(frozenset({thread_pool.__file__}), [after]):
            thread_pool.wholly(act, stop.set)
    except KeyboardInterrupt:
        raised = True
    assert raised or not stop.is_set()
    assert raised or begun.is_set()
