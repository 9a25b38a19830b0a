"""How deep is a write? Few of our frames stand between `Store.commit` and `pwritev`."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.repository.thread_pool import ThreadPool

PACKAGE = str(Path(ckptstore.__file__).parent)
MOST = 12
FLOATS = 8 << 20
"""Enough for every thread of the store to write some of it."""


def ours(frame: FrameType | None) -> list[str]:
    """Our frames from the innermost to `Store.commit`, or to a thread's first one."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            if code.co_qualname == "Store.commit":
                break
            found.append(code.co_qualname)
        frame = frame.f_back
    return found


def test_few_frames_stand_between_a_commit_and_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    submitted: list[list[str]] = []
    pwritev, together = os.pwritev, ThreadPool.together

    def traced(fd: int, buffers: Sequence[Any], offset: int) -> int:
        stack = ours(sys._getframe(1))
        if threading.current_thread() is not threading.main_thread():
            stack += submitted[0]
        stacks.append(stack)
        return pwritev(fd, buffers, offset)

    def noted(pool: ThreadPool, *works: Any) -> None:
        submitted.append(["ThreadPool.together", *ours(sys._getframe(1))])
        together(pool, *works)

    monkeypatch.setattr(os, "pwritev", traced)
    monkeypatch.setattr(ThreadPool, "together", noted)
    with ckptstore.open(tmp_path / "store", threads=2) as store:
        store.commit({"model": {"weight": torch.rand(FLOATS)}})
    tensors = [stack for stack in stacks if "ChunkWriter.work" in stack]
    assert len({"Pool._work" in stack for stack in tensors}) == 2, "the caller writes, and a thread"
    deepest = max(tensors, key=len)
    assert len(deepest) <= MOST, f"{len(deepest)} frames: " + " < ".join(deepest)
