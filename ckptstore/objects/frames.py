"""How are bytes compressed to one zstd frame, sealed by their hash, and bundled with others?

Thread-safe: each thread has its own zstd contexts.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ckptstore.core.ids import digest
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

_HASH_DIGITS = 64
_NAMED = struct.Struct("<40sI")

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


def decompress_all(frames: Sequence[tuple[Stored, int]]) -> list[bytes]:
    """The contents of zstd frames, each with the number of its bytes, in their order: of many, and
    of what matches a checksum. Raises `Corrupt` before larger allocations."""
    import zstandard

    if not frames:
        return []
    sizes = struct.pack(f"<{len(frames)}Q", *(nbytes for _, nbytes in frames))
    try:
        found = zstandard.ZstdDecompressor().multi_decompress_to_buffer(
            [stored for stored, _ in frames], decompressed_sizes=sizes
        )
    except (zstandard.ZstdError, ValueError) as error:
        raise Corrupt(f"a zstd frame is damaged: {error}; run `ckptstore fsck`") from error
    return [found[i].tobytes() for i in range(len(found))]


def seal(body: bytes) -> bytes:
    """The hash of `body`, a line feed, and `body`."""
    return digest(body).hex().encode() + b"\n" + body


def unseal(data: bytes, what: str) -> memoryview:
    """The body of what `seal` made. Raises `Corrupt` if it does not match its hash."""
    body = memoryview(data)[_HASH_DIGITS + 1 :]
    head, wanted = data[: _HASH_DIGITS + 1], digest(body).hex()
    if head != wanted.encode() + b"\n":
        raise Corrupt(
            f"{what} does not match its hash: wanted {head!r}, got {wanted}; run `ckptstore fsck`"
        )
    return body


def bundle(parts: Mapping[str, bytes]) -> bytes:
    """One sealed frame of parts, each with its name of at most 40 ASCII characters
    (docs/format.md §9)."""
    rows = (_NAMED.pack(name.encode(), len(part)) + part for name, part in parts.items())
    return seal(compress(b"".join(rows)))


def unbundle(data: bytes, what: str, max_bytes: int) -> dict[str, bytes]:
    """The parts of a bundle by name. Raises `Corrupt`."""
    content, at, parts = decompress(unseal(data, what), max_bytes), 0, dict[str, bytes]()
    while at + _NAMED.size <= len(content):
        name, nbytes = _NAMED.unpack_from(content, at)
        at += _NAMED.size + nbytes
        parts[name.rstrip(b"\0").decode("ascii", "replace")] = content[at - nbytes : at]
    if at != len(content):
        raise Corrupt(f"{what} ends within a part: {len(content)} bytes, wanted {at}")
    return parts
