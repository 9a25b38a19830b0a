"""Which leaves of a plan are 16-bit weights beside their float32 masters, and which chunks are the
rounding of which?

They are found by their shapes and by the bits of a sample, whatever they are called. So a training
without masters pays for the samples alone, and for those ever more seldom. Each chunk is compared
word by word when it is written, and what differs in more than an eighth is stored whole.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ckptstore.commit.hints import KnownMasters, LeafChunk
from ckptstore.commit.plan import ChunkRun, CommitPlan, Cut, PlanPart, grouped, pieces_of
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.model import Box
from ckptstore.objects import patches
from ckptstore.objects.patches import BASES_MAX, ROUNDINGS, round_into
from ckptstore.repository.pack_writer import NewChunk, NewPatch
from ckptstore.state.leaf_sources import Source, memory_of

LEAF_BYTES_MIN = 32 << 10
"""Smaller weights are stored whole: comparing them would cost as much as the write."""

_SAMPLE_WORDS = 16
"""So many alike are no coincidence, and hardly ever is there an exception among them."""

Pairs: TypeAlias = Mapping[int, PlanPart]
"""The masters by the leaves of their weights."""

_Place: TypeAlias = tuple[Box, int, int]
"""The box of a part, and which of its elements the part has."""


def find(known: KnownMasters, plan: CommitPlan, sources: Sequence[Source]) -> Pairs:
    """The masters of those weights that seem to be their rounding. `known` is what the last commit
    of the same plan has left, and is what this one leaves."""
    weights = [part for part in plan.parts if _may_be_rounded(part, sources)]
    parts = {part.leaf: part for part in plan.parts}
    if known.is_time_to_look(len(weights)):
        pairs = known.proven_pairs()
        left = [part for part in weights if part.leaf not in pairs]
        free = [part for part in plan.parts if part.leaf not in pairs.values()]
        known.pairs = pairs | _matched(left, free, sources)
    known.proven = set()
    return {leaf: parts[masters] for leaf, masters in known.pairs.items()}


def _may_be_rounded(part: PlanPart, sources: Sequence[Source]) -> bool:
    return (
        part.dtype in ROUNDINGS
        and part.raw_bytes >= LEAF_BYTES_MIN
        and sources[part.leaf].known_ids is None
    )


def _matched(
    weights: Sequence[PlanPart], candidates: Sequence[PlanPart], sources: Sequence[Source]
) -> dict[int, int]:
    """Leaves of masters whose sample rounds to that of weights of the same shape, by theirs."""
    dtypes = defaultdict[_Place, set[str]](set)
    for part in weights:
        dtypes[_place_of(part)].add(part.dtype)
    masters = defaultdict[tuple[_Place, str, bytes], list[PlanPart]](list)
    for part in candidates:
        if part.dtype == "float32" and sources[part.leaf].known_ids is None:
            for dtype in dtypes.get(_place_of(part), ()):
                sample, rounded = _sample(part, sources), bytearray(2 * _SAMPLE_WORDS)
                round_into(ROUNDINGS[dtype], [sample], memoryview(rounded))
                masters[_place_of(part), dtype, bytes(rounded)].append(part)
    found: dict[int, int] = {}
    for part in weights if masters else ():
        alike = masters.get((_place_of(part), part.dtype, bytes(_sample(part, sources))))
        if alike:
            found[part.leaf] = alike.pop(0).leaf
    return found


def _place_of(part: PlanPart) -> _Place:
    first, last = part.grid.span(part.first), part.grid.span(part.stop - 1)
    return part.grid.box, first[0] // part.width, last[1] // part.width


def _sample(part: PlanPart, sources: Sequence[Source]) -> memoryview:
    """A few words from the middle of a part."""
    _, first, stop = _place_of(part)
    at = (first + stop - _SAMPLE_WORDS) // 2 * part.width
    return memory_of(sources[part.leaf], at, at + _SAMPLE_WORDS * part.width)


def masters_of(cut: Cut, masters: PlanPart) -> range | None:
    """The numbers of the chunks of masters that have the elements of a chunk of weights, these and
    no others; None if they are cut elsewhere."""
    start, stop = 2 * cut.start, 2 * cut.stop
    first, end = masters.grid.covering(start, stop)
    whole = masters.grid.span(first)[0], masters.grid.span(end - 1)[1]
    return range(first, end) if whole == (start, stop) and end - first <= BASES_MAX else None


class _Local(threading.local):
    """Memory of a thread for what it compares chunks with."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")


