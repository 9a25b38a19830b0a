"""A leaf's bytes without reading them: the pages of the packs that hold it, laid one behind the
other in memory.

A leaf is written in runs of up to 8 MiB, which lie in the packs of several threads and commits and
begin at page boundaries (docs/format.md §4). Where runs meet in memory they must meet at a page
boundary too. What does not, if it is little, such as the short last run of a leaf, is copied;
otherwise the leaf has to be read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore.core.ids import ChunkId, PackId, digest, pack_key
from ckptstore.core.model import Location
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.objects import codecs
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.restore.read_plan import Piece
from ckptstore.storage.memory_map import PAGE_BYTES, MemoryMap

COPIED_BYTES = 64 << 10
"""So much of a leaf is copied where it cannot be mapped: runs shorter than this do not begin at a
page boundary."""


class Unmappable(InvalidInput):
    """The leaf is stored in a way that only reading undoes."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """`nbytes` of the leaf from `start` on, in one piece from `offset` on in a pack."""

    start: int
    pack: PackId
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class MapPlan:
    """Where a leaf's bytes come from. Byte `i` of the leaf is at `skew + i` of the memory. A mapped
    stretch starts at a page of the memory, a copied one at a byte of the leaf."""

    skew: int
    nbytes: int
    mapped: tuple[Stretch, ...]
    copied: tuple[Stretch, ...]


def stretches(pieces: Sequence[Piece], places: Sequence[Location]) -> list[Stretch]:
    """The pieces of a whole leaf as stretches, in the order of the leaf. Raises `Unmappable` for
    encoded and for scattered chunks."""
    found: list[Stretch] = []
    if any(place.codec != codecs.RAW for place in places):
        raise Unmappable("it is stored compressed")
    landing = [
        (piece.at, piece, place)
        for piece, place in zip(pieces, places, strict=True)
        if piece.at is not None
    ]
    if len(landing) < len(pieces):
        raise Unmappable("it was committed in shards whose rows do not lie together")
    for start, piece, place in sorted(landing, key=lambda each: each[0]):
        last = found[-1] if found else None
        if last and last.pack == place.pack and last.offset + last.nbytes == place.offset:
            found[-1] = Stretch(last.start, last.pack, last.offset, last.nbytes + piece.raw_bytes)
        else:
            found.append(Stretch(start, place.pack, place.offset, piece.raw_bytes))
    return found


def plan_map(parts: Sequence[Stretch], width: int, page: int = PAGE_BYTES) -> MapPlan:
    """How to lay the stretches of a leaf of elements of `width` bytes into memory. Raises
    `Unmappable` where too much must be copied."""
    longest = max(parts, key=lambda part: part.nbytes)
    skew, nbytes = (longest.offset - longest.start) % page, parts[-1].stop
    if skew % width:
        raise Unmappable(
            f"its elements of {width} bytes do not begin at multiples of {width} in its pack"
        )
    mapped: list[Stretch] = []
    copied: list[Stretch] = []
    for part in parts:
        first, last = skew + part.start, skew + part.stop
        # The outermost pages are nobody else's; one where two stretches meet belongs to neither
        # file.
        low = first - first % page if part is parts[0] else first + -first % page
        high = last if part is parts[-1] else last - last % page
        if (part.offset - first) % page or low >= high:
            copied.append(part)
            continue
        mapped.append(Stretch(low, part.pack, part.offset + low - first, high - low))
        if first < low:
            copied.append(Stretch(part.start, part.pack, part.offset, low - first))
        if high < last:
            copied.append(Stretch(high - skew, part.pack, part.offset + high - first, last - high))
    if (total := sum(part.nbytes for part in copied)) > COPIED_BYTES:
        raise Unmappable(
            f"{total} of its {nbytes} bytes lie where pages of {page} bytes cannot be laid side by "
            "side"
        )
    return MapPlan(skew, nbytes, tuple(mapped), tuple(copied))


def map_leaf(objects: ObjectStore, pieces: Sequence[Piece], width: int) -> memoryview:
    """The bytes of a whole leaf that is not empty, writable and private to this process; nearly
    nothing is read, and nothing verified.

    Raises `Unmappable` for a leaf that must be read, `InvalidInput` where the store is no local
    directory, `Corrupt` for a pack that is too short, `NotFound` for chunks that no pack holds.
    """
    ids = b"".join(piece.chunk for piece in pieces)
    try:
        return _lay(objects, plan_map(stretches(pieces, objects.locations(ids)), width))
    except NotFound:
        # A gc has moved them since the index was asked; what is mapped cannot be taken away any
        # more.
        return _lay(
            objects, plan_map(stretches(pieces, objects.locations(ids, look_again=True)), width)
        )


def check_mapped(
    objects: ObjectStore,
    data: memoryview,
    pieces: Sequence[Piece],
    spread: Callable[..., object],
    what: str,
) -> None:
    """Compare every chunk of a mapped leaf with its id, which reads them all. Raises `Corrupt`;
    later commits do not rely on that pack."""

    def check(piece: Piece) -> None:
        start = piece.at or 0
        if (got := ChunkId(digest(data[start : start + piece.raw_bytes]))) != piece.chunk:
            objects.doubt(piece.chunk)
            raise Corrupt(
                f"chunk {piece.chunk.hex()[:12]} ({what}) does not match its id: got "
                f"{got.hex()[:12]}; "
                "run `ckptstore fsck --read-data`, restore another commit, or heal it with "
                "`ckptstore repair`"
            )

    spread(check, pieces)


def _lay(objects: ObjectStore, plan: MapPlan) -> memoryview:
    memory = MemoryMap(plan.skew + plan.nbytes)
    for part in plan.mapped:
        key = pack_key(part.pack)
        memory.put(part.start, objects.storage.open_file(key).fd, part.offset, part.nbytes, key)
    data = memory.view(plan.skew, plan.skew + plan.nbytes)
    for part in plan.copied:
        objects.storage.read_into(pack_key(part.pack), part.offset, [data[part.start : part.stop]])
    return data
