"""How are bytes compressed to one zstd frame, and decompressed within a bound?

Thread-safe: each thread has its own zstd contexts.
"""

import threading
from typing import TypeAlias

import zstandard

from ckptstore.errors import Corrupt

Stored: TypeAlias = bytes | memoryview

_LEVEL = 1
"""Of normally distributed bfloat16 and float32, level 3 takes up to twice as long and makes 0 to 4
% more of it."""

_local = threading.local()


def compress(data: Stored) -> bytes:
    """One zstd frame that states its content size and ends with a checksum of the content."""
    try:
        compressor = _local.compressor
    except AttributeError:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return bytes(compressor.compress(data))


def decompress(stored: Stored, max_bytes: int, *, min_bytes: int = 0) -> bytes:
    """The content of exactly one zstd frame of `min_bytes` to `max_bytes`. Raises `Corrupt`
    before larger allocations."""
    try:
        decompressor = _local.decompressor
    except AttributeError:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        stated = zstandard.frame_content_size(stored)
        if not min_bytes <= stated <= max_bytes:
            raise Corrupt(
                f"a zstd frame says it holds {stated} bytes; wanted {min_bytes} to {max_bytes}; "
                "run `ckptstore fsck`"
            )
        # The library takes a content size of zero for an unknown one.
        content: bytes = decompressor.decompress(stored, allow_extra_data=False) if stated else b""
    except zstandard.ZstdError as error:
        raise Corrupt(f"a zstd frame is damaged: {error}; run `ckptstore fsck`") from error
    return content
