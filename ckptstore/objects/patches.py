"""How is a chunk stored as a patch: the words that differ from its base, or from the rounding of
its bases, chunks that may lie in any pack (docs/format.md §4)?

A patch names its bases by chunk id. It begins with the checksum of its own bytes, so that it can be
verified without them. It is made at commit: where the chunk that was at the same place before is at
hand and few words differ, and where 16-bit weights are the rounding of float32 masters. Pure, and
thread-safe.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId, checksum
from ckptstore.errors import Corrupt
from ckptstore.objects import codecs
from ckptstore.objects.frames import Stored

DEPTH_MAX = 64
"""A chunk is at most so many patches away from one that is stored whole."""

CHANGED_PART = 8
"""At most one word of so many differs from the base."""

_GATHERED_WORDS = 1 << 17
"""Of patches that are decoded at once, before the last of them."""

BASES_MAX = 2
"""So many chunks of masters have the elements of one chunk of weights."""

SAME, BFLOAT16, FLOAT16 = range(3)
"""How a patch makes of its bases the words that it changes: it takes those of its one base, or
rounds the float32 words of all to the nearest number of 16 bits, halves to even."""

ROUNDINGS = {"bfloat16": BFLOAT16, "float16": FLOAT16}
"""The roundings, by the dtype that they make."""

_NANS = {BFLOAT16: 0x7FC0, FLOAT16: 0x7E00}
"""What a rounding makes of any NaN, apart from its sign."""

fast_rounding: Callable[[int, npt.NDArray[Any], npt.NDArray[Any]], bool] | None = None
"""Rounds words faster than numpy does, and to the same bits, except for NaN; False if it did not.
Set where torch is at hand."""

_FAST_WORDS_MIN = 1 << 12
"""Fewer words are rounded by numpy at once."""

_ROUNDED_WORDS = 1 << 16
"""Words that are rounded at a time: with what is made of them, they fit a processor's cache."""

_HEAD = struct.Struct(
    f"<{CHECKSUM_BYTES}x{CHUNK_ID_BYTES}sIIIHBB{CHUNK_ID_BYTES * (BASES_MAX - 1)}sB3x"
)
_NO_CHUNKS = bytes(CHUNK_ID_BYTES * (BASES_MAX - 1))
_GAP_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}


Changed: TypeAlias = npt.NDArray[np.intp]
"""The numbers of words, in order."""

NOTHING: Changed = np.empty(0, np.intp)


class ChainLength(NamedTuple):
    """How far a chunk is from one that is stored whole: so many patches, of so many bytes."""

    depth: int = 0
    nbytes: int = 0


WHOLE = ChainLength()
"""Of a chunk that is stored whole."""


class Head(NamedTuple):
    """What a patch says before its planes: its bases and the `function` that makes words of them,
    the `chain` from it to whole chunks, itself included, the number of words that differ, and the
    bytes of the planes of their gaps, of a gap, and of what follows the chunk's last whole word."""

    bases: tuple[ChunkId, ...]
    function: int
    chain: ChainLength
    words: int
    gaps_bytes: int
    gap_bytes: int
    tail_bytes: int


def changed(raw: memoryview, base: memoryview, width: int) -> Changed | None:
    """The numbers of the words of `raw` that differ from those of `base`; None if they are too many
    for a patch, or if the chunks are not equally long."""
    if len(raw) != len(base):
        return None
    differ = codecs.words_of(raw, width) != codecs.words_of(base, width)
    few = np.count_nonzero(differ) * CHANGED_PART <= len(differ)
    return np.flatnonzero(differ) if few else None


def encode(
    raw: memoryview,
    base: memoryview,
    width: int,
    at: Changed,
    named: Sequence[ChunkId],
    chain: ChainLength,
    function: int = SAME,
) -> bytes | None:
    """The patch that makes `raw` of `base`, which the `function` makes of the raw bytes of the
    chunks `named`, the farthest of which is at the end of `chain`; the words `at` differ
    (`changed`).

    Returns None if the chain would take more bytes than the chunk, or more than `DEPTH_MAX`
    patches.
    """
    if chain.depth >= DEPTH_MAX:
        return None
    words, olds = codecs.words_of(raw, width), codecs.words_of(base, width)
    tail, gap_bytes = raw[words.nbytes :], 1
    if len(at):
        gaps, changes = np.diff(at, prepend=-1) - 1, words[at]
        gap_bytes = _gap_bytes(int(gaps.max()))
        codecs.subtract(changes, olds[at])
        coded_gaps = codecs.encode_few(gaps.astype(_GAP_TYPES[gap_bytes]))
        parts = coded_gaps, tail, codecs.encode_few(changes)
    else:
        parts = (coded_gaps := _no_words(1)), tail, _no_words(words.itemsize)
    nbytes = chain.nbytes + _HEAD.size + sum(map(len, parts))
    if nbytes > len(raw):
        return None
    numbers = nbytes, len(at), len(coded_gaps), chain.depth + 1, gap_bytes, len(tail)
    head = _HEAD.pack(named[0], *numbers, b"".join(named[1:]), function)
    rest = b"".join((head[CHECKSUM_BYTES:], *parts))
    return checksum(rest) + rest


