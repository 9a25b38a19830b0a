"""How are a chunk's raw bytes stored: unchanged, as a zstd frame, as planes, one per byte of an
element, or as the planes of the difference from another chunk (docs/format.md §4)?

Planes are one chunk of Blosc's format, whose streams are zstd frames. They are made here, by numpy
and zstd, in ways that take less time and leave less than Blosc's own; Blosc's C code reads them in
half of numpy's time. It is given nothing that does not match a checksum, nor a header that is not
the one expected. Thread-safe.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHECKSUM_BYTES, checksum, checksum_of
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.frames import (
    ENTROPY,
    MATCHES,
    Stored,
    compress,
    decompress,
    decompress_all,
)

Words: TypeAlias = npt.NDArray[np.unsignedinteger]
Plane: TypeAlias = npt.NDArray[np.uint8]
"""A byte of each word; of two dimensions, each byte of each."""

RAW, ZSTD, SPLIT_ZSTD, DELTA, PATCH = range(5)
KNOWN_CODECS = (RAW, ZSTD, SPLIT_ZSTD, DELTA, PATCH)

_NAMES = {"raw": RAW, "zstd": ZSTD, "split-zstd": SPLIT_ZSTD}

_SAMPLED_WORDS = 4 << 10
"""Words from the middle of a chunk that are looked at to choose how."""
_BLOCK_BYTES = 256 << 10
"""Bytes of words that are split at a time: with what is made of them on the way, they fit a
processor's own cache."""
_WORTH = 0.975
"""A plane is compressed if that leaves at most such a part of it."""
_MATCHES_COST = 1.02
"""Entropy alone takes half the time: it may leave so much more."""
_SPARSE = 3
"""A way to store a plane beside those of frames: the bytes that differ from the most frequent one,
and where they are. A Huffman code takes at least one bit per byte; this way does not."""
_SPARSE_SHARE = 0.75
"""At least such a part of a sparse plane's bytes are equal."""
_SPARSE_GAIN = 0.0125
"""A sparse plane is worth its time if it leaves so much less of the plane than a frame."""
_SPLIT_MIN = 128
"""Blosc keeps the planes of at least so many words apart."""
_LIST = struct.Struct("<2I")
_CHUNK = struct.Struct("<4B4I")
_SIZE = struct.Struct("<I")
_ZSTD_SHUFFLED = 0x81
_BASE = struct.Struct("<QIB3x")
_SHIFT = struct.Struct("<Q")
_OFFSET_MAX = 1 << 62


class Base(NamedTuple):
    """The location of a delta's base, a chunk of the same pack that is no delta itself."""

    offset: int
    stored_bytes: int
    codec: int


class Sample(NamedTuple):
    """The result of encoding a sample of a chunk. `ways` has the encoding of each plane, None for
    raw; `share` is the number of stored bytes per raw byte. `shift` is subtracted from the
    differences of a delta."""

    ways: Sequence[int | None]
    share: float
    shift: int = 0


def codec_id(name: str) -> int:
    """The number of the codec `name`. Raises `InvalidInput`."""
    if name not in _NAMES:
        raise InvalidInput(f"no codec is called {name!r}; wanted one of {', '.join(_NAMES)}")
    return _NAMES[name]


def sample(raw: memoryview, width: int, base: memoryview | None = None) -> Sample:
    """Estimate by a sample how planes, or with `base` a delta, would store `raw`."""
    words, bases = words_of(raw, width), None if base is None else words_of(base, width)
    start = max(len(words) - _SAMPLED_WORDS, 0) // 2
    some = slice(start, start + _SAMPLED_WORDS)
    words, bases = words[some], None if bases is None else bases[some]
    shifts = (0,) if bases is None or not len(words) else _shifts(words, bases)
    return min((_sampled(words, bases, shift) for shift in shifts), key=attrgetter("share"))


def _sampled(words: Words, bases: Words | None, shift: int) -> Sample:
    best = [_best(plane) for plane in _planes(words, bases, shift)]
    return Sample([way for way, _ in best], sum(share for _, share in best) / len(best), shift)


