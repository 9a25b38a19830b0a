"""How are a chunk's raw bytes stored: unchanged, as a zstd frame, or as one frame per byte of an
element (docs/format.md §4)?

Thread-safe.
"""

import struct

import numpy as np

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.frames import Stored, compress, decompress

RAW, ZSTD, SPLIT_ZSTD = range(3)
KNOWN_CODECS = (RAW, ZSTD, SPLIT_ZSTD)

_NAMES = {"raw": RAW, "zstd": ZSTD, "split-zstd": SPLIT_ZSTD}


def codec_id(name: str) -> int:
    """The number of the codec `name`. Raises `InvalidInput`."""
    if name not in _NAMES:
        raise InvalidInput(f"no codec is called {name!r}; wanted one of {', '.join(_NAMES)}")
    return _NAMES[name]


def encode(codec: int, raw: memoryview, width: int) -> tuple[int, Stored]:
    """The codec used and the stored bytes. Returns `raw` itself, not a copy, unless `codec`
    saves at least 5 %."""
    if codec == RAW:
        return RAW, raw
    stored = compress(raw) if codec == ZSTD else _split(raw, width)
    return (codec, stored) if _shrank(stored, raw) else (RAW, raw)


def decode_into(codec: int, stored: Stored, out: memoryview, width: int) -> None:
    """Fill `out` with the raw bytes. Raises `Corrupt`, before large allocations, unless they fit
    `out` exactly."""
    if codec == RAW:
        if len(stored) != out.nbytes:
            raise Corrupt(
                f"a raw chunk has {len(stored)} bytes; wanted {out.nbytes}; run `ckptstore fsck`"
            )
        out[:] = stored
    elif codec == ZSTD:
        # Decompressed beside `out` and copied: the library has no one-shot call into a buffer, and
        # its stream is slower than this copy.
        out[:] = decompress(stored, out.nbytes, min_bytes=out.nbytes)
    elif codec == SPLIT_ZSTD:
        _fill_split(memoryview(stored), out, width)
    else:
        raise Corrupt(
            f"codec {codec} is unknown; wanted one of {KNOWN_CODECS}; run `ckptstore fsck` or a "
            "newer ckptstore"
        )


def _shrank(stored: Stored, raw: memoryview) -> bool:
    return len(stored) * 100 <= raw.nbytes * 95


def _split(raw: memoryview, width: int) -> bytes:
    whole = raw.nbytes - raw.nbytes % width
    columns = np.frombuffer(raw[:whole], np.uint8).reshape(-1, width)
    flags, parts = bytearray(width), []
    for i in range(width):
        # A plane is gathered into a copy: its bytes do not lie together in `raw`.
        plane = b"".join((columns[:, i].tobytes(), raw[whole:] if i == width - 1 else b""))
        packed = compress(plane)
        flags[i] = _shrank(packed, memoryview(plane))
        parts.append(packed if flags[i] else plane)
    return b"".join((flags, struct.pack(f"<{width}I", *map(len, parts)), *parts))


def _fill_split(stored: memoryview, out: memoryview, width: int) -> None:
    head = 5 * width
    sizes = struct.unpack(f"<{width}I", stored[width:head]) if stored.nbytes >= head else ()
    if not sizes or head + sum(sizes) != stored.nbytes or max(stored[:width]) > 1:
        raise Corrupt(
            f"the planes of a split-zstd chunk of {stored.nbytes} bytes do not add up; run "
            "`ckptstore fsck`"
        )
    elements, whole = out.nbytes // width, out.nbytes - out.nbytes % width
    columns = np.frombuffer(out[:whole], np.uint8).reshape(-1, width)
    start = head
    for i, (flag, size) in enumerate(zip(stored[:width], sizes, strict=True)):
        wanted = elements + (out.nbytes - whole if i == width - 1 else 0)
        part = stored[start : start + size]
        plane = memoryview(decompress(part, wanted, min_bytes=wanted)) if flag else part
        if plane.nbytes != wanted:
            raise Corrupt(
                f"plane {i} of a split-zstd chunk has {plane.nbytes} bytes; wanted {wanted}; run "
                "`ckptstore fsck`"
            )
        columns[:, i] = np.frombuffer(plane[:elements], np.uint8)
        start += size
    out[whole:] = plane[elements:]