@cache
def _no_words(width: int) -> bytes:
    return codecs.encode_few(np.empty(0, f"<u{width}"))


def head_of(stored: Stored) -> Head:
    """What a patch says. Raises `Corrupt`, also if its own bytes do not match their checksum."""
    if len(stored) < _HEAD.size:
        raise Corrupt("a patch does not name its bases; run `ckptstore fsck`")
    if checksum(stored[CHECKSUM_BYTES:]) != stored[:CHECKSUM_BYTES]:
        raise Corrupt("a patch does not match its own checksum; run `ckptstore fsck`")
    base, nbytes, count, gaps_bytes, depth, gap_bytes, tail_bytes, others, function = (
        _HEAD.unpack_from(stored)
    )
    if not 0 < depth <= DEPTH_MAX or gap_bytes not in _GAP_TYPES:
        raise Corrupt(
            f"a patch says that it is {depth} patches from a whole chunk, with gaps of {gap_bytes} "
            f"bytes; wanted 1 to {DEPTH_MAX}, and 1, 2 or 4; run `ckptstore fsck`"
        )
    bases = (base,) if others == _NO_CHUNKS else (base, others)
    if function > FLOAT16 or (len(bases) > 1 if function == SAME else depth > 1):
        raise Corrupt(
            f"a patch says that function {function} makes it of {len(bases)} chunks, {depth} "
            "patches from whole ones; wanted function 0 of one, or 1 or 2 of whole chunks; run "
            "`ckptstore fsck`"
        )
    chain = ChainLength(depth, nbytes)
    return Head(
        tuple(map(ChunkId, bases)), function, chain, count, gaps_bytes, gap_bytes, tail_bytes
    )


def round_into(
    function: int, masters: Sequence[memoryview], out: memoryview, *, exactly: bool = True
) -> None:
    """Fill `out` with the rounding of the raw bytes of masters, one behind the other, which have
    twice as many bytes. NaN may get other bits if not `exactly`. Raises `Corrupt`; `out` is then
    undefined."""
    sizes = [len(master) for master in masters]
    if sum(sizes) != 2 * len(out) or any(size % 4 for size in sizes):
        raise Corrupt(
            f"a patch rounds chunks of {sizes} bytes to one of {len(out)}; wanted twice as many, "
            "and whole words; run `ckptstore fsck`"
        )
    words, start, fast = np.frombuffer(out, "<u2"), 0, fast_rounding
    for master in masters:
        bits = np.frombuffer(master, "<u4")
        some = words[start : (start := start + len(bits))]
        is_fast = fast is not None and len(bits) >= _FAST_WORDS_MIN and fast(function, bits, some)
        # Libraries make different bits of NaN, which a maximum shows.
        if not is_fast or (exactly and np.isnan(bits.view("<f4").max())):
            for at in range(0, len(bits), _ROUNDED_WORDS):
                part = slice(at, at + _ROUNDED_WORDS)
                round_exactly(function, bits[part], some[part])


