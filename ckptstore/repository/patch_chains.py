"""Which patches lie between a chunk and those that are stored whole?

A chain is followed for many chunks at once, a step at a time: the patches of one commit lie side by
side, so that each step takes few reads. Each patch is verified by its own checksum.

The index knows the copy of a chunk that the fewest patches make, so that each step leads nearer to
a whole one. Where damage has taken that copy, the way may be longer. A chain that comes back to a
chunk, or is twice as long as any, is refused.

A patch that rounds its bases ends a chain. Its bases are read as any chunks are, and no rounding
may make one of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from ckptstore.core.ids import ChunkId
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.state import Pack, State
from ckptstore.objects import codecs, patches
from ckptstore.objects.patches import Link
from ckptstore.repository.chunk_reader import (
    GAP_BYTES,
    Found,
    MergedRead,
    PackRead,
    Problem,
    StoredPatch,
    Unread,
    coalesce,
    keys_of,
    located_entries,
    read_run,
)
from ckptstore.repository.footers import is_elsewhere
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOOKS = 5
"""Lookups of a chunk while concurrent collections move it."""

STEPS_MAX = 2 * patches.DEPTH_MAX
"""Of a chain, whatever its patches say."""

READ_BYTES = 4 << 20
"""Patches that are read at once."""


class ChunkLookup(Protocol):
    """A store in which chunks are looked up."""

    storage: Storage
    suspect_packs: SuspectPacks

    def located(self, ids: bytes) -> "NDArray[np.void]": ...
    def listed(self, numbers: set[int]) -> dict[int, Pack]: ...
    def look_again(self) -> State: ...


class Whole:
    """The place of a chunk that is stored whole: a row of `LOCATED_DTYPE`."""

    def __init__(self, row: "NDArray[np.void]") -> None:
        self.row, self.chunk = row, ChunkId(row["chunk"].tobytes())


class Rounded(NamedTuple):
    """Chunks whose rounding the last patch of a chain changes, and how they are rounded."""

    bases: tuple[ChunkId, ...]
    function: int


class RoundedChunk(NamedTuple):
    """A chunk, and those whose rounding it is made of."""

    id: ChunkId
    raw_bytes: int
    width: int
    bases: tuple[ChunkId, ...]


Step: TypeAlias = StoredPatch | Whole | Problem


@dataclass(slots=True)
class PatchChain:
    """The patches of a chunk, the nearest to it first, up to the chunk that is stored whole or to
    those that are rounded, or the problem that ended the search. `chunks` are what they make."""

    patches: list[StoredPatch] = field(default_factory=list)
    chunks: set[ChunkId] = field(default_factory=set)
    end: Whole | Rounded | Problem | None = None

    @property
    def bases(self) -> frozenset[ChunkId]:
        """The chunks at the end of the chain."""
        match self.end:
            case Whole(chunk=chunk):
                return frozenset([chunk])
            case Rounded(bases=bases):
                return frozenset(bases)
        return frozenset()

    def links(self) -> Iterator[Link]:
        """The patches, the farthest from the chunk first."""
        for patch in reversed(self.patches):
            yield Link(patch.head, patch.stored, patch.entry.width)


def follow(
    lookup: ChunkLookup, where: "NDArray[np.void]", steps: int = STEPS_MAX
) -> dict[ChunkId, PatchChain]:
    """The chain of each chunk of `where`, by its id, at most so many `steps` of it. Raises
    `Unavailable`."""
    chains = {ChunkId(chunk): PatchChain() for chunk in where["chunk"].tolist()}
    at = {chunk: chunk for chunk in chains}
    rows = where
    while at and steps:
        taken, steps = _steps(lookup, rows), steps - 1
        at = {
            chunk: base
            for chunk, now in at.items()
            if (base := _extend(chains[chunk], taken[now])) is not None
        }
        bases = list(dict.fromkeys(at.values()))
        try:
            rows = lookup.located(b"".join(bases))
        except NotFound:
            rows, at = _located_alone(lookup, chains, at)
    return chains


def _extend(chain: PatchChain, step: Step) -> ChunkId | None:
    """Add a step to a chain; the chunk to go on with, if it does not end."""
    if not isinstance(step, StoredPatch):
        chain.end = step
        return None
    entry = step.entry
    if entry.chunk in chain.chunks:
        chain.end = Corrupt(
            f"chunk {entry.chunk.hex()[:12]} is a patch that needs itself, after "
            f"{len(chain.patches)} steps; run `ckptstore fsck`"
        )
        return None
    last = chain.patches[-1] if chain.patches else None
    if last and entry.raw_bytes != last.entry.raw_bytes:
        chain.end = Corrupt(
            f"chunk {entry.chunk.hex()[:12]} has {entry.raw_bytes} bytes, and its patch "
            f"{last.entry.chunk.hex()[:12]} {last.entry.raw_bytes}; run `ckptstore fsck`"
        )
        return None
    chain.patches.append(step)
    chain.chunks.add(entry.chunk)
    if step.head.function != patches.SAME:
        chain.end = Rounded(step.head.bases, step.head.function)
        return None
    return step.head.bases[0]


def _located_alone(
    lookup: ChunkLookup, chains: Mapping[ChunkId, PatchChain], at: Mapping[ChunkId, ChunkId]
) -> tuple["NDArray[np.void]", dict[ChunkId, ChunkId]]:
    """The places of those bases that are anywhere; the chains of the others end."""
    rows, left = [], dict[ChunkId, ChunkId]()
    found = dict[ChunkId, NotFound | None]()
    for base in dict.fromkeys(at.values()):
        try:
            rows.append(lookup.located(base))
            found[base] = None
        except NotFound as error:
            found[base] = error
    for chunk, base in at.items():
        if (problem := found[base]) is None:
            left[chunk] = base
        else:
            chains[chunk].end = problem
    return np.concatenate(rows) if rows else lookup.located(b""), left


def _steps(lookup: ChunkLookup, rows: "NDArray[np.void]") -> dict[ChunkId, Step]:
    """What lies at each place: a whole chunk, a patch, or a problem. Chunks that a gc moves
    meanwhile are looked up again."""
    steps: dict[ChunkId, Step] = {}
    for _ in range(LOOKS):
        is_patch = rows["codec"] == codecs.PATCH
        whole = rows[~is_patch]
        steps.update(
            (ChunkId(chunk), Whole(whole[i : i + 1]))
            for i, chunk in enumerate(whole["chunk"].tolist())
        )
        steps.update(_read(lookup, rows[is_patch]))
        moved = [chunk for chunk, step in steps.items() if isinstance(step, NotFound)]
        if not moved:
            break
        lookup.look_again()
        try:
            rows = lookup.located(b"".join(moved))
        except NotFound:
            break
    return steps


def _read(lookup: ChunkLookup, rows: "NDArray[np.void]") -> Iterable[tuple[ChunkId, Step]]:
    """The patches at `rows`; `NotFound` for one whose pack is gone, or that lies elsewhere."""
    rows = rows[np.lexsort((rows["offset"], rows["pack"]))]
    numbers, entries = rows["pack"].tolist(), located_entries(rows)
    packs = lookup.listed(set(numbers))
    for some in coalesce(
        rows["offset"].tolist(),
        (rows["offset"] + rows["stored"]).tolist(),
        objects=numbers,
        limit_bytes=READ_BYTES,
        gap_bytes=GAP_BYTES,
    ):
        pack, reads = packs.get(numbers[some.start]), list(map(PackRead, entries[some]))
        if pack is None:
            gone = NotFound(f"pack {numbers[some.start]} is not listed; run `ckptstore reindex`")
            yield from ((read.entry.chunk, gone) for read in reads)
            continue
        for found in read_run(lookup.storage, keys_of(pack), MergedRead(reads)):
            yield found.read.entry.chunk, _step(lookup, pack, found)


def _step(lookup: ChunkLookup, pack: Pack, found: Found) -> Step:
    """A patch that was read from a pack, or why not: a pack that has lost one is not relied on any
    more. Raises `Unavailable`."""
    if isinstance(found, StoredPatch):
        return found
    assert isinstance(found, Unread)  # what is stored whole is not read here
    problem = found.problem
    if isinstance(problem, Unavailable):
        raise problem
    if isinstance(problem, Corrupt):
        if is_elsewhere(lookup.storage, pack, found.read.entry):
            return NotFound(f"the chunk lies elsewhere than the index says: {problem}")
        lookup.suspect_packs.add(pack.id)
    return problem
