"""How are a chunk's raw bytes stored: unchanged, as a zstd frame, as planes, one per byte of an
element, or as the planes of the difference from another chunk (docs/format.md §4)?

Thread-safe.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.frames import ENTROPY, MATCHES, Stored, compress, decompress

Words: TypeAlias = npt.NDArray[np.unsignedinteger]
Plane: TypeAlias = npt.NDArray[np.uint8]

RAW, ZSTD, SPLIT_ZSTD, DELTA, PATCH = range(5)
KNOWN_CODECS = (RAW, ZSTD, SPLIT_ZSTD, DELTA, PATCH)

_NAMES = {"raw": RAW, "zstd": ZSTD, "split-zstd": SPLIT_ZSTD}

_SAMPLED_MIN, _SAMPLED_MAX, _SAMPLED_PART = 2 << 10, 8 << 10, 8
"""Elements from the middle of a chunk that are compressed to choose how: one of so many."""
_BLOCK_BYTES = 512 << 10
"""Bytes of elements that are split or joined at a time: with what is made of them on the way, they
fit a processor's own cache."""
_MATCHES_COST = 1.02
"""Entropy alone takes half the time: it may leave so much more."""
_SPARSE = 3
"""A way to store a plane beside those of frames: its bytes that are not zero, and the zeros before
each. A Huffman code takes at least one bit per byte, so of zeros alone it makes an eighth; this way
does not, and reading it takes 0.6 of the time."""
_SPARSE_PART = 4
"""At most one byte of so many is not zero in a sparse plane."""
_CENTER_WORDS = 1 << 10
"""Elements of a sample whose median is the center."""
_CENTER_PART = 4
"""A center is subtracted if it is at least such a part of the differences' median size: a smaller
one saves less than a hundredth of a bit per word."""
_BASE = struct.Struct("<QIB3x")
_CENTER = struct.Struct("<Q")
_HEAD_BYTES = _BASE.size + _CENTER.size
_OFFSET_MAX = 1 << 62


class Base(NamedTuple):
    """The location of a delta's base, a chunk of the same pack that is no delta itself."""

    offset: int
    stored_bytes: int
    codec: int


def codec_id(name: str) -> int:
    """The number of the codec `name`. Raises `InvalidInput`."""
    if name not in _NAMES:
        raise InvalidInput(f"no codec is called {name!r}; wanted one of {', '.join(_NAMES)}")
    return _NAMES[name]


class Sample(NamedTuple):
    """The result of encoding a sample of a chunk. `ways` has the encoding of each plane, None for
    raw; `share` is the number of stored bytes per raw byte. `stored` is the whole encoded chunk if
    the sample was the whole chunk. `center` is the approximate difference of most words from those
    of the base."""

    ways: Sequence[int | None]
    share: float
    stored: bytes | None
    center: int


def sample(raw: memoryview, width: int, base: memoryview | None = None) -> Sample:
    """Estimate by a sample how planes, or with `base` a delta, would store `raw`."""
    part = raw.nbytes // width // _SAMPLED_PART
    nbytes = min(max(_SAMPLED_MIN, min(part, _SAMPLED_MAX)) * width, raw.nbytes)
    start = (raw.nbytes - nbytes) // 2 // width * width
    some, base = raw[start : start + nbytes], base and base[start : start + nbytes]
    center = _center(_elements(some, width), _elements(base, width)) if base else 0
    best = [_best(plane) for plane in _planes(some, width, base, center)]
    ways = [way for way, _ in best]
    stored = _assembled(ways, [part for _, part in best])
    whole = stored if nbytes == raw.nbytes else None
    return Sample(ways, len(stored) / max(nbytes, 1), whole, center)