class Rounder:
    """Makes patches of the chunks of one commit that round others. Threads may share it."""

    def __init__(self, known: KnownMasters, pairs: Pairs) -> None:
        self.pairs = pairs
        self._known, self._local = known, _Local()
        self._others = set[int]()
        """Weights of which a chunk was no rounding."""

    def make(
        self, part: PlanPart, cut: Cut, chunk: NewChunk, whole: Mapping[LeafChunk, NewChunk]
    ) -> NewPatch | None:
        """The patch that makes a chunk of its masters, which this commit stores `whole`; None if
        they are none of those, or if it is not their rounding."""
        masters = self.pairs.get(part.leaf)
        numbers = masters and masters_of(cut, masters)
        if not masters or not numbers or part.leaf in self._others:
            return None
        bases = [base for n in numbers if (base := whole.get((masters.leaf, n)))]
        if len(bases) < len(numbers):
            return None
        raws = [(base.id, base.raw) for base in bases]
        if len(self._local.memory) < len(chunk.raw):
            self._local.memory = memoryview(bytearray(len(chunk.raw)))
        scratch = self._local.memory[: len(chunk.raw)]
        stored = patches.encode_rounded(chunk.raw, raws, ROUNDINGS[part.dtype], scratch)
        self._known.compared(part.leaf, rounded=stored is not None)
        if stored is None:
            self._others.add(part.leaf)
            return None
        ids = tuple(base.id for base in bases)
        return NewPatch(chunk.id, chunk.checksum, len(chunk.raw), part.width, ids, stored)


def rounder(known: KnownMasters, plan: CommitPlan, sources: Sequence[Source]) -> Rounder | None:
    """What makes patches of weights that seem to be the rounding of masters; None if none do."""
    pairs = find(known, plan, sources)
    return Rounder(known, pairs) if pairs else None


def batches_of(plan: CommitPlan, pairs: Pairs) -> tuple[tuple[ChunkRun, ...], ...]:
    """The batches of a plan, in which each run of weights follows the runs of its masters, so that
    one thread writes both."""
    leaves = {*pairs, *(masters.leaf for masters in pairs.values())}
    runs, rest = defaultdict[int, list[ChunkRun]](list), []
    for batch in plan.batches:
        for run in batch:
            if run.part.leaf in leaves:
                runs[run.part.leaf].append(run)
        if others := tuple(run for run in batch if run.part.leaf not in leaves):
            rest.append(others)
    beside = (
        tuple(_beside(runs[weights], runs[masters.leaf])) for weights, masters in pairs.items()
    )
    return (*grouped((unit for units in beside for unit in units), RUN_BYTES), *rest)


def _beside(
    weights: Sequence[ChunkRun], masters: Sequence[ChunkRun]
) -> Iterator[tuple[ChunkRun, ...]]:
    """Each run of weights, behind those of masters that begin with its elements."""
    left = list(masters)
    for run in weights:
        some = [each for each in left if each.cuts[0] < 2 * run.cuts[-1]]
        left = left[len(some) :]
        yield *some, run
    if left:
        yield tuple(left)


def steps_of(batch: Sequence[ChunkRun], pairs: Pairs) -> Iterator[tuple[ChunkRun, ...]]:
    """The runs of a batch in pieces that are written together: each chunk of weights behind those
    of its masters."""
    left = defaultdict[int, list[ChunkRun]](list)
    leaves = {masters.leaf for masters in pairs.values()}
    for run in batch:
        if run.part.leaf in leaves:
            left[run.part.leaf].append(run)
        elif run.part.leaf in pairs:
            behind = left.pop(pairs[run.part.leaf].leaf, [])
            for i in range(len(run.cuts) - 1):
                some, behind = _before(behind, 2 * run.cuts[i + 1])
                yield *some, run.piece(i, i + 1)
            yield from pieces_of(behind)
        else:
            yield from pieces_of([run])
    for masters in left.values():
        yield from pieces_of(masters)


def _before(runs: Sequence[ChunkRun], stop: int) -> tuple[list[ChunkRun], list[ChunkRun]]:
    """The chunks of `runs` that begin before a byte of their leaf, and the others."""
    before, left = [], []
    for run in runs:
        count = sum(start < stop for start in run.cuts[:-1])
        if count:
            before.append(run.piece(0, count))
        if count < len(run.cuts) - 1:
            left.append(run.piece(count, len(run.cuts) - 1))
    return before, left
