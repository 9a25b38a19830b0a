"""Python's cycle collector is off where that was asked for, and nowhere else."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest
import torch

from ckptstore.core import forks, process
from ckptstore.core.process import uncollected
from ckptstore.state.flatten import flatten
from tests.support.interrupts import interrupting


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if was_on else gc.disable()


def test_no_collection_begins_within_and_what_was_on_is_on_again() -> None:
    with uncollected():
        before = gc.get_stats()
        kept = [[] for _ in range(20 * gc.get_threshold()[0])]
        assert gc.get_stats() == before
    assert gc.isenabled() and kept


def test_what_was_off_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_a_failure_and_after_the_outer_of_two() -> None:
    within = []

    def work() -> None:
        with uncollected():
            with uncollected():
                pass
            within.append(gc.isenabled())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert within == [False]
    assert gc.isenabled()


def test_of_several_threads_the_last_one_out_turns_it_on() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_process_that_is_forked_meanwhile_collects() -> None:
    with uncollected():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()


class Finalized:
    """Garbage that takes its time: other threads run while it is collected."""

    begun: threading.Event

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.begun.set()
        time.sleep(0.3)


def _collects() -> bool:
    """Whether the collector finds garbage here: not while a collection is in progress."""
    garbage = Finalizable()
    found = weakref.ref(garbage)
    del garbage
    gc.collect()
    return found() is None


class Finalizable:
    def __init__(self) -> None:
        self.itself = self


def test_a_child_is_not_forked_in_the_middle_of_a_collection() -> None:
    """It would never collect again, and its lists of objects would begin on the stack of a thread
    that it does not have: it may crash at any later moment."""
    Finalized.begun = threading.Event()

    def collect() -> None:
        Finalized()
        gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    assert Finalized.begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() and _collects() else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    thread.join()
    assert code == 0
    assert gc.isenabled()


def test_a_fork_within_a_collection_of_its_own_thread_does_not_wait_for_itself() -> None:
    codes = []

    class Forks(Finalizable):
        def __del__(self) -> None:
            child = os.fork()
            if child == 0:
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    Forks()
    gc.collect()
    assert codes == [0]
    assert gc.isenabled()


def test_a_walk_over_many_leaves_waits_for_no_collection() -> None:
    state = {"x": {f"{i}": torch.ones(2) for i in range(3000)}}
    begun: list[str] = []

    def count(phase: str, _info: dict[str, int]) -> None:
        begun.extend([phase] if phase == "start" else [])

    flatten({"x": {"a": torch.ones(2)}})  # imports what the first one does
    gc.collect()  # so that none is due
    gc.callbacks.append(count)
    try:
        flat = flatten(state)["x"]
    finally:
        gc.callbacks.remove(count)
    assert len(flat.leaves) == 3000
    assert len(begun) <= 1  # when the walk is over


def test_the_collector_is_on_again_wherever_a_block_is_interrupted() -> None:
    """Else no cycle is freed any more in this process."""
    ours, ends = frozenset((process.__file__, forks.__file__)), False
    assert gc.isenabled()
    for call in count(1):
        with suppress(KeyboardInterrupt):
            with interrupting(ours, [call]), uncollected():
                pass
            ends = True
        assert gc.isenabled()
        if ends:
            break
    assert call > 3
