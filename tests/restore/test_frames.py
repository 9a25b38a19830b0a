"""The way from a restore to the disk is short: few of our frames lie between `Snapshot.restore`
and the system call that reads."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import ckptstore

FRAMES_MAX = 10
PACKAGE = str(Path(ckptstore.__file__).parent)


def ours(frame: FrameType | None) -> list[str]:
    """Our frames of a stack, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found


@contextmanager
def stacks_of_reads(*, on_threads: bool) -> Iterator[list[list[str]]]:
    """Our frames above each `preadv` of tensor bytes. Those of a pool's thread are followed by the
    frames of the thread that handed it the work, which reads only after it if `on_threads`."""
    found: list[list[str]] = []
    waiting, helped = threading.get_ident(), threading.Event()
    preadv = os.preadv

    def traced(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        if sum(memoryview(buffer).nbytes for buffer in buffers) >= 1 << 16:
            stack = ours(sys._getframe(1))
            if threading.get_ident() == waiting:
                assert not on_threads or helped.wait(60), "no other thread reads"
            else:
                helped.set()
                waits = ours(sys._current_frames()[waiting])
                stack += waits[waits.index("ThreadPool.together") :]
            found.append(stack)
        return preadv(fd, buffers, offset, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", traced)
        yield found


@pytest.mark.parametrize("megabytes", [1, 24], ids=["alone", "on threads"])
def test_a_restore_reaches_the_disk_in_ten_frames(tmp_path: Path, megabytes: int) -> None:
    state = {f"t{i}": torch.rand(1 << 18) for i in range(megabytes)}
    with ckptstore.open(tmp_path / "store", threads=2) as store:
        store.commit({"m": state})
        snapshot, target = store.checkout(), {name: torch.zeros(1 << 18) for name in state}
        snapshot.leaves()
        with stacks_of_reads(on_threads=megabytes > 4) as stacks:
            snapshot.restore({"m": target})
        assert all(torch.equal(target[name], state[name]) for name in state)
    assert len(stacks) >= megabytes
    for stack in stacks:
        assert stack.pop() == "_checked.<locals>.call"  # the check of every public call
        assert stack[-1] == "Snapshot.restore"
        assert len(stack) <= FRAMES_MAX, stack
    threaded = [stack for stack in stacks if "Pool._work" in stack]
    assert bool(threaded) == (megabytes > 4)
