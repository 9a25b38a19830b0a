"""How are bytes compressed to one zstd frame, and decompressed within a bound?

Thread-safe: each thread has its own zstd contexts.
"""

import threading
from typing import TypeAlias

from ckptstore.errors import Corrupt

Stored: TypeAlias = bytes | memoryview

_LEVEL = 1
"""Of normally distributed bfloat16 and float32, level 3 takes up to twice as long and makes 0 to 4
% more of it."""

CHECKED, MATCHES, ENTROPY = range(3)
"""Ways to make a frame: with a checksum of the content; without, for what has one elsewhere: it
takes a third of the time; and without, by entropy alone: for bytes that hardly repeat in
sequences."""

_ENTROPY = {
    "strategy": 1,  # ZSTD_fast
    "window_log": 18,
    "hash_log": 6,
    "chain_log": 6,
    "min_match": 7,
}
"""A search that finds next to no matches, so that Huffman codes do all the work. Of the exponents
of floats it makes 5 to 10 % less than level 1 does, in half of the time."""

_DESCRIPTOR, _UNUSED_BIT = 4, 0x10
"""zstd's decoders ignore this bit of a frame's header (RFC 8878, 3.1.1.1.1.4). No encoder sets it,
so it is damage."""

_local = threading.local()


def compress(data: Stored, way: int = CHECKED) -> bytes:
    """One zstd frame that states its content size, made in one of the ways above."""
    try:
        compressors = _local.compressors
    except AttributeError:
        import zstandard

        entropy = zstandard.ZstdCompressionParameters(write_content_size=True, **_ENTROPY)
        compressors = _local.compressors = (
            zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True),
            zstandard.ZstdCompressor(level=_LEVEL),
            zstandard.ZstdCompressor(compression_params=entropy),
        )
    return bytes(compressors[way].compress(data))


def decompress(stored: Stored, max_bytes: int, *, min_bytes: int = 0) -> bytes:
    """The content of exactly one zstd frame of `min_bytes` to `max_bytes`. Raises `Corrupt`
    before larger allocations."""
    import zstandard  # in functions: a query of the catalog starts without it

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
        if stored[_DESCRIPTOR] & _UNUSED_BIT:
            raise Corrupt("a zstd frame has a bit set that means nothing; run `ckptstore fsck`")
        # The library takes a content size of zero for an unknown one.
        content: bytes = decompressor.decompress(stored, allow_extra_data=False) if stated else b""
    except zstandard.ZstdError as error:
        raise Corrupt(f"a zstd frame is damaged: {error}; run `ckptstore fsck`") from error
    return content
