"""Which reads fetch the chunks of a request? Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, PackId, digest
from ckptstore.objects import codecs

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Read:
    """One read of neighboring chunks in a pack, possibly with gaps. `which` are their positions
    in the request, in order of `offsets`.

    An `encoded` read goes to a separate buffer, because some of its chunks must be decoded.
    """

    pack: PackId
    offset: int
    stored_bytes: int
    which: tuple[int, ...]
    offsets: tuple[int, ...]
    encoded: bool


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks of one call of `read_into`: chunk `i` of `ids` goes to `out[i]`. The caller
    knows it as number `positions[i]`."""

    ids: bytes
    out: Sequence[memoryview]
    where: "NDArray[np.void]"
    positions: Sequence[int]
    describe: Callable[[int], str]
    check: Callable[[int], bool] | None

    def part(self, which: Sequence[int], where: "NDArray[np.void]") -> "Request":
        """The chunks `which` of this request, located at `where`."""
        ids = b"".join(map(self.id, which))
        return Request(
            ids,
            [self.out[i] for i in which],
            where,
            [self.positions[i] for i in which],
            self.describe,
            self.check,
        )

    def id(self, i: int) -> bytes:
        return self.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]

    def short(self, i: int) -> str:
        return self.id(i).hex()[:12]

    def name(self, i: int) -> str:
        return self.describe(self.positions[i])

    def is_right(self, i: int) -> bool:
        """Whether the bytes read for chunk `i` match its id."""
        return (
            digest(self.out[i]) == self.id(i)
            if self.check is None
            else self.check(self.positions[i])
        )


def plan_reads(
    where: "NDArray[np.void]", names: Mapping[int, PackId], limit_bytes: int, *, gap_bytes: int = 0
) -> tuple[list[Read], list[int]]:
    """Reads of at most `limit_bytes`, and the positions of chunks whose pack is not in `names`.

    Chunks that are at most `gap_bytes` apart in a pack share a read; the bytes between them are
    discarded. With gaps, chunks of different codecs are read together.
    """
    order = np.lexsort((where["offset"], where["pack"]))
    rows = where[order]
    ends = rows["offset"] + rows["stored"]
    packs, starts, codecs_ = rows["pack"].tolist(), rows["offset"].tolist(), rows["codec"].tolist()
    stops, positions = ends.tolist(), order.tolist()
    reads: list[Read] = []
    missing: list[int] = []
    i = 0
    while i < len(positions):
        j = i + 1
        while (
            j < len(positions)
            and packs[j] == packs[i]
            and (codecs_[j] == codecs_[i] or gap_bytes)
            and 0 <= starts[j] - stops[j - 1] <= gap_bytes
            and stops[j] - starts[i] <= limit_bytes
        ):
            j += 1
        encoded = any(codec != codecs.RAW for codec in codecs_[i:j])
        if name := names.get(packs[i]):
            reads.append(
                Read(
                    name,
                    starts[i],
                    stops[j - 1] - starts[i],
                    tuple(positions[i:j]),
                    tuple(starts[i:j]),
                    encoded,
                )
            )
        else:
            missing.extend(positions[i:j])
        i = j
    return reads, missing


def slices(read: Read, limit_bytes: int) -> Iterator[Read]:
    """Split a read without gaps into parts of at most `limit_bytes`, or one chunk, in order."""
    which, starts, ends = (
        read.which,
        read.offsets,
        (*read.offsets[1:], read.offset + read.stored_bytes),
    )
    first = 0
    for i in range(1, len(which) + 1):
        if i == len(which) or ends[i] - starts[first] > limit_bytes:
            yield Read(
                read.pack,
                starts[first],
                ends[i - 1] - starts[first],
                which[first:i],
                starts[first:i],
                read.encoded,
            )
            first = i


def with_gaps(read: Read, request: Request) -> list[memoryview]:
    """The target buffers of a read of raw chunks; the bytes between two chunks go to a scratch
    buffer."""
    buffers, at = [], read.offset
    for i, offset in zip(read.which, read.offsets, strict=True):
        out = request.out[i]
        if offset > at:
            buffers.append(memoryview(bytearray(offset - at)))
        buffers.append(out)
        at = offset + out.nbytes
    return buffers
