"""How are a chunk's raw bytes stored: unchanged, as a zstd frame, as one frame per byte of an
element, or so as the difference from another chunk (docs/format.md §4)?

Thread-safe.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.frames import Stored, compress, decompress

RAW, ZSTD, SPLIT_ZSTD, DELTA = range(4)
KNOWN_CODECS = (RAW, ZSTD, SPLIT_ZSTD, DELTA)

_NAMES = {"raw": RAW, "zstd": ZSTD, "split-zstd": SPLIT_ZSTD}

_PROBE_BYTES = 16 << 10
"""Part of a plane, or of each of its elements' bytes, that is compressed to choose how."""
_SHARE_BYTES = 8 << 10
_WORTH_A_TRY = 0.97
_BASE = struct.Struct("<QIB3x")
_OFFSET_MAX = 1 << 62
_WORDS = (1, 2, 4, 8)


class Base(NamedTuple):
    """Where the chunk lies that a delta differs from: in the same pack, and no delta itself."""

    offset: int
    stored_bytes: int
    codec: int


def codec_id(name: str) -> int:
    """The number of the codec `name`. Raises `InvalidInput`."""
    if name not in _NAMES:
        raise InvalidInput(f"no codec is called {name!r}; wanted one of {', '.join(_NAMES)}")
    return _NAMES[name]


def encode(codec: int, raw: memoryview, width: int) -> tuple[int, Stored]:
    """The codec used and the stored bytes. Returns `raw` itself, not a copy, unless `codec`
    saves at least 5 %. A delta needs a base: for it, planes are tried."""
    if codec == RAW:
        return RAW, raw
    if codec == ZSTD:
        stored = compress(raw)
    else:
        codec, stored = SPLIT_ZSTD, _split(raw, width)
    return (codec, stored) if _shrank(stored, raw) else (RAW, raw)


def encode_delta(raw: memoryview, base: memoryview, at: Base, width: int) -> bytes:
    """`raw` as the difference from `base`, which has as many bytes and lies `at`."""
    return _BASE.pack(*at) + _split(memoryview(_difference(raw, base, width)), width)


def shares(raw: memoryview, base: memoryview | None, width: int) -> tuple[float, float]:
    """What planes would store of each byte of `raw`, and what a delta would, by a sample from its
    middle."""
    nbytes = min(_SHARE_BYTES * width, raw.nbytes)
    start = (raw.nbytes - nbytes) // 2 // width * width
    middle = slice(start, start + nbytes)
    if not nbytes:
        return 1.0, 1.0
    planes = len(_split(raw[middle], width)) / nbytes
    if base is None:
        return planes, 1.0
    return planes, len(
        _split(memoryview(_difference(raw[middle], base[middle], width)), width)
    ) / nbytes


def base_of(stored: Stored) -> Base:
    """Where the base of a delta lies; raises `Corrupt`."""
    if len(stored) < _BASE.size or any(stored[_BASE.size - 3 : _BASE.size]):
        raise Corrupt("a delta does not say where its base lies; run `ckptstore fsck`")
    base = Base(*_BASE.unpack_from(stored))
    if base.codec not in (RAW, ZSTD, SPLIT_ZSTD) or base.offset > _OFFSET_MAX:
        raise Corrupt(
            f"a delta says that its base lies at {base.offset} with codec {base.codec}; run "
            "`ckptstore fsck`"
        )
    return base


def moved(stored: Stored, at: Base) -> bytes:
    """A delta whose base now lies `at`."""
    return _BASE.pack(*at) + stored[_BASE.size :]


def decode_delta(stored: Stored, base: memoryview, out: memoryview, width: int) -> None:
    """Fill `out` with the raw bytes of a delta from the raw bytes of its base; raises `Corrupt`."""
    _fill_split(memoryview(stored)[_BASE.size :], out, width)
    unsigned, difference, whole = _words(out, width)
    # The inverse of `_difference`: the lowest bit is the sign.
    sign = difference & 1
    difference >>= 1
    difference ^= np.negative(sign, out=sign)
    difference += np.frombuffer(base[:whole], unsigned)


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
        packed = _packed(plane)
        flags[i] = packed is not None
        parts.append(plane if packed is None else packed)
    return b"".join((flags, struct.pack(f"<{width}I", *map(len, parts)), *parts))


def _packed(plane: bytes) -> bytes | None:
    """A plane as a frame, by the way that makes the least of a sample; None unless it shrinks."""
    start = max(len(plane) - _PROBE_BYTES, 0) // 2
    probe = plane[start : start + _PROBE_BYTES]
    frames = [compress(probe, literals=literals) for literals in (False, True)]
    packed = min(frames, key=len)
    if len(probe) < len(plane):
        if len(packed) > _WORTH_A_TRY * len(probe):
            return None
        packed = compress(plane, literals=packed is frames[1])
    return packed if len(packed) * 100 <= len(plane) * 95 else None


def _words(
    out: memoryview, width: int
) -> tuple[npt.DTypeLike, npt.NDArray[np.unsignedinteger], int]:
    """The whole words of `out`, their type, and the number of their bytes."""
    word = width if width in _WORDS else 8 if width == 16 else 1
    whole, unsigned = out.nbytes - out.nbytes % word, f"<u{word}"
    return unsigned, np.frombuffer(out[:whole], unsigned), whole


def _difference(raw: memoryview, base: memoryview, width: int) -> bytearray:
    """The difference of two chunks' words as unsigned integers, with its sign as the lowest bit:
    near floats of one sign are near integers, so the high bytes of both small differences are
    zero. What follows the last whole word stays."""
    out = bytearray(raw)
    unsigned, difference, whole = _words(memoryview(out), width)
    difference -= np.frombuffer(base[:whole], unsigned)
    signed = difference.view(f"<i{difference.itemsize}")
    sign = signed >> (8 * difference.itemsize - 1)
    difference <<= 1
    difference ^= sign.view(unsigned)
    return out


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
