"""Which reads give a request for chunks what it wants: planned from where they lie, without I/O."""

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
    """Chunks that lie behind each other in a pack, perhaps with gaps: `which` are their positions
    in the request, in order of `offsets`.

    With `encoded` they are read aside, since some of them must be decoded."""

    pack: PackId
    offset: int
    stored_bytes: int
    which: tuple[int, ...]
    offsets: tuple[int, ...]
    encoded: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What one call of `read_into` wants: chunk `i` of `ids` into `out[i]`; for its caller it is
    number `positions[i]`."""

    ids: bytes
    out: Sequence[memoryview]
    where: "NDArray[np.void]"
    positions: Sequence[int]
    describe: Callable[[int], str]
    check: Callable[[int], bool] | None

    def part(self, which: Sequence[int], where: "NDArray[np.void]") -> "Request":
        """The chunks `which` of this request, which are at `where`."""
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
        """Whether chunk `i`, which has been read, is what its id says."""
        return (
            digest(self.out[i]) == self.id(i)
            if self.check is None
            else self.check(self.positions[i])
        )


def plan_reads(
    where: "NDArray[np.void]", names: Mapping[int, PackId], limit_bytes: int, *, gap_bytes: int = 0
) -> tuple[list[Read], list[int]]:
    """Coalesce chunks that lie one behind the other in a pack, or up to `gap_bytes` from each
    other, up to `limit_bytes` a read; and the positions of chunks whose pack is not among `names`.

    What is read along between two chunks goes nowhere; with gaps, chunks of different codecs are
    read together."""
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
    """A read without gaps in parts of up to `limit_bytes` or one chunk, in order."""
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
    """Where the bytes of a read of raw chunks go; those between two chunks go nowhere."""
    buffers, at = [], read.offset
    for i, offset in zip(read.which, read.offsets, strict=True):
        out = request.out[i]
        if offset > at:
            buffers.append(memoryview(bytearray(offset - at)))
        buffers.append(out)
        at = offset + out.nbytes
    return buffers