def round_exactly(function: int, bits: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Round words, whose bits may be those of any number, in the way that docs/format.md states."""
    if function == BFLOAT16:
        moved = bits >> 16
        moved &= 1
        moved += 0x7FFF
        moved += bits
        moved >>= 16
        out[:] = moved
    else:
        with np.errstate(all="ignore"):
            out.view("<f2")[:] = bits.view("<f4")
    nan = np.isnan(bits.view("<f4"))
    if nan.any():
        out[nan] = (bits[nan] >> 16 & 0x8000) | _NANS[function]


class Link(NamedTuple):
    """A patch of a chain: what it says (`head_of`), its stored bytes, and the bytes of an
    element."""

    head: Head
    stored: Stored
    width: int

    @classmethod
    def of(cls, stored: Stored, width: int) -> "Link":
        """A patch that is verified by its own checksum; raises `Corrupt`."""
        return cls(head_of(stored), stored, width)


def made_of(stored: Stored, width: int, raw_bytes: int, bases: Sequence[memoryview]) -> memoryview:
    """The chunk of `raw_bytes` that a patch makes of its bases. Raises `Corrupt`."""
    link = Link.of(stored, width)
    if link.head.function == SAME:
        out = memoryview(bytearray(bases[0]))
    else:
        out = memoryview(bytearray(raw_bytes))
        round_into(link.head.function, bases, out)
    apply([(out, [link])])
    return out


def apply(chains: Iterable[tuple[memoryview, Iterable[Link]]]) -> None:
    """Make the raw bytes of chunks in memory that holds those of the base of the first patch of its
    chain. Each patch is made of what the one before it makes. Raises `Corrupt` before it allocates
    much more than the memory has bytes, which is then undefined.

    Patches add differences, in any order. So those of many patches and chunks are decoded at once:
    a patch has a few thousand words, of which single calls would take three times as long.
    """
    gathered, count = list[_Patch](), 0
    for chunk, (out, links) in enumerate(chains):
        for link in links:
            patch = _parsed(link, chunk, out)
            words = patch.words
            if count >= _GATHERED_WORDS or (
                gathered and gathered[-1].words.itemsize != words.itemsize
            ):
                _add(gathered)
                gathered, count = [], 0
            out[words.nbytes :] = patch.tail
            if link.head.words:
                gathered.append(patch)
                count += link.head.words
    _add(gathered)


class _Patch(NamedTuple):
    """A patch and its parts, the number of its chunk, and the words of that."""

    chunk: int
    words: codecs.Words
    gaps: codecs.Few
    tail: memoryview
    changes: codecs.Few


def _parsed(link: Link, chunk: int, out: memoryview) -> _Patch:
    """A patch for a chunk in `out`; raises `Corrupt`."""
    head, words = link.head, codecs.words_of(out, link.width)
    tail_bytes = len(out) - words.nbytes
    if head.words * CHANGED_PART > len(words) or head.tail_bytes != tail_bytes:
        raise Corrupt(
            f"a patch of {head.words} words and a tail of {head.tail_bytes} bytes does not fit a "
            f"chunk of {len(words)} words and a tail of {tail_bytes} bytes; run `ckptstore fsck`"
        )
    rest = memoryview(link.stored)[_HEAD.size :]
    gaps, rest = rest[: head.gaps_bytes], rest[head.gaps_bytes :]
    return _Patch(
        chunk,
        words,
        codecs.Few(gaps, head.words, head.gap_bytes),
        rest[:tail_bytes],
        codecs.Few(rest[tail_bytes:], head.words, words.itemsize),
    )


def _add(patches: Sequence[_Patch]) -> None:
    """Add the differences of patches to the words of their chunks; raises `Corrupt`."""
    if not patches:
        return
    starts = list(accumulate((p.changes.words for p in patches), initial=0))
    decoded = codecs.decode_few([*(p.gaps for p in patches), *(p.changes for p in patches)])
    at = decoded[: starts[-1]].astype("<i8")
    changes = decoded[starts[-1] :].astype(patches[0].words.dtype, copy=False)
    codecs.unfold(changes)
    at += 1
    sums = np.add.reduceat(at, starts[:-1])
    for i, stop in enumerate(sums.tolist()):
        if stop > (words := len(patches[i].words)):
            raise Corrupt(f"a patch goes on to word {stop - 1} of {words}; run `ckptstore fsck`")
    # One sum makes the numbers of words: each patch begins anew, with word 0.
    at[0] -= 1
    at[starts[1:-1]] -= sums[:-1]
    np.cumsum(at, out=at)
    first = 0
    for _, some in groupby(patches, key=attrgetter("chunk")):
        of_chunk = list(some)
        rows = slice(starts[first], starts[first := first + len(of_chunk)])
        np.add.at(of_chunk[0].words, at[rows], changes[rows])


def _gap_bytes(most: int) -> int:
    """The bytes of a gap, if none is larger than `most`."""
    return next(nbytes for nbytes in _GAP_TYPES if most >> 8 * nbytes == 0)
