"""Which 16-bit weights of a plan are the rounding of float32 masters, and how are they stored as
that?

They are found by their shapes and by the bits of a sample, whatever they are called. A training
without masters pays for the samples alone, ever more seldom. One thread writes both: it rounds each
chunk of masters that it has just hashed, and compares the weights with that, word by word.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ckptstore.commit.hints import KnownMasters, LeafChunk
from ckptstore.commit.plan import ChunkRun, CommitPlan, Cut, PlanPart, grouped
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, checksum
from ckptstore.core.model import Box
from ckptstore.objects import patches
from ckptstore.objects.patches import BASES_MAX, ROUNDINGS, round_into
from ckptstore.repository.pack_writer import NewChunk, NewPatch
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch
from ckptstore.state.leaf_sources import Source

LEAF_BYTES_MIN = 512 << 10
"""Smaller weights are stored whole: to compare them costs a commit more than a twentieth."""

_SAMPLE_WORDS = 16
"""So many alike are no coincidence, and hardly ever is there an exception among them."""


class Pair(NamedTuple):
    """Masters, and the function of `objects.patches` that rounds them to weights."""

    masters: PlanPart
    function: int


Pairs: TypeAlias = Mapping[int, Pair]
"""By the leaves of weights."""

NO_PAIRS: Pairs = MappingProxyType({})

_Place: TypeAlias = tuple[Box, int, int]
"""The box of a part, and which of its elements the part has."""


def find(known: KnownMasters, plan: CommitPlan, sources: Sequence[Source]) -> Pairs:
    """The masters of those weights that seem to be their rounding. `known` is what the last commit
    of the same plan has left, and is what this one leaves."""
    weights = [part for part in plan.parts if part.dtype in ROUNDINGS]
    left = [
        part
        for part in weights
        if part.leaf not in known.pairs and part.raw_bytes >= LEAF_BYTES_MIN
    ]
    if left and known.is_time_to_look():
        taken = set(known.pairs.values())
        known.pairs |= _matched(left, [p for p in plan.parts if p.leaf not in taken], sources)
    if not known.pairs:
        return NO_PAIRS
    parts = {part.leaf: part for part in plan.parts}
    return {
        leaf: Pair(parts[masters], ROUNDINGS[parts[leaf].dtype])
        for leaf, masters in known.pairs.copy().items()
    }


def _matched(
    weights: Sequence[PlanPart], candidates: Sequence[PlanPart], sources: Sequence[Source]
) -> dict[int, int]:
    """Leaves of masters whose sample rounds to that of weights of the same shape, by theirs."""
    dtypes = defaultdict[_Place, set[str]](set)
    for part in weights:
        dtypes[_place_of(part)].add(part.dtype)
    masters = defaultdict[tuple[_Place, str, bytes], list[PlanPart]](list)
    for part in candidates:
        wanted = dtypes.get(_place_of(part)) if part.dtype == "float32" else None
        if wanted and (sample := _sample(part, sources)):
            for dtype in wanted:
                rounded = bytearray(2 * _SAMPLE_WORDS)
                round_into(ROUNDINGS[dtype], [sample], memoryview(rounded))
                masters[_place_of(part), dtype, bytes(rounded)].append(part)
    found: dict[int, int] = {}
    for part in weights if masters else ():
        sample = _sample(part, sources) or memoryview(b"")
        if alike := masters.get((_place_of(part), part.dtype, bytes(sample))):
            found[part.leaf] = alike.pop(0).leaf
    return found


def _place_of(part: PlanPart) -> _Place:
    first, last = part.grid.span(part.first), part.grid.span(part.stop - 1)
    return part.grid.box, first[0] // part.width, last[1] // part.width


def _sample(part: PlanPart, sources: Sequence[Source]) -> memoryview | None:
    """A few words from the middle of a part; None if it is not in memory, or need not be read."""
    source, (_, first, stop) = sources[part.leaf], _place_of(part)
    at = (first + stop - _SAMPLE_WORDS) // 2 * part.width
    return None if source.known_ids else source.view(at, at + _SAMPLE_WORDS * part.width)


def beside(plan: CommitPlan, pairs: Pairs) -> tuple[tuple[ChunkRun, ...], ...]:
    """The batches of a plan, in which each run of weights follows those of its masters."""
    runs = defaultdict[int, list[ChunkRun]](list)
    leaves = {*pairs, *(pair.masters.leaf for pair in pairs.values())}
    rest = list[tuple[ChunkRun, ...]]()
    for batch in plan.batches:
        for run in batch:
            if run.part.leaf in leaves:
                runs[run.part.leaf].append(run)
        if others := tuple(run for run in batch if run.part.leaf not in leaves):
            rest.append(others)
    units = (
        unit
        for weights, pair in pairs.items()
        for unit in _units(runs[weights], runs[pair.masters.leaf])
    )
    return (*grouped(units, RUN_BYTES), *rest)


def _units(weights: Sequence[ChunkRun], masters: Sequence[ChunkRun]) -> Iterator[list[ChunkRun]]:
    """Each run of weights, behind those of its masters that begin with its elements."""
    at = 0
    for run in weights:
        start = at
        while at < len(masters) and masters[at].cuts[0] < 2 * run.cuts[-1]:
            at += 1
        yield [*masters[start:at], run]
    yield list(masters[at:])


class Rounder:
    """Makes patches of the weights that one thread writes. It remembers what the masters of the
    batch round to, of those chunks that are written whole."""

    def __init__(self, known: KnownMasters, pairs: Pairs, scratch: Scratch) -> None:
        self._known, self._pairs, self._scratch = known, pairs, scratch
        self._functions = {pair.masters.leaf: pair.function for pair in pairs.values()}
        self._memory, self._used = NO_MEMORY, 0
        self._rounded: dict[LeafChunk, tuple[ChunkId, slice]] = {}
        """By chunk of masters, its id, and where its rounding lies in memory."""

    def begin(self, batch: Sequence[ChunkRun]) -> None:
        """Forget the batch before."""
        self._rounded.clear()
        self._used = 0
        nbytes = sum(run.raw_bytes for run in batch if run.part.leaf in self._functions) // 2
        if len(self._memory) < nbytes:
            self.close()
            self._memory = self._scratch.take(nbytes)

    def close(self) -> None:
        self._scratch.give(self._memory)
        self._memory = NO_MEMORY

    def has(self, leaf: int) -> bool:
        """Whether a leaf is masters, or weights that no chunk has shown to round others."""
        return leaf in self._functions or (leaf in self._pairs and leaf in self._known.pairs)

    def make(self, part: PlanPart, cut: Cut, chunk: NewChunk) -> NewPatch | None:
        """The patch that makes a chunk of weights; None if it is to be stored whole, as masters
        are."""
        if function := self._functions.get(part.leaf):
            start, stop = self._used, self._used + len(chunk.raw) // 2
            round_into(function, [chunk.raw], self._memory[start:stop])
            self._rounded[part.leaf, cut.number] = chunk.id, slice(start, stop)
            self._used = stop
            return None
        masters, function = self._pairs[part.leaf]
        first, end = masters.grid.covering(2 * cut.start, 2 * cut.stop)
        found = [self._rounded.get((masters.leaf, number)) for number in range(first, end)]
        bases = [each for each in found if each]
        if not 0 < len(bases) == end - first <= BASES_MAX:
            return None
        if masters.grid.span(first)[0] != 2 * cut.start:
            return None  # they are cut elsewhere
        rounded = self._memory[bases[0][1].start : bases[-1][1].stop]
        same = checksum(rounded) == chunk.checksum
        at = patches.NOTHING if same else patches.changed(chunk.raw, rounded, part.width)
        if at is None:
            self._known.pairs.pop(part.leaf, None)
            return None
        ids = tuple(name for name, _ in bases)
        stored = patches.encode(chunk.raw, rounded, part.width, at, ids, patches.WHOLE, function)
        if stored is None:
            return None
        return NewPatch(chunk.id, chunk.checksum, len(chunk.raw), part.width, ids, stored)
