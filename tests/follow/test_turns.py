"""Readers share a target; a writer has it alone, and is not kept out by readers that overlap."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

import ckptstore
from ckptstore.plugins.follow import turns as followed
from ckptstore.plugins.follow.turns import Turns
from tests.support.interrupts import interrupting

LONG_S = 60.0


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block; raises what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


def await_a_waiting_writer(turns: Turns) -> None:
    while not turns._waiting:
        time.sleep(0.001)


def test_several_read_at_once() -> None:
    turns, both = Turns(), threading.Barrier(2, timeout=LONG_S)

    def read() -> None:
        with turns.reading(LONG_S):
            both.wait()

    with beside(read):
        read()


def test_a_writer_waits_for_readers_and_readers_for_it() -> None:
    turns, order = Turns(), list[str]()

    def write() -> None:
        with turns.writing(LONG_S):
            order.append("written")

    def read() -> None:
        with turns.reading(LONG_S):
            order.append("read")

    with turns.reading(LONG_S):
        writer = beside(write)
        writer.__enter__()
        await_a_waiting_writer(turns)
        with turns.reading(0):  # the same thread, which the writer waits for
            order.append("nested")
        with (
            pytest.raises(ckptstore.Unavailable, match="waits for its readers"),
            beside(lambda: turns.reading(0.01).__enter__()),
        ):
            pass
        reader = beside(read)
        reader.__enter__()
        order.append("left")
    writer.__exit__(None, None, None)
    reader.__exit__(None, None, None)
    assert order[:2] == ["nested", "left"]
    assert sorted(order[2:]) == ["read", "written"]


def test_a_writer_that_gives_up_lets_readers_in() -> None:
    turns, inside, leave = Turns(), threading.Event(), threading.Event()

    def read() -> None:
        with turns.reading(LONG_S):
            inside.set()
            leave.wait()

    with beside(read):
        inside.wait()
        with pytest.raises(ckptstore.Unavailable, match="readers are within"), turns.writing(0.01):
            pass
        with turns.reading(0):
            leave.set()


def test_what_is_raised_within_ends_the_turn() -> None:
    turns = Turns()
    for turn in (turns.writing, turns.reading):
        with pytest.raises(KeyboardInterrupt), turn(0):
            raise KeyboardInterrupt
    with turns.writing(0):
        pass


@pytest.mark.parametrize("who", [Turns.reading, Turns.writing])
def test_a_turn_ends_wherever_it_is_interrupted(who: Callable[..., Any]) -> None:
    ours, ends = frozenset((followed.__file__,)), False
    for call in count(1):
        turns = Turns()
        with suppress(KeyboardInterrupt):
            with interrupting(ours, [call]), who(turns, LONG_S):
                pass
            ends = True
        for next_one in (turns.writing, turns.reading):
            with next_one(0):
                pass
        if ends:
            break
    assert call > 5
