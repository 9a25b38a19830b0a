"""Are the bytes that a commit reads from a file those of its recorded hash?

A file is read once for its BLAKE3, and the XXH3 of each of its blocks is kept. Every later read
takes whole blocks and compares them, so that what reaches a chunk is what was hashed.
"""

import errno
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_digest

from ckptstore.errors import Unavailable
from ckptstore.plugin.files import Descriptor, transfer
from ckptstore.plugin.leaves import StagedSource
from ckptstore.plugins.adopt.directory import Identity

BLOCK_BYTES = 1 << 16
_SUM_BYTES = 8
_READ_BYTES = 4 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class FileChanged(Unavailable):
    """A file is not the one that was listed, hashed or committed."""

    def __init__(self, path: Path, problem: str = "") -> None:
        super().__init__(
            problem
            or f"{path} changed while it was read; nothing was committed: repeat this after the "
            "program that writes it is done"
        )


@dataclass(frozen=True, slots=True, eq=False)
class HashedFile:
    """A regular file as it was when it was hashed: its size, its BLAKE3, and the sums of its
    blocks. No read follows a link that has taken its place."""

    path: Path
    identity: Identity
    size: int
    mode: int
    mtime_ns: int
    blake3: str
    sums: bytes

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset`. Raises `FileChanged` if the bytes are other ones now."""
        stop = offset + len(out)
        first = offset // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self.size)
        before, after = bytearray(offset - first), bytearray(end - stop)
        buffers = [memoryview(before), out, memoryview(after)]
        file = _open(self.path, self.identity)
        try:
            if transfer(os.preadv, file.fd, first, buffers):
                raise FileChanged(self.path)
        except OSError as error:
            raise Unavailable(f"cannot read {self.path}: {error}") from error
        for start in range(first, end, BLOCK_BYTES):
            limit = min(start + BLOCK_BYTES, end)
            if start >= offset and limit <= stop:
                found = xxh3_64_digest(out[start - offset : limit - offset])
            else:
                found = _sum(buffers, start - first, limit - first)
            at = start // BLOCK_BYTES * _SUM_BYTES
            if found != self.sums[at : at + _SUM_BYTES]:
                raise FileChanged(self.path)


def _sum(buffers: Sequence[memoryview], start: int, stop: int) -> bytes:
    """The sum of bytes `start:stop` of buffers that follow each other."""
    summed, base = xxh3_64(), 0
    for buffer in buffers:
        here = buffer[max(start - base, 0) : max(stop - base, 0)]
        if len(here):
            summed.update(here)
        base += len(buffer)
    return summed.digest()


def hash_file(path: Path, identity: Identity | None = None) -> HashedFile:
    """Read a regular file once, the one that was listed as `identity` if that is given.

    Raises `FileChanged` if it is a link or another file by now, or changes meanwhile, `Unavailable`
    if it cannot be read.
    """
    file = _open(path, identity)
    hashed, sums = blake3(), bytearray()
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        before = os.fstat(file.fd)
        position = 0
        while position < before.st_size:
            wanted = min(before.st_size - position, _READ_BYTES)
            here = buffer[:wanted]
            if transfer(os.preadv, file.fd, position, [here]):
                raise FileChanged(path)
            hashed.update(here)
            for start in range(0, wanted, BLOCK_BYTES):
                sums += xxh3_64_digest(here[start : start + BLOCK_BYTES])
            position += wanted
        after = os.fstat(file.fd)
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise FileChanged(path)
    mode = before.st_mode & 0o7777
    return HashedFile(
        path,
        Identity.of(before),
        position,
        mode,
        before.st_mtime_ns,
        hashed.hexdigest(),
        bytes(sums),
    )


def _open(path: Path, identity: Identity | None) -> Descriptor:
    try:
        file = Descriptor(os.open(path, _READ))
        status = os.fstat(file.fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileChanged(path) from error
        raise Unavailable(
            f"cannot read {path}: {error.strerror}; see that it is there and may be read, then "
            "repeat"
        ) from error
    if not stat.S_ISREG(status.st_mode) or identity not in (None, Identity.of(status)):
        raise FileChanged(path)
    return file


class FileParts(StagedSource):
    """Ranges of a file, as (start, stop), one behind the other."""

    __slots__ = ("_begins", "_file", "_ranges")

    def __init__(self, file: HashedFile, ranges: Sequence[tuple[int, int]], width: int = 1) -> None:
        ends = list(accumulate((stop - start for start, stop in ranges), initial=0))
        super().__init__(ends[-1], width)
        self._file, self._ranges, self._begins = file, ranges, ends[:-1]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        number = max(bisect_right(self._begins, start) - 1, 0)
        done = 0
        while start + done < stop:
            first, end = self._ranges[number]
            first += start + done - self._begins[number]
            here = min(end - first, stop - start - done)
            if here:
                self._file.read(first, out[done : done + here])
            done += here
            number += 1
