"""Which 16-bit weights of a plan are the rounding of float32 masters, and how are they stored as
that?

They are found by their shapes and by the bits of a sample, whatever they are called. One thread
writes both: it rounds each chunk of masters that it writes whole, and compares the weights with
that, word by word.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ckptstore.commit.hints import LeafChunk
from ckptstore.commit.plan import ChunkRun, CommitPlan, Cut, PlanPart, grouped
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, checksum
from ckptstore.core.model import Box
from ckptstore.objects import patches
from ckptstore.objects.patches import BASES_MAX, ROUNDINGS, round_into
from ckptstore.repository.pack_writer import NewPatch
from ckptstore.repository.thread_pool import NO_MEMORY, Scratch
from ckptstore.state.leaf_sources import Source

LEAF_BYTES_MIN = 96 << 10
"""Smaller weights are stored whole: to compare them costs a commit more than it saves."""

_SAMPLE_WORDS = 16
"""So many alike are no coincidence, and hardly ever is there an exception among them."""

Pairs: TypeAlias = Mapping[int, PlanPart]
"""Masters, by the leaves of weights. No two weights have the same."""

NO_PAIRS: Pairs = MappingProxyType({})

_Place: TypeAlias = tuple[Box, int, int]
"""The box of a part, and which of its elements the part has."""


def find(plan: CommitPlan, sources: Sequence[Source]) -> Pairs:
    """The masters of those weights that seem to be their rounding."""
    weights = [p for p in plan.parts if p.dtype in ROUNDINGS and p.raw_bytes >= LEAF_BYTES_MIN]
    sizes = {2 * part.raw_bytes for part in weights}
    masters = [p for p in plan.parts if p.dtype == "float32" and p.raw_bytes in sizes]
    samples = [(part, sample) for part in masters if (sample := _sample(part, sources))]
    if not samples:
        return NO_PAIRS
    joined = memoryview(b"".join(sample for _, sample in samples))
    rounded = {dtype: bytearray(len(joined) // 2) for dtype in {part.dtype for part in weights}}
    for dtype, out in rounded.items():
        round_into(ROUNDINGS[dtype], [joined], memoryview(out))
    alike = defaultdict[tuple[str, _Place, bytes], list[PlanPart]](list)
    for n, (part, _) in enumerate(samples):
        at = slice(n * 2 * _SAMPLE_WORDS, (n + 1) * 2 * _SAMPLE_WORDS)
        for dtype, out in rounded.items():
            alike[dtype, _place_of(part), bytes(out[at])].append(part)
    pairs, taken = dict[int, PlanPart](), set[int]()
    for part in weights:
        sample = _sample(part, sources)
        for other in alike[part.dtype, _place_of(part), bytes(sample)] if sample else ():
            if other.leaf not in taken:
                pairs[part.leaf] = other
                taken.add(other.leaf)
                break
    return pairs


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
    leaves = {*pairs, *(masters.leaf for masters in pairs.values())}
    rest = list[tuple[ChunkRun, ...]]()
    for batch in plan.batches:
        for run in batch:
            if run.part.leaf in leaves:
                runs[run.part.leaf].append(run)
        if others := tuple(run for run in batch if run.part.leaf not in leaves):
            rest.append(others)
    units = (
        unit
        for weights, masters in pairs.items()
        for unit in _units(runs[weights], runs[masters.leaf])
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


class _Rounded(NamedTuple):
    """A chunk of masters, the function that rounded it, and where in memory the result lies."""

    id: ChunkId
    function: int
    at: slice


class Rounder:
    """Makes patches of the weights that one thread writes. It remembers what the masters of the
    batch round to, of those chunks that are written whole."""

    def __init__(self, plan: CommitPlan, pairs: Pairs, scratch: Scratch) -> None:
        self._pairs, self._scratch = pairs, scratch
        weights = (part for part in plan.parts if part.leaf in pairs)
        self._functions = {pairs[part.leaf].leaf: ROUNDINGS[part.dtype] for part in weights}
        self._memory, self._used = NO_MEMORY, 0
        self._rounded: dict[LeafChunk, _Rounded] = {}

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

    def round(self, part: PlanPart, number: int, new: ChunkId, raw: memoryview) -> None:
        """Round a chunk that is written whole, if it is one of masters."""
        if function := self._functions.get(part.leaf):
            at = slice(self._used, self._used + len(raw) // 2)
            round_into(function, [raw], self._memory[at])
            self._rounded[part.leaf, number] = _Rounded(new, function, at)
            self._used = at.stop

    def make(
        self, part: PlanPart, cut: Cut, new: ChunkId, summed: bytes, raw: memoryview
    ) -> NewPatch | None:
        """The patch that makes the chunk `new` of masters; None if it is none of weights, or not
        the rounding of whole chunks of this batch."""
        if (masters := self._pairs.get(part.leaf)) is None:
            return None
        first, end = masters.grid.covering(2 * cut.start, 2 * cut.stop)
        found = [self._rounded.get((masters.leaf, number)) for number in range(first, end)]
        bases = [each for each in found if each]
        if not 0 < len(bases) == end - first <= BASES_MAX:
            return None
        if masters.grid.span(first)[0] != 2 * cut.start:
            return None  # they are cut elsewhere
        rounded = self._memory[bases[0].at.start : bases[-1].at.stop]
        same = checksum(rounded) == summed
        at = patches.NOTHING if same else patches.changed(raw, rounded, part.width)
        if at is None:
            return None
        ids, function = tuple(base.id for base in bases), bases[0].function
        stored = patches.encode(raw, rounded, part.width, at, ids, patches.WHOLE, function)
        return NewPatch(new, summed, len(raw), part.width, ids, stored) if stored else None