def _shifts(words: Words, bases: Words) -> tuple[int, ...]:
    """What one might subtract from the differences of words, so that few of their high bytes
    differ: their median, less half of what as many bytes hold as half of them need, or one byte
    more. So a sign is one bit of one byte, where all high bytes of a negative number say it."""
    signed = (words - bases).view(f"<i{words.itemsize}")
    middle = len(signed) // 2
    center = np.partition(signed, middle)[middle]
    most = np.partition(np.abs(signed - center), middle)[middle]
    halves = [128 << 8 * n for n in range(words.itemsize - 1)]
    biases = [half for half in halves if half > most][:2] or [0]
    return tuple((int(center) - bias) % (1 << 8 * words.itemsize) for bias in biases)


def _best(plane: Plane) -> tuple[int | None, float]:
    """The best encoding for a plane, and about which part of it that leaves."""
    if not len(plane):
        return None, 1
    counts = np.bincount(plane)
    shares = counts[counts > 0] / len(plane)
    # A sample lacks some of the rarest bytes: it has less entropy, on average by this.
    lacks = (len(shares) - 1) / (2 * math.log(2) * len(plane))
    found = (lacks - float(shares @ np.log2(shares))) / 8
    if found > _WORTH:
        return None, 1
    way, least = (_SPARSE, _SPARSE_GAIN) if shares.max() > _SPARSE_SHARE else (ENTROPY, 0)
    matches = len(compress(plane.data, MATCHES)) / len(plane)
    return (MATCHES, matches) if matches * _MATCHES_COST < found + least else (way, found)


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
    return b"".join(_split(raw, width, None, sampled))


def encode_delta(
    raw: memoryview, base: memoryview, at: Base, width: int, sampled: Sample | None = None
) -> bytes:
    """Encode `raw` as the difference from `base`, which has the same length and lies `at`; each
    plane in the way that the sample chose."""
    found = sampled or sample(raw, width, base)
    return b"".join((_BASE.pack(*at), *_split(raw, width, base, found)))


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
    """Fill `out` with the raw bytes of a delta from those of its base, which are other memory;
    raises `Corrupt`."""
    words, shift = words_of(out, width), _fill(memoryview(stored)[_BASE.size :], out, width)
    words += words_of(base, width)
    words += words.dtype.type(shift)


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
        _fill(memoryview(stored), out, width)
    else:
        raise Corrupt(
            f"codec {codec} is unknown; wanted one of {KNOWN_CODECS}; run `ckptstore fsck` or a "
            "newer ckptstore"
        )


def words_of(data: memoryview, width: int) -> Words:
    """All whole words of elements of `width` bytes."""
    word = width if width in (1, 2, 4, 8) else 8 if width == 16 else 1
    return np.frombuffer(data[: data.nbytes - data.nbytes % word], f"<u{word}")


def subtract(words: Words, bases: Words) -> None:
    """Make differences of words as unsigned integers, with the sign as the lowest bit: near floats
    of one sign are near integers, so the high bytes of both small differences are zero."""
    words -= bases
    sign = words.view(f"<i{words.itemsize}") >> (8 * words.itemsize - 1)
    words <<= 1
    words ^= sign.view(words.dtype)


def unfold(differences: Words) -> None:
    """Make differences of `subtract` ones that can be added, in place."""
    sign = np.negative(differences.astype(np.uint8) & 1).view(np.int8)
    differences >>= 1
    signed = differences.view(f"<i{differences.itemsize}")
    signed ^= sign


def encode_few(words: Words) -> bytes:
    """Encode words as planes without a sample, which would take longer than the planes of a few
    thousand. A plane that is nearly all zeros repeats; any other hardly does."""
    planes = _planes(words, None, 0)
    ways = [MATCHES if np.count_nonzero(plane) * 4 < len(plane) else ENTROPY for plane in planes]
    return b"".join(_chunk(planes, ways))


