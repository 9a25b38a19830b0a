"""Ctrl-C at the worst moments: nothing waits for ever afterwards, and no thread goes on."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.repository.thread_pool import ThreadPool, shared


def interrupted_in(function: Callable[..., object], call: Callable[[], object]) -> None:
    """`call`, interrupted as by a signal that arrives when `function` begins on this thread."""

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is function.__code__:  # type: ignore[attr-defined]
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)


@pytest.mark.timeout(30)
def test_commits_and_close_end_after_a_commit_was_interrupted_before_its_thread_began(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"t": torch.zeros(1000)}, step=0)
        interrupted_in(
            threading.Thread.start, lambda: store.commit_async({"t": torch.zeros(1000)}, step=1)
        )
        store.commit_async({"t": torch.ones(1000)}, step=2).wait()
        while any(thread.name == "ckptstore-commits" for thread in threading.enumerate()):
            time.sleep(0.01)  # else the next commit starts no thread
        interrupted_in(
            threading.Thread.start, lambda: store.commit_async({"t": torch.zeros(1000)}, step=3)
        )
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [2, 0]


@pytest.mark.timeout(30)
def test_the_other_threads_have_ended_when_an_interrupted_call_returns() -> None:
    threads = ThreadPool(2)
    begun, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    def last() -> None:
        begun.wait()
        threading.Timer(0.2, may_end.set).start()

    def work() -> None:
        for item in items:
            begun.set()
            may_end.wait()
            done.append(item)

    items = shared(range(1000))
    interrupted_in(futures.wait, lambda: threads.together([work, last], items.stop))
    assert done == [0]
    threads.close()
