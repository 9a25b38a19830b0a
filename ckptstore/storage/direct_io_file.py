"""How does a sequentially written file bypass the page cache?

Writes through the page cache evict other data and cost a copy. From `DIRECT_FROM` on, whole
blocks go from aligned memory straight to the disk (`O_DIRECT`, open(2)); unaligned bytes are
copied to a buffer first. The rest at the end, less than a block, goes through the page cache,
and so does everything where the filesystem refuses (docs/decisions/007 and 029).
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ckptstore.core.config import MIB

BLOCK_BYTES = 4096
"""A multiple of every disk's logical block in use."""
DIRECT_FROM = 8 * MIB
"""Smaller files are likely to be read again soon, and wait for little."""
BUFFER_BYTES = 2 * MIB
CACHED_BYTES = 256 << 10
"""For more at once, Linux gives the page cache large blocks of memory. In a virtual machine, those
are the ones that the host has to find first: two threads that wrote 8 MiB at once took 3.6 s for
900 MB on ext4, with pieces of this size 1.5 s."""

WriteAll: TypeAlias = Callable[[int, Sequence[memoryview]], object]
"""Write the buffers, one behind the other, from an offset on."""


class GrowingFile:
    """Appends to the empty file behind `fd`, by one thread at a time.

    `write_all` writes the bytes; the caller handles `OSError`. With `direct=False` everything
    goes through the page cache.
    """

    def __init__(self, fd: int, write_all: WriteAll, *, direct: bool) -> None:
        self._fd = fd
        self._write_all = write_all
        self._may_go_direct = direct
        self._aligned: memoryview | None = None
        self._queue: list[memoryview] = []
        """Whole blocks that come before `aligned[queued:filled]`."""
        self._queued = self._filled = 0
        self.written = 0
        """Bytes written so far."""

    @property
    def direct(self) -> bool:
        """Whether writes bypass the page cache now."""
        return self._aligned is not None

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Add `buffers`, which the caller may reuse on return. Copies of up to `BUFFER_BYTES`
        wait for the next call or `finish`."""
        rest = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        if self._aligned is None and self._may_go_direct and self.written >= DIRECT_FROM:
            rest = self._go_direct(rest)
        if self._aligned is None:
            for piece in pieces(rest):  # what `_write` does, one call nearer to the disk
                self._write_all(self.written, piece)
                self.written += sum(len(buffer) for buffer in piece)
        else:
            for buffer in rest:
                self._add(self._aligned, buffer)
            if self._queue:
                self._write_queue(self._aligned)

    def finish(self) -> None:
        """Write the buffered bytes."""
        if self._aligned is not None:
            self._write_queue(self._aligned)
            tail = self._aligned[: self._filled]
            self._aligned = None
            _set_direct(self._fd, False)
            self._write([tail])

    def _go_direct(self, buffers: list[memoryview]) -> list[memoryview]:
        """Complete the last block through the page cache; returns the rest of `buffers`."""
        head, rest = _cut(buffers, -self.written % BLOCK_BYTES)
        self._write(head)
        if self.written % BLOCK_BYTES == 0:
            self._may_go_direct = _set_direct(self._fd, True)
            if self._may_go_direct:
                self._aligned = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        return rest

    def _add(self, aligned: memoryview, data: memoryview) -> None:
        while len(data):
            whole = _in_blocks(data) if self._filled % BLOCK_BYTES == 0 else 0
            if whole:
                self._queue += [aligned[self._queued : self._filled], data[:whole]]
                self._queued = self._filled
                data = data[whole:]
            else:
                data = self._copy(aligned, data)

    def _copy(self, aligned: memoryview, data: memoryview) -> memoryview:
        """Copy as much of `data` as fits, or completes a begun block; returns the rest."""
        import numpy as np  # here, because queries do not wait for it

        n = min(len(data), -self._filled % BLOCK_BYTES or BUFFER_BYTES - self._filled)
        # A copy, because the disk takes aligned memory only; numpy's, because it lets other threads
        # run meanwhile.
        np.copyto(
            np.frombuffer(aligned[self._filled : self._filled + n], np.uint8),
            np.frombuffer(data[:n], np.uint8),
        )
        self._filled += n
        if self._filled == BUFFER_BYTES:
            self._write_queue(aligned)
        return data[n:]

    def _write_queue(self, aligned: memoryview) -> None:
        """Write the queue, except an incomplete last block, which moves to the front of
        `aligned`."""
        whole = self._filled // BLOCK_BYTES * BLOCK_BYTES
        blocks = [*self._queue, aligned[self._queued : whole]]
        try:
            self._write(blocks)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A disk of larger blocks: the page cache takes them as they are.
            _set_direct(self._fd, False)
            self._write(blocks)
        self._filled -= whole
        aligned[: self._filled] = aligned[whole : whole + self._filled]
        self._queue.clear()
        self._queued = 0

    def _write(self, buffers: Sequence[memoryview]) -> None:
        self._write_all(self.written, buffers)
        self.written += sum(len(buffer) for buffer in buffers)


def pieces(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of `buffers`, `CACHED_BYTES` at a time."""
    piece, room = list[memoryview](), CACHED_BYTES
    for buffer in buffers:
        while len(buffer):
            piece.append(buffer[:room])
            buffer, room = buffer[room:], room - len(piece[-1])
            if not room:
                yield piece
                piece, room = [], CACHED_BYTES
    if piece:
        yield piece


def _in_blocks(data: memoryview) -> int:
    """The number of leading bytes of `data` that form whole, aligned blocks of memory."""
    import numpy as np

    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return 0 if address % BLOCK_BYTES else len(data) // BLOCK_BYTES * BLOCK_BYTES


def _set_direct(fd: int, on: bool) -> bool:
    """Whether the filesystem accepted it."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return bool(flag)


def _cut(buffers: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split `buffers` after `nbytes` bytes (after all, if there are fewer); returns both parts."""
    head: list[memoryview] = []
    rest: list[memoryview] = []
    for buffer in buffers:
        head.append(buffer[:nbytes])
        rest.append(buffer[nbytes:])
        nbytes -= len(head[-1])
    return head, [buffer for buffer in rest if len(buffer)]
