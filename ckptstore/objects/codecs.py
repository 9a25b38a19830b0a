"""How are a chunk's raw bytes stored: unchanged, as a zstd frame, as one frame per byte of an
element, or so as the difference from another chunk (docs/format.md §4)?

Thread-safe.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.frames import ENTROPY, MATCHES, Stored, compress, decompress

Words: TypeAlias = npt.NDArray[np.unsignedinteger]
Plane: TypeAlias = npt.NDArray[np.uint8]

RAW, ZSTD, SPLIT_ZSTD, DELTA = range(4)
KNOWN_CODECS = (RAW, ZSTD, SPLIT_ZSTD, DELTA)

_NAMES = {"raw": RAW, "zstd": ZSTD, "split-zstd": SPLIT_ZSTD}

_SAMPLED_MIN, _SAMPLED_MAX, _SAMPLED_PART = 2 << 10, 8 << 10, 8
"""Elements from the middle of a chunk that are compressed to choose how: one of so many."""
_BLOCK_BYTES = 512 << 10
"""Bytes of elements that are split or joined at a time: with what is made of them on the way, they
fit a processor's own cache."""
_MATCHES_COST = 1.02
"""Entropy alone takes half the time: it may leave so much more."""
_BASE = struct.Struct("<QIB3x")
_OFFSET_MAX = 1 << 62


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


class Sample(NamedTuple):
    """What a sample of a chunk says: the way of each plane, None for raw, and what is stored of
    each byte. `stored` is the whole, if the sample was."""

    ways: Sequence[int | None]
    share: float
    stored: bytes | None


def sample(raw: memoryview, width: int, base: memoryview | None = None) -> Sample:
    """What planes would store of `raw`, or with `base` a delta would, by a sample."""
    part = raw.nbytes // width // _SAMPLED_PART
    nbytes = min(max(_SAMPLED_MIN, min(part, _SAMPLED_MAX)) * width, raw.nbytes)
    start = (raw.nbytes - nbytes) // 2 // width * width
    middle = slice(start, start + nbytes)
    planes = _planes(raw[middle], width, None if base is None else base[middle])
    best = [_best(plane) for plane in planes]
    ways = [way for way, _ in best]
    stored = _assembled(ways, [part for _, part in best])
    return Sample(ways, len(stored) / max(nbytes, 1), stored if nbytes == raw.nbytes else None)


def _best(plane: Stored) -> tuple[int | None, Stored]:
    """The best way for a plane, and what it makes of it."""
    way, frame = MATCHES, compress(plane, MATCHES)
    if len(frame) < len(plane):  # otherwise, entropy alone makes nothing of it, either
        entropy = compress(plane, ENTROPY)
        if len(entropy) <= _MATCHES_COST * len(frame):
            way, frame = ENTROPY, entropy
    return (way, frame) if len(frame) < 0.95 * len(plane) else (None, plane)


def encode(codec: int, raw: memoryview, width: int) -> tuple[int, Stored]:
    """The codec used and the stored bytes. Returns `raw` itself, not a copy, unless `codec`
    saves at least 5 %. A delta needs a base: for it, planes are tried."""
    if codec == RAW:
        return RAW, raw
    stored: Stored
    if codec == ZSTD:
        stored = compress(raw)
    else:
        codec, stored = SPLIT_ZSTD, encode_planes(raw, width, sample(raw, width))
    return (codec, stored) if len(stored) * 100 <= raw.nbytes * 95 else (RAW, raw)


def encode_planes(raw: memoryview, width: int, sampled: Sample) -> bytes:
    """`raw` as planes, in the ways that a sample of it named."""
    return sampled.stored or _split(raw, width, None, sampled.ways)


def encode_delta(
    raw: memoryview, base: memoryview, at: Base, width: int, sampled: Sample | None = None
) -> bytes:
    """`raw` as the difference from `base`, which has as many bytes and lies `at`; in the ways that
    a sample of it named."""
    found = sampled or sample(raw, width, base)
    return _BASE.pack(*at) + (found.stored or _split(raw, width, base, found.ways))


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
    """Fill `out` with the raw bytes of a delta from the raw bytes of its base, which may be in
    `out`; raises `Corrupt`."""
    _fill_split(memoryview(stored)[_BASE.size :], out, width, base)


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


def _split(
    raw: memoryview, width: int, base: memoryview | None, ways: Sequence[int | None]
) -> bytes:
    """The planes of `raw`, or of its difference from `base`, in these ways if they shrink so."""
    used, parts = list(ways), list[Stored]()
    for i, plane in enumerate(_planes(raw, width, base)):
        way = used[i]
        frame = plane if way is None else compress(plane, way)
        if len(frame) * 100 > len(plane) * 95:
            used[i], frame = None, plane
        parts.append(frame)
    return _assembled(used, parts)


def _assembled(ways: Sequence[int | None], parts: Sequence[Stored]) -> bytes:
    flags = bytes(way is not None for way in ways)
    return b"".join((flags, struct.pack(f"<{len(parts)}I", *map(len, parts)), *parts))