class Few(NamedTuple):
    """Words as `encode_few` stores them: so many, of `width` bytes."""

    stored: memoryview
    words: int
    width: int

    def pieces(self, planes: Plane) -> Iterator[tuple[memoryview, Plane]]:
        """What is stored for each plane, or for all, and the part of `planes` that it fills;
        raises `Corrupt`."""
        rest, nbytes = self.stored[_CHUNK.size :], planes.size
        if self.stored[: _CHUNK.size] != _head(nbytes, self.width, len(rest)):
            raise Corrupt(
                f"{len(self.stored)} bytes are no Blosc chunk of {nbytes}; run `ckptstore fsck`"
            )
        step = 1 if self.words >= _SPLIT_MIN else self.width
        for i in range(0, self.width, step):
            stop = _SIZE.size + int.from_bytes(rest[: _SIZE.size], "little")
            yield rest[_SIZE.size : stop], planes[i : i + step]
            rest = rest[stop:]


def decode_few(parts: Sequence[Few]) -> Words:
    """The words of all parts, none of which is empty, one behind the other and as wide as the
    widest, of what matches a checksum; raises `Corrupt`. Calls of Blosc would take five times as
    long, since each makes a zstd context."""
    planes = np.zeros((max(p.width for p in parts), sum(p.words for p in parts)), np.uint8)
    frames, start = list[tuple[memoryview, Plane]](), 0
    for part in parts:
        stop = start + part.words
        for stored, plane in part.pieces(planes[: part.width, start:stop]):
            if len(stored) == plane.size:
                plane[:] = np.frombuffer(stored, np.uint8).reshape(plane.shape)
            else:
                frames.append((stored, plane))
        start = stop
    contents = decompress_all([(stored, plane.size) for stored, plane in frames])
    for (_, plane), content in zip(frames, contents, strict=True):
        plane[:] = np.frombuffer(content, np.uint8).reshape(plane.shape)
    words: Words = planes[-1].astype(f"<u{len(planes)}")
    for plane in planes[-2::-1]:
        words <<= 8
        words |= plane
    return words


def _split(raw: memoryview, width: int, base: memoryview | None, sampled: Sample) -> list[Stored]:
    """The planes of `raw`, or of its difference from `base`, each in the way that the sample chose:
    a checksum, the shift, what sparse planes list, a Blosc chunk, and the bytes after the last
    whole word."""
    words = words_of(raw, width)
    planes = _planes(words, None if base is None else words_of(base, width), sampled.shift)
    listed = [_list(planes[i]) if way == _SPARSE else b"" for i, way in enumerate(sampled.ways)]
    sizes = struct.pack(f"<{len(listed)}I", *map(len, listed))
    ways = [MATCHES if way == _SPARSE else way for way in sampled.ways]
    parts = [_SHIFT.pack(sampled.shift), sizes, *listed, *_chunk(planes, ways), raw[words.nbytes :]]
    return [checksum_of(parts), *parts]


def _fill(stored: memoryview, out: memoryview, width: int) -> int:
    """Fill `out` from what `_split` made; the shift. Raises `Corrupt`."""
    rest, words = stored[CHECKSUM_BYTES:], words_of(out, width)
    at, tail = _SHIFT.size + 4 * words.itemsize, out.nbytes - words.nbytes
    if len(rest) < at + tail or checksum(rest) != stored[:CHECKSUM_BYTES]:
        raise Corrupt("planes do not match their own checksum; run `ckptstore fsck`")
    shift, *sizes = struct.unpack_from(f"<Q{words.itemsize}I", rest)
    if shift >> 8 * words.itemsize:
        raise Corrupt(f"planes are shifted by {shift}, which is no word; run `ckptstore fsck`")
    end = len(rest) - tail
    _join(rest[at + sum(sizes) : end], words)
    for i, size in enumerate(sizes):
        if size:
            _fill_listed(rest[at : at + size], words.view(np.uint8)[i :: words.itemsize])
            at += size
    out[words.nbytes :] = rest[end:]
    return int(shift)


def _planes(words: Words, bases: Words | None, shift: int) -> Plane:
    """The first bytes of all words, or of their differences from `bases` and `shift`, then all
    second bytes, and so on: a row each."""
    planes = np.empty((words.itemsize, len(words)), np.uint8)
    step = _BLOCK_BYTES // words.itemsize
    for start in range(0, len(words), step):
        block = slice(start, start + step)
        some = words[block].copy() if bases is None else words[block] - bases[block]
        if shift:
            some -= words.dtype.type(shift)
        _halve(some, planes[:, block])
    return planes


