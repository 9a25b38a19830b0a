"""Parts of files, one behind the other in memory as if they were one file: private pages, read when
touched, copied when written to.

Python's `mmap` chooses the addresses itself; to lay several files side by side they must be given.
So memory is reserved first, as one anonymous mapping, and each file's pages are put over a part of
it (mmap(2), MAP_FIXED). Nothing else can lie in the reserved range, which makes MAP_FIXED safe,
also between threads. What is mapped stays readable when the file is deleted, and is freed with the
last view of it.
"""

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any

from ckptstore.errors import Corrupt, Unavailable

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
"""Addresses and file offsets of a mapping are multiples of it."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
# Pages that are never written to need no swap to be set aside: a model may be larger than the
# memory that is free.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_FAILED = ctypes.c_void_p(-1).value


class MemoryMap:
    """`nbytes` of memory, zeros until files are mapped over it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(nbytes, 1)
        self._start = _map(None, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        weakref.finalize(self, _libc().munmap, self._start, self._nbytes).atexit = False

    def put(self, at: int, fd: int, offset: int, nbytes: int, what: str) -> None:
        """Let the bytes from `at` on be those of the open file from `offset` on; both are multiples
        of `PAGE_BYTES`, `nbytes` need not be. The file may be closed afterwards.

        Raises `Corrupt`, naming `what`, if the file ends before: a touch of a page beyond its end
        would kill the process.
        """
        if at % PAGE_BYTES or offset % PAGE_BYTES or at < 0 or at + nbytes > self._nbytes:
            raise ValueError(
                f"cannot map {nbytes} bytes from {offset} on to {at} of {self._nbytes}"
            )
        if (size := os.fstat(fd).st_size) < offset + nbytes:
            raise Corrupt(
                f"{what} ends after {size} bytes; wanted {offset + nbytes}; run `ckptstore fsck`"
            )
        _map(self._start + at, nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes `start:stop`, writable: a write changes this process's copy of the page and no
        file. The view keeps the memory."""
        array = (ctypes.c_ubyte * (stop - start)).from_address(self._start + start)
        # whoever holds the view holds the array, and so the mapping
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


def _map(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    start: int | None = _libc().mmap(
        address, nbytes, _READ_WRITE, flags | _MAP_NORESERVE, fd, offset
    )
    if start is None or start == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise Unavailable(
            f"cannot map {nbytes} bytes: {reason}; raise `ulimit -v` or vm.max_map_count, or read "
            "the leaf instead"
        )
    return start


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library
