"""How is a chunk stored as a patch: the words that differ from its base, a chunk that may lie in
any pack (docs/format.md §4)?

A patch names its base by chunk id. It begins with the checksum of its own bytes, so that it can be
verified without its base. It is made at commit, where the chunk that was at the same place
before is at hand and few words differ. Pure, and thread-safe.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
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

_GATHERED_WORDS = 1 << 16
"""Of patches that are added at once, before the last of them."""

_HEAD = struct.Struct(f"<{CHECKSUM_BYTES}x{CHUNK_ID_BYTES}sIIIHBB")
_GAP_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}


Changed: TypeAlias = npt.NDArray[np.intp]
"""The numbers of words, in order."""


class ChainLength(NamedTuple):
    """How far a chunk is from one that is stored whole: so many patches, of so many bytes."""

    depth: int = 0
    nbytes: int = 0


WHOLE = ChainLength()
"""Of a chunk that is stored whole."""


class Head(NamedTuple):
    """What a patch says before its planes: its base, the `chain` from it to a whole chunk, itself
    included, the number of words that differ, and the bytes of the planes of their gaps, of a gap,
    and of what follows the chunk's last whole word."""

    base: ChunkId
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
    raw: memoryview, base: memoryview, width: int, at: Changed, named: ChunkId, chain: ChainLength
) -> bytes | None:
    """The patch that makes `raw` of `base`, the raw bytes of the chunk `named` at the end of
    `chain`; the words `at` differ (`changed`).

    Returns None if the chain would take more bytes than the chunk, or more than `DEPTH_MAX`
    patches.
    """
    if chain.depth >= DEPTH_MAX:
        return None
    words, olds = codecs.words_of(raw, width), codecs.words_of(base, width)
    gaps, changes = np.diff(at, prepend=-1) - 1, words[at]
    gap_bytes = _gap_bytes(int(gaps.max(initial=0)))
    codecs.subtract(changes, olds[at])
    coded_gaps = codecs.encode_few(gaps.astype(_GAP_TYPES[gap_bytes]))
    tail = raw[words.nbytes :]
    parts = coded_gaps, tail, codecs.encode_few(changes)
    nbytes = chain.nbytes + _HEAD.size + sum(map(len, parts))
    if nbytes > len(raw):
        return None
    numbers = nbytes, len(at), len(coded_gaps), chain.depth + 1, gap_bytes, len(tail)
    rest = b"".join((_HEAD.pack(named, *numbers)[CHECKSUM_BYTES:], *parts))
    return checksum(rest) + rest


def head_of(stored: Stored) -> Head:
    """What a patch says. Raises `Corrupt`, also if its own bytes do not match their checksum."""
    if len(stored) < _HEAD.size:
        raise Corrupt("a patch does not name its base; run `ckptstore fsck`")
    if checksum(stored[CHECKSUM_BYTES:]) != stored[:CHECKSUM_BYTES]:
        raise Corrupt("a patch does not match its own checksum; run `ckptstore fsck`")
    base, nbytes, count, gaps_bytes, depth, gap_bytes, tail_bytes = _HEAD.unpack_from(stored)
    if not 0 < depth <= DEPTH_MAX or gap_bytes not in _GAP_TYPES:
        raise Corrupt(
            f"a patch says that it is {depth} patches from a whole chunk, with gaps of {gap_bytes} "
            f"bytes; wanted 1 to {DEPTH_MAX}, and 1, 2 or 4; run `ckptstore fsck`"
        )
    chain = ChainLength(depth, nbytes)
    return Head(ChunkId(base), chain, count, gaps_bytes, gap_bytes, tail_bytes)


def apply(chain: Iterable[tuple[Stored, int]], out: memoryview) -> None:
    """Make the raw bytes of a chunk in `out`, which holds those of the base of the first patch of a
    chain. Each patch, with its width, is made of what the one before it makes. Raises `Corrupt`
    before it allocates much more than `out` has bytes; `out` is then undefined.

    Patches add differences, in any order. So those of many patches are put together and added at
    once: a patch has a few thousand words, of which single calls would take three times as long.
    """
    for width, some in groupby(chain, key=itemgetter(1)):
        words, gathered = codecs.words_of(out, width), list[_Patch]()
        tail = out[words.nbytes :]
        for stored, _ in some:
            gathered.append(patch := _parsed(stored, len(words), len(tail)))
            if sum(each.head.words for each in gathered) >= _GATHERED_WORDS:
                _add(gathered, words)
                gathered = []
        _add(gathered, words)
        tail[:] = patch.tail


class _Patch(NamedTuple):
    """A patch and its parts."""

    head: Head
    gaps: memoryview
    tail: memoryview
    changes: memoryview


def _parsed(stored: Stored, words: int, tail_bytes: int) -> _Patch:
    """A patch for a chunk of so many words and bytes behind them; raises `Corrupt`."""
    head = head_of(stored)
    if head.words * CHANGED_PART > words or head.tail_bytes != tail_bytes:
        raise Corrupt(
            f"a patch of {head.words} words and a tail of {head.tail_bytes} bytes does not fit a "
            f"chunk of {words} words and a tail of {tail_bytes} bytes; run `ckptstore fsck`"
        )
    rest = memoryview(stored)[_HEAD.size :]
    gaps, rest = rest[: head.gaps_bytes], rest[head.gaps_bytes :]
    return _Patch(head, gaps, rest[:tail_bytes], rest[tail_bytes:])


def _add(patches: Sequence[_Patch], words: codecs.Words) -> None:
    """Add the differences of patches to the words of a chunk; raises `Corrupt`."""
    count, start = sum(patch.head.words for patch in patches), 0
    at, changes = np.zeros(count, "<i8"), np.empty(count, words.dtype)
    for head, gaps, _, changed in patches:
        stop = start + head.words
        row = at[start:stop]
        row[:] = codecs.decode_few(gaps, head.words, head.gap_bytes)
        changes[start:stop] = codecs.decode_few(changed, head.words, words.itemsize)
        row += 1
        np.cumsum(row, out=row)
        if head.words and int(row[-1]) > len(words):
            raise Corrupt(
                f"a patch goes on to word {int(row[-1]) - 1} of {len(words)}; run `ckptstore fsck`"
            )
        start = stop
    at -= 1
    codecs.unfold(changes)
    np.add.at(words, at, changes)


def _gap_bytes(most: int) -> int:
    """The bytes of a gap, if none is larger than `most`."""
    return next(nbytes for nbytes in _GAP_TYPES if most >> 8 * nbytes == 0)