def _center(words: Words, bases: Words) -> int:
    """The median of the differences of words, 0 if it is small beside them."""
    some = slice(None, None, -(-len(words) // _CENTER_WORDS) or 1)
    signed = np.subtract(words[some], bases[some]).view(f"<i{words.itemsize}").ravel()
    if not len(signed):
        return 0
    middle, sizes = len(signed) // 2, np.abs(signed)
    center = int(np.partition(signed, middle)[middle])
    if abs(center) * _CENTER_PART < int(np.partition(sizes, middle)[middle]):
        return 0
    return center % (1 << 8 * words.itemsize)


def _best(plane: Stored) -> tuple[int | None, Stored]:
    """The best encoding for a plane, and the encoded bytes."""
    way, stored = MATCHES, compress(plane, MATCHES)
    if len(stored) < len(plane):  # otherwise, no other way makes anything of it, either
        entropy, sparse = compress(plane, ENTROPY), _sparse(plane)
        if len(entropy) <= _MATCHES_COST * len(stored):
            way, stored = ENTROPY, entropy
        if sparse and len(sparse) <= len(stored):
            way, stored = _SPARSE, sparse
    return (way, stored) if len(stored) < 0.95 * len(plane) else (None, plane)


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
    """Encode `raw` as planes, each in the way that the sample chose."""
    return sampled.stored or _split(raw, width, None, sampled)


def encode_few(words: Words) -> bytes:
    """Encode words as planes without a sample, which would take longer than the planes of a few
    thousand. A plane that is nearly all zeros repeats; any other hardly does."""
    ways, parts = list[int | None](), list[Stored]()
    for plane in _planes(words.view(np.uint8).data, words.itemsize, None, 0):
        used = np.count_nonzero(np.frombuffer(plane, np.uint8))
        way, stored = _stored_plane(plane, MATCHES if used * _SPARSE_PART < len(plane) else ENTROPY)
        ways.append(way)
        parts.append(stored)
    return _assembled(ways, parts)


def encode_delta(
    raw: memoryview, base: memoryview, at: Base, width: int, sampled: Sample | None = None
) -> bytes:
    """Encode `raw` as the difference from `base`, which has the same length and lies `at`; each
    plane in the way that the sample chose."""
    found = sampled or sample(raw, width, base)
    planes = found.stored or _split(raw, width, base, found)
    return b"".join((_BASE.pack(*at), _CENTER.pack(found.center), planes))


def base_of(stored: Stored) -> Base:
    """Where the base of a delta lies; raises `Corrupt`."""
    if len(stored) < _HEAD_BYTES or any(stored[_BASE.size - 3 : _BASE.size]):
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
    (center,) = _CENTER.unpack_from(stored, _BASE.size)
    if center >> 8 * _word(width):
        raise Corrupt(f"the center {center} of a delta is no word; run `ckptstore fsck`")
    _fill_split(memoryview(stored)[_HEAD_BYTES:], out, width, base, center)


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


def _split(raw: memoryview, width: int, base: memoryview | None, sampled: Sample) -> bytes:
    """Encode the planes of `raw`, or of its difference from `base`, each in the way that the sample
    chose; a plane that would not shrink stays raw."""
    ways, parts = list(sampled.ways), list[Stored]()
    for i, plane in enumerate(_planes(raw, width, base, sampled.center)):
        ways[i], stored = _stored_plane(plane, ways[i])
        parts.append(stored)
    return _assembled(ways, parts)


def _stored_plane(plane: Stored, way: int | None) -> tuple[int | None, Stored]:
    """Encode a plane in the given way, or in another if that does not suit it. Returns the bytes
    and the way."""
    stored = _sparse(plane) if way == _SPARSE else None
    if way is not None and stored is None:
        way = ENTROPY if way == _SPARSE else way
        stored = compress(plane, way)
    if stored is None or len(stored) * 100 > len(plane) * 95:
        return None, plane
    return way, stored


def _assembled(ways: Sequence[int | None], parts: Sequence[Stored]) -> bytes:
    forms = bytes(0 if way is None else 2 if way == _SPARSE else 1 for way in ways)
    return b"".join((forms, struct.pack(f"<{len(parts)}I", *map(len, parts)), *parts))


def _sparse(plane: Stored) -> bytes | None:
    """The nonzero bytes of a plane, each with the count of zeros before it; None if there are too
    many. In a stretch of more than 255 zeros, one zero is listed as a value after each 255."""
    row = np.frombuffer(plane, np.uint8)
    used = row != 0  # numpy finds the positions of booleans in a third of the time
    if np.count_nonzero(used) * _SPARSE_PART > len(row):
        return None
    at = np.flatnonzero(used)
    zeros = np.diff(at, prepend=-1) - 1
    ends = np.cumsum((zeros >> 8) + 1) - 1
    count = int(ends[-1]) + 1 if len(ends) else 0
    if count * _SPARSE_PART > len(row):
        return None
    gaps, values = np.full(count, 255, np.uint8), np.zeros(count, np.uint8)
    gaps[ends], values[ends] = zeros & 255, row[at]
    first = compress(gaps.data, ENTROPY)
    return b"".join((struct.pack("<I", len(first)), first, compress(values.data, ENTROPY)))


def _dense(stored: memoryview, nbytes: int) -> memoryview:
    """A plane of `nbytes` that `_sparse` has stored; raises `Corrupt`."""
    first = 4 + int.from_bytes(stored[:4], "little")
    gaps = decompress(stored[4:first], nbytes // _SPARSE_PART)
    values = decompress(stored[first:], len(gaps), min_bytes=len(gaps))
    at = np.frombuffer(gaps, np.uint8).astype(np.intp)
    at += 1
    np.cumsum(at, out=at)
    at -= 1
    if len(at) and at[-1] >= nbytes:
        raise Corrupt(f"a sparse plane of {nbytes} bytes goes on to {at[-1]}; run `ckptstore fsck`")
    plane = np.zeros(nbytes, np.uint8)
    plane[at] = np.frombuffer(values, np.uint8)
    return plane.data


def _planes(raw: memoryview, width: int, base: memoryview | None, center: int) -> list[memoryview]:
    """The first bytes of all elements of `raw`, or of its difference from `base` and `center`, then
    all second bytes, and so on. The last plane goes on with what follows the last whole element."""
    words, change = _elements(raw, width), partial(subtract, center=center)
    tail = _tail(raw[words.nbytes :], base and base[words.nbytes :], width, change)
    bases = None if base is None else _elements(base, width)
    planes = list(np.empty((width, len(words)), np.uint8))
    scratch = np.empty((2, min(len(words), _BLOCK_BYTES // words.itemsize)), words.dtype)
    for some, i, rows in _blocks(words, planes):
        word, (shifted, changed) = words[some, i], scratch[:, : some.stop - some.start]
        if bases is not None:
            changed[...] = word
            change(changed, bases[some, i])
            word = changed
        for n, row in enumerate(rows):
            row[some] = np.right_shift(word, 8 * n, out=shifted) if n else word
    found = [plane.data for plane in planes]
    if tail:
        found[-1] = memoryview(b"".join((found[-1], tail)))
    return found


def _fill_split(
    stored: memoryview,
    out: memoryview,
    width: int,
    base: memoryview | None = None,
    center: int = 0,
) -> None:
    """Fill `out` from planes, which are those of its difference from `base` and `center` if a base
    is given."""
    words, change = _elements(out, width), partial(add, center=center)
    bases = None if base is None else _elements(base, width)
    planes = [np.frombuffer(plane, np.uint8) for plane in planes_of(stored, out.nbytes, width)]
    differences = np.empty(min(len(words), _BLOCK_BYTES // words.itemsize), words.dtype)
    for some, i, rows in _blocks(words, planes):
        word, parts = words[some, i], [row[some] for row in rows]
        if bases is None:
            if (found := _joined(parts, word)) is not word:
                word[...] = found
        else:
            changed = differences[: len(word)]
            changed[...] = _joined(parts, changed)
            change(changed, bases[some, i], out=word)
    tail = planes[-1][len(words) :].data
    out[words.nbytes :] = _tail(tail, base and base[words.nbytes :], width, change)


def planes_of(stored: memoryview, nbytes: int, width: int) -> Iterator[Stored]:
    """The planes of a chunk of `nbytes`; raises `Corrupt`."""
    at = 5 * width
    sizes = struct.unpack(f"<{width}I", stored[width:at]) if stored.nbytes >= at else ()
    if not sizes or at + sum(sizes) != stored.nbytes or max(stored[:width]) > 2:
        raise Corrupt(
            f"the planes of a split-zstd chunk of {stored.nbytes} bytes do not add up; run "
            "`ckptstore fsck`"
        )
    for i, (form, size) in enumerate(zip(stored[:width], sizes, strict=True)):
        wanted = nbytes // width + (nbytes % width if i == width - 1 else 0)
        plane: Stored = stored[at : at + size]
        if form:
            plane = (
                _dense(stored[at : at + size], wanted)
                if form == 2
                else decompress(plane, wanted, min_bytes=wanted)
            )
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


def words_of(data: memoryview, width: int) -> Words:
    """The words of all whole elements in one row."""
    return _elements(data, width).reshape(-1)


def _tail(
    data: memoryview, base: memoryview | None, width: int, change: Callable[[Words, Words], None]
) -> bytearray:
    """The bytes after the last whole element; their whole words are differences from those of
    `base`."""
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
    """Words from `planes`, which hold their bytes, the lowest first. Filled into `out` if given; as
    narrower words if the other bytes are zero."""
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


def subtract(words: Words, bases: Words, *, center: int = 0) -> None:
    """Make differences of words as unsigned integers, with the sign as the lowest bit: near floats
    of one sign are near integers, so the high bytes of both small differences are zero. Words that
    all grew, or all shrank, are nearer to their bases and a `center`."""
    words -= bases
    if center:
        words -= words.dtype.type(center)
    sign = words.view(f"<i{words.itemsize}") >> (8 * words.itemsize - 1)
    words <<= 1
    words ^= sign.view(words.dtype)


def unfold(differences: Words) -> None:
    """Make differences of `subtract` ones that can be added, in place."""
    sign = np.negative(differences.astype(np.uint8) & 1).view(np.int8)
    differences >>= 1
    signed = differences.view(f"<i{differences.itemsize}")
    signed ^= sign


def add(differences: Words, bases: Words, *, center: int = 0, out: Words | None = None) -> None:
    """The inverse of `subtract`, in place or into `out`, which may be `bases`."""
    unfold(differences)
    if center:
        differences += differences.dtype.type(center)
    np.add(differences, bases, out=differences if out is None else out)