def _planes(raw: memoryview, width: int, base: memoryview | None) -> list[memoryview]:
    """The first bytes of all elements of `raw`, or of its difference from `base`, then all second
    bytes, and so on. The last plane goes on with what follows the last whole element."""
    words = _elements(raw, width)
    tail = _tail(raw[words.nbytes :], base and base[words.nbytes :], width, _subtract)
    bases = None if base is None else _elements(base, width)
    planes = list(np.empty((width, len(words)), np.uint8))
    scratch = np.empty((2, min(len(words), _BLOCK_BYTES // words.itemsize)), words.dtype)
    for some, i, rows in _blocks(words, planes):
        word, (shifted, changed) = words[some, i], scratch[:, : some.stop - some.start]
        if bases is not None:
            changed[...] = word
            _subtract(changed, bases[some, i])
            word = changed
        for n, row in enumerate(rows):
            row[some] = np.right_shift(word, 8 * n, out=shifted) if n else word
    found = [plane.data for plane in planes]
    if tail:
        found[-1] = memoryview(b"".join((found[-1], tail)))
    return found


def _fill_split(
    stored: memoryview, out: memoryview, width: int, base: memoryview | None = None
) -> None:
    """Fill `out` from planes, which are those of its difference from `base` if that is given."""
    words = _elements(out, width)
    bases = None if base is None else _elements(base, width)
    planes = [np.frombuffer(plane, np.uint8) for plane in _stored_planes(stored, out.nbytes, width)]
    differences = np.empty(min(len(words), _BLOCK_BYTES // words.itemsize), words.dtype)
    for some, i, rows in _blocks(words, planes):
        word, parts = words[some, i], [row[some] for row in rows]
        if bases is None:
            if (found := _joined(parts, word)) is not word:
                word[...] = found
        else:
            changed = differences[: len(word)]
            changed[...] = _joined(parts, changed)
            _add(changed, bases[some, i], word)
    tail = planes[-1][len(words) :].data
    out[words.nbytes :] = _tail(tail, base and base[words.nbytes :], width, _add)


def _stored_planes(stored: memoryview, nbytes: int, width: int) -> Iterator[Stored]:
    """The planes of a chunk of `nbytes`; raises `Corrupt`."""
    at = 5 * width
    sizes = struct.unpack(f"<{width}I", stored[width:at]) if stored.nbytes >= at else ()
    if not sizes or at + sum(sizes) != stored.nbytes or max(stored[:width]) > 1:
        raise Corrupt(
            f"the planes of a split-zstd chunk of {stored.nbytes} bytes do not add up; run "
            "`ckptstore fsck`"
        )
    for i, (flag, size) in enumerate(zip(stored[:width], sizes, strict=True)):
        wanted = nbytes // width + (nbytes % width if i == width - 1 else 0)
        part = stored[at : at + size]
        plane = decompress(part, wanted, min_bytes=wanted) if flag else part
        if len(plane) != wanted:
            raise Corrupt(
                f"plane {i} of a split-zstd chunk has {len(plane)} bytes; wanted {wanted}; run "
                "`ckptstore fsck`"
            )
        yield plane
        at += size


def _word(width: int) -> int:
    """The bytes of the words of which elements of `width` bytes consist."""
    return width if width in (1, 2, 4, 8) else 8 if width == 16 else 1


def _elements(data: memoryview, width: int) -> Words:
    """The whole elements, as a row of words each."""
    word = _word(width)
    whole = data.nbytes - data.nbytes % width
    return np.frombuffer(data[:whole], f"<u{word}").reshape(-1, width // word)


def _tail(
    data: memoryview, base: memoryview | None, width: int, change: Callable[[Words, Words], None]
) -> bytearray:
    """What follows the last whole element, its whole words changed by those of `base`."""
    tail, word = bytearray(data), _word(width)
    if base is not None:
        nbytes = len(tail) - len(tail) % word
        words = np.frombuffer(memoryview(tail)[:nbytes], f"<u{word}")
        change(words, np.frombuffer(base[:nbytes], words.dtype))
    return tail


def _blocks(words: Words, planes: Sequence[Plane]) -> Iterator[tuple[slice, int, Sequence[Plane]]]:
    """The rows in parts that fit a processor's own cache, by column, with its planes."""
    step = _BLOCK_BYTES // words.itemsize
    for start in range(0, len(words), step):
        for i in range(words.shape[1]):
            of = slice(i * words.itemsize, (i + 1) * words.itemsize)
            yield slice(start, min(start + step, len(words))), i, planes[of]


def _joined(planes: Sequence[Plane], out: Words | None = None) -> Words:
    """The words whose bytes are in `planes`, the lowest first: in `out` if that is given, or as
    narrower ones if the others' bytes are zero."""
    if len(planes) == 1:
        return planes[0]
    # Halves first, because the shifts of narrow words take less time.
    half = len(planes) // 2
    low, high = _joined(planes[:half]), planes[half:]
    if not any(plane[0] or plane.max() for plane in high):
        return low
    if out is None:
        out = np.empty(len(low), f"<u{len(planes)}")
    out[...] = _joined(high)
    out <<= 8 * half
    out |= low
    return out


def _subtract(words: Words, bases: Words) -> None:
    """Make differences of words as unsigned integers, with the sign as the lowest bit: near floats
    of one sign are near integers, so the high bytes of both small differences are zero."""
    words -= bases
    sign = words.view(f"<i{words.itemsize}") >> (8 * words.itemsize - 1)
    words <<= 1
    words ^= sign.view(words.dtype)


def _add(differences: Words, bases: Words, out: Words | None = None) -> None:
    """The inverse of `_subtract`, in place or into `out`, which may be `bases`."""
    sign = np.negative(differences.astype(np.uint8) & 1).view(np.int8)
    differences >>= 1
    signed = differences.view(f"<i{differences.itemsize}")
    signed ^= sign
    np.add(differences, bases, out=differences if out is None else out)