def _halve(words: Words, planes: Plane) -> None:
    """Fill a plane for each byte of `words`, which change."""
    half = len(planes) // 2
    if half < 2:
        planes[0] = words  # the low byte of each
        planes[half:] = words >> 8 * half
        return
    _halve(words.astype(f"<u{half}"), planes[:half])
    words >>= 8 * half
    _halve(words.astype(f"<u{half}"), planes[half:])


def _list(plane: Plane) -> bytes:
    """The bytes of a plane that differ from the most frequent one, each with its distance from the
    one before. Then the plane has the most frequent one everywhere."""
    most = np.bincount(plane[:: len(plane) // 1024 or 1]).argmax().astype(np.uint8)
    at = np.flatnonzero(plane != most)
    distances = at.astype("<u4")
    distances[1:] -= distances[:-1].copy()
    listed = compress(plane[at].data, ENTROPY)
    plane[:] = most
    coded = encode_few(distances)
    return b"".join((_LIST.pack(len(at), len(coded)), coded, listed))


def _fill_listed(stored: memoryview, plane: Plane) -> None:
    """Put into a plane what `_list` has listed; raises `Corrupt`."""
    count, nbytes = _LIST.unpack_from(stored) if len(stored) >= _LIST.size else (len(plane) + 1, 0)
    if count > len(plane):
        raise Corrupt(f"a sparse plane of {len(plane)} bytes lists {count}; run `ckptstore fsck`")
    if not count:
        return
    distances = decode_few([Few(stored[_LIST.size :][:nbytes], count, 4)])
    at = np.cumsum(distances, dtype=np.int64)
    if at[-1] >= len(plane):
        raise Corrupt(
            f"a sparse plane of {len(plane)} bytes goes on to {at[-1]}; run `ckptstore fsck`"
        )
    listed = decompress(stored[_LIST.size + nbytes :], count, min_bytes=count)
    plane[at] = np.frombuffer(listed, np.uint8)


def _chunk(planes: Plane, ways: Sequence[int | None]) -> list[Stored]:
    """A Blosc chunk of one block, each plane compressed in its way, or raw if that does not suit
    it. Nothing of no words."""
    if not planes.size:
        return []
    width = len(planes)
    if planes.shape[1] < _SPLIT_MIN:
        planes, ways = planes.reshape(1, -1), [ENTROPY]
    parts = list[Stored]()
    for i, plane in enumerate(planes):
        way = ways[i]
        stored = plane.data if way is None else compress(plane.data, way)
        stored = stored if len(stored) <= _WORTH * len(plane) else plane.data
        parts += _SIZE.pack(len(stored)), stored
    return [_head(planes.size, width, sum(map(len, parts))), *parts]


def _head(nbytes: int, width: int, stored_bytes: int) -> bytes:
    """How a Blosc chunk of one block begins: versions, flags, bytes of a word, of all, of a block,
    and as stored, and where the block begins."""
    sizes = nbytes, nbytes, _CHUNK.size + stored_bytes, _CHUNK.size
    return _CHUNK.pack(2, 1, _ZSTD_SHUFFLED, width, *sizes)


def _join(stored: memoryview, words: Words) -> None:
    """Fill `words` from a Blosc chunk; raises `Corrupt`."""
    head = _head(words.nbytes, words.itemsize, len(stored) - _CHUNK.size) if len(words) else b""
    if stored[: _CHUNK.size] != head:
        raise Corrupt(
            f"{len(stored)} bytes are no Blosc chunk of {words.nbytes}; run `ckptstore fsck`"
        )
    if len(words):
        try:
            _blosc().decompress_ptr(stored, words.ctypes.data)
        except _blosc().blosc_extension.error as error:
            raise Corrupt(f"a Blosc chunk is damaged: {error}; run `ckptstore fsck`") from error


@cache
def _blosc() -> Any:
    import blosc  # in functions: a query of the catalog starts without it

    # Chunks of one block are read by the calling thread. Without this, one at a time is.
    blosc.set_releasegil(True)
    return blosc
