"""Ctrl-C at the worst moments: nothing waits for ever afterwards, and no thread goes on."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch

import ckptstore
from ckptstore import Async
from ckptstore.commit import async_commit as copies
from ckptstore.commit import pending
from ckptstore.core import process
from ckptstore.core.forks import new_event
from ckptstore.repository import thread_pool as pools
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.state import staging, staging_buffers
from tests.support.interrupts import interrupting


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LINGER_S", 0.0)
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


def is_interrupted(threads: ThreadPool, after: Sequence[int]) -> bool:
    """Whether a call on `threads` was interrupted, after so many of the places where Python looks
    for interrupts, and again after so many more. Checks that no thread goes on after it."""
    ours = frozenset((pools.__file__, process.__file__, threading.__file__))
    begun, may_end, ended, late = new_event(), threading.Event(), threading.Event(), list[bool]()
    items = shared(range(2))

    def work() -> None:
        for _ in items:
            begun.set()
            may_end.wait()
            late.append(ended.is_set())

    timer = threading.Timer(0.01, may_end.set)
    timer.start()
    try:
        with interrupting(ours, after):
            threads.together([work, begun.wait], items.stop)
        return False
    except (KeyboardInterrupt, RuntimeError):  # of a condition whose lock was not taken again
        return True
    finally:
        ended.set()
        timer.join()
        threads.together([lambda: None] * 3, lambda: None)  # behind what is queued
        assert not any(late)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("again", [[], [1], [2], [7], [1, 1, 1]], ids=str)
def test_no_thread_goes_on_when_an_interrupted_call_returns(again: list[int]) -> None:
    """What it copies would land in memory that has been given back."""
    threads = ThreadPool(2)
    assert not is_interrupted(threads, [])
    count = next(n for n in itertools.count(1) if not is_interrupted(threads, [n, *again]))
    assert count > 10
    threads.close()


@pytest.mark.timeout(60)
def test_a_copy_ends_wherever_its_waiting_thread_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at each line of ours in turn, on a thread that waits for a lazy copy."""
    ours = {module.__file__ for module in (copies, staging_buffers, pools, process)}
    main, go_on, left = threading.get_ident(), threading.Event(), 0

    def late(*args: Any) -> None:
        if threading.get_ident() != main:
            go_on.wait()
        staging.copy_task(*args)

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in ours:
            return None
        left -= 1
        if not left:
            sys.settrace(None)
            threading.Timer(0.01, go_on.set).start()
            raise KeyboardInterrupt
        return trace

    monkeypatch.setattr(copies, "copy_task", late)
    model = torch.nn.ParameterDict({"w": torch.arange(3 << 18).double()})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    before = sys.gettrace()
    with ckptstore.open(tmp_path / "store") as store:
        for line in itertools.count(1):
            go_on, left = threading.Event(), line
            begun = store.commit_async(state, step=line, background=Async(staging="lazy"))
            timer = threading.Timer(0.3, go_on.set)
            timer.start()
            sys.settrace(trace)
            try:
                begun.wait_staged()
                break  # it has no more lines
            except KeyboardInterrupt:
                assert begun.exception(timeout_s=20) is None
            finally:
                sys.settrace(before)
                go_on.set()
        assert line > 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_a_call_that_is_interrupted_anywhere_keeps_no_memory(
    staging: Literal["eager", "lazy"], tmp_path: Path
) -> None:
    """Ctrl-C within each call that `commit_async` makes in turn. The memory is enough for one
    state."""
    ours = frozenset(str(module.__file__) for module in (copies, staging_buffers, pending))
    weight = torch.nn.Parameter(torch.zeros(1 << 18, dtype=torch.float64))
    state = {"w": weight, "optimizer": torch.optim.SGD([weight])}
    background = Async(staging=staging, staging_bytes=4 << 20)
    with ckptstore.open(tmp_path / "store", background=background) as store:
        store.commit(state, step=0)
        for call in itertools.count(1):
            try:
                with interrupting(ours, [call]):
                    store.commit_async(state, step=call)
                break  # it makes no more calls
            except KeyboardInterrupt:
                pass
            store.commit_async(state, step=call + 1000).wait(timeout_s=20)
        assert call > 20
