"""A transfer that is interrupted writes nothing once the caller has the memory back."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from types import FrameType

import pytest

from ckptstore.core import forks
from ckptstore.interop.torchft import fetch
from ckptstore.repository import thread_pool
from tests.interop.torchft.conftest import SOON, Start, assert_same, copy_of, state_of, weights_of

PLACES = frozenset({fetch.__file__, thread_pool.__file__, forks.__file__, threading.__file__})


@contextmanager
def ctrl_c(after_s: float, again_s: float, times: int) -> Iterator[None]:
    """Interrupt a transfer after `after_s`, and again until it was interrupted `times`."""
    left = [times]

    def interrupt(number: int, frame: FrameType | None) -> None:
        frame = frame if frame and frame.f_code.co_filename in PLACES else None
        while frame and frame.f_code.co_filename != fetch.__file__:
            frame = frame.f_back
        if frame and left[0]:
            left[0] -= 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s, again_s)
    try:
        yield
    finally:
        left[0] = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A socket that an interrupt leaves open is closed when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_transfer_that_is_interrupted_and_again_writes_nothing_afterwards(
    start: Start, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, sent, live = Random(seed), state_of(24), state_of(24, seed=2)
    sender, receiver = start(), start(state_dict=lambda: live, in_place=True)
    sender.send_checkpoint([1], 1, sent, SOON)
    read_into = fetch.Connection.read_into

    def slow(connection: fetch.Connection, out: memoryview) -> None:
        time.sleep(0.01)
        read_into(connection, out)

    monkeypatch.setattr(fetch.Connection, "read_into", slow)
    for _ in range(20):
        for tensor in weights_of(live).values():
            tensor.zero_()
        how = random.uniform(0.01, 0.05), random.choice((1e-4, 2e-4, 1e-3)), random.randrange(1, 5)
        with suppress(KeyboardInterrupt), ctrl_c(*how):
            receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
        held = copy_of(live)
        for thread in threading.enumerate():
            if thread.name.startswith("ckptstore-peer"):
                thread.join()
        assert_same(live, held)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), sent)
    gc.collect()  # such sockets, while it is known whose they are
