"""What a call costs, by the kernel's and the allocator's own accounts: bytes read, memory taken."""

import gc
import mmap
import re
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest

from ckptstore.repository import thread_pool

T = TypeVar("T")

np.unique(np.arange(2))  # imports what it needs at its first call, which would be counted


class Count:
    """Filled when the context ends."""

    bytes = 0


ROUNDS = 3


def least_bytes_read(
    act: Callable[[], T], before: Callable[[], object] = lambda: None
) -> tuple[int, T]:
    """Bytes that `act`, done some times over, read at least, each time after `before`, and what it
    gave: what other threads of the process read meanwhile, the test runner's say, is not the
    call's."""
    counts = []
    for _ in range(ROUNDS):
        before()
        with bytes_read() as count:
            found = act()
        counts.append(count.bytes)
    return min(counts), found


@contextmanager
def bytes_read() -> Iterator[Count]:
    """Bytes that this process's system calls read meanwhile, on all threads, page cache or not
    (proc_pid_io(5), rchar)."""
    count, before = Count(), _rchar()
    yield count
    # The look at the account before is part of it.
    count.bytes = max(_rchar() - before - 200, 0)


@contextmanager
def peak_buffers() -> Iterator[Count]:
    """The most that Python's allocators held at a time, above what they held at first: every buffer
    that is not a tensor's memory."""
    count = Count()
    gc.collect()
    tracemalloc.start()
    try:
        yield count
        count.bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextmanager
def peak_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    """The most that threads had mapped at a time to work with, which the allocators do not see."""
    count, held = Count(), [0]

    def mapped(fd: int, nbytes: int, flags: int) -> mmap.mmap:
        memory = mmap.mmap(fd, nbytes, flags=flags)
        changed(nbytes)
        weakref.finalize(memory, changed, -nbytes)
        return memory

    def changed(nbytes: int) -> None:
        held[0] += nbytes
        count.bytes = max(count.bytes, held[0])

    counted = SimpleNamespace(mmap=mapped, MADV_HUGEPAGE=mmap.MADV_HUGEPAGE)
    with monkeypatch.context() as patched:
        patched.setattr(thread_pool, "mmap", counted)
        yield count


@contextmanager
def peak_resident() -> Iterator[Count]:
    """By how much resident memory rose above what it was, at its highest (proc_pid_status(5),
    VmHWM; clear_refs resets it)."""
    count = Count()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    yield count
    count.bytes = _status_bytes("VmHWM") - before


def _rchar() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
