"""The bulk of a large file goes past the page cache, and the file is the same as if it had not."""

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptstore.storage.direct_io_file import BLOCK_BYTES, BUFFER_BYTES, DIRECT_FROM, GrowingFile

WHOLE = DIRECT_FROM + 2 * BUFFER_BYTES + 12345


class File:
    """An empty file, and every write to it as (offset, bytes)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.writes: list[tuple[int, int]] = []

    def write_all(self, offset: int, buffers: Sequence[memoryview]) -> None:
        data = [buffer for buffer in buffers if len(buffer)]
        self.writes.append((offset, sum(map(len, data))))
        if data:
            assert os.pwritev(self.fd, data, offset) == self.writes[-1][1]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = File(tmp_path / "file")
    yield file
    os.close(file.fd)


def grow(growing: GrowingFile, whole: bytes, part_bytes: int) -> None:
    view = memoryview(whole)
    for start in range(0, len(whole), part_bytes):
        growing.append(
            [
                view[start : start + part_bytes // 2],
                view[start + part_bytes // 2 : start + part_bytes],
            ]
        )
    growing.finish()


def takes_direct_writes(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def cached(path: Path, offset: int) -> bool:
    """Whether the page cache has the block at `offset`. A read that does not wait would not say: it
    reads ahead, and may be late enough to find what it has asked for."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as memory,
    ):
        there, block = ctypes.c_ubyte(), ctypes.c_char.from_buffer(memory, offset)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(block)),
            ctypes.c_size_t(BLOCK_BYTES),
            ctypes.byref(there),
        )
        del block
    assert not failed
    return bool(there.value & 1)


@pytest.mark.parametrize("part_bytes", [1 << 20, 4099, 5_000_001, 40 << 20])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "whole_bytes",
    [0, 1, DIRECT_FROM - 1, DIRECT_FROM, DIRECT_FROM + 1, DIRECT_FROM + BUFFER_BYTES, WHOLE],
)
def test_the_file_is_what_was_appended(
    file: File, part_bytes: int, direct: bool, whole_bytes: int
) -> None:
    whole = random.randbytes(whole_bytes)
    grow(GrowingFile(file.fd, file.write_all, direct=direct), whole, part_bytes)
    assert file.path.read_bytes() == whole


def test_the_bulk_goes_past_the_page_cache_in_whole_blocks(file: File) -> None:
    if not takes_direct_writes(file.path):
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    growing = GrowingFile(file.fd, file.write_all, direct=True)
    grow(growing, random.randbytes(WHOLE), 1_000_003)
    bulk = [(offset, nbytes) for offset, nbytes in file.writes if nbytes == BUFFER_BYTES]
    assert bulk
    assert all(offset % BLOCK_BYTES == 0 for offset, _ in bulk)
    assert not any(
        cached(file.path, offset + BLOCK_BYTES) for offset, _ in reversed(bulk)
    )  # who asks has what follows read ahead
    assert cached(file.path, 0)


def test_small_files_stay_in_the_page_cache(file: File) -> None:
    grow(GrowingFile(file.fd, file.write_all, direct=True), random.randbytes(DIRECT_FROM), 1 << 20)
    assert cached(file.path, 0)
    assert cached(file.path, DIRECT_FROM - BLOCK_BYTES)


def test_a_disk_of_larger_blocks_gets_its_bytes_through_the_page_cache(file: File) -> None:
    """What such a disk answers to a direct write, whether there is one here or not."""
    whole, refused = random.randbytes(WHOLE), []

    def refuse_once(offset: int, buffers: Sequence[memoryview]) -> None:
        if growing.direct and not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        file.write_all(offset, buffers)

    growing = GrowingFile(file.fd, refuse_once, direct=True)
    grow(growing, whole, 1 << 20)
    assert file.path.read_bytes() == whole
    assert len(refused) == takes_direct_writes(file.path)


def test_other_failures_are_the_callers(file: File) -> None:
    def full(offset: int, buffers: Sequence[memoryview]) -> None:
        if offset > DIRECT_FROM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write_all(offset, buffers)

    growing = GrowingFile(file.fd, full, direct=True)
    with pytest.raises(OSError, match="No space"):
        grow(growing, random.randbytes(WHOLE), 1 << 20)


class Seen(File):
    """A file that notes what it is given: addresses of memory, and lengths."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.given: list[tuple[int, int]] = []

    def write_all(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.given += [(address_of(buffer), len(buffer)) for buffer in buffers if len(buffer)]
        super().write_all(offset, buffers)


def address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def aligned(nbytes: int) -> memoryview:
    """Memory that begins with a page."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(random.randbytes(nbytes))
    return memoryview(memory)


def test_what_lies_in_whole_blocks_is_written_from_where_it_is(tmp_path: Path) -> None:
    file, memory = Seen(tmp_path / "file"), aligned(WHOLE)
    if not takes_direct_writes(file.path):
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    grow(GrowingFile(file.fd, file.write_all, direct=True), memory, 1 << 20)
    os.close(file.fd)
    first = address_of(memory)
    elsewhere = [nbytes for address, nbytes in file.given if not first <= address < first + WHOLE]
    assert elsewhere == [WHOLE % BLOCK_BYTES]
    assert file.path.read_bytes() == memory


@pytest.mark.parametrize("seed", range(4))
def test_blocks_and_odd_bytes_may_alternate(file: File, seed: int) -> None:
    chance = random.Random(seed)
    memory, whole = aligned(2 * BUFFER_BYTES), bytearray()
    growing = GrowingFile(file.fd, file.write_all, direct=True)
    while len(whole) < WHOLE:
        buffers = []
        for _ in range(chance.randrange(1, 5)):
            start = chance.randrange(BUFFER_BYTES // BLOCK_BYTES - 1) * BLOCK_BYTES + chance.choice(
                [0, 0, 64]
            )
            nbytes = chance.choice(
                [BLOCK_BYTES, 1 << 20, 3 << 20, 20 * BLOCK_BYTES + 5, 17, BUFFER_BYTES + 1]
            )
            buffers += [
                memory[start : start + nbytes],
                memoryview(bytes(-nbytes % BLOCK_BYTES if chance.random() < 0.7 else 0)),
            ]
        growing.append(buffers)
        whole += b"".join(buffers)
    growing.finish()
    assert file.path.read_bytes() == whole
