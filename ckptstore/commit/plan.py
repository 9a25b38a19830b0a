"""How is a state divided into units of work? This plans only; no bytes move.

A run is up to 8 MiB of consecutive chunks of one leaf, which lie together in a pack. A batch, the
unit a thread takes, is one large run or many small ones, so that ten thousand small leaves need few
hand-overs. The thread copies, hashes and writes a batch in windows of 2 MiB.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ckptstore.commit.hints import DedupHints
from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.geometry import Grid, grid, tapered_grid
from ckptstore.core.model import INLINE_BYTES, Box, LeafKind, Shape
from ckptstore.core.process import uncollected
from ckptstore.repository.dedup import ChunkTable
from ckptstore.state.leaf_sources import FlatState

Flats: TypeAlias = Mapping[str, FlatState]
"""A flattened state, by key."""

BATCH_RUNS = 256
WINDOW_BYTES = 2 * MIB
"""A copy that leaves the core's cache would cost as much as its hash."""


@dataclass(frozen=True, slots=True)
class PlanPart:
    """A leaf, or a part of one, stored as chunks `first:stop` of its grid.

    `leaf` is its number in the plan, `width` the bytes per element, `dtype` the type of the
    elements, empty for bytes.
    """

    leaf: int
    grid: Grid
    width: int
    raw_bytes: int
    dtype: str
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


class Extent(NamedTuple):
    """The planner's view of a leaf; a leaf other than a tensor is a vector of bytes.

    With `box`, only that box of a leaf of `shape` is stored; with `cells`, only that half-open
    range of its grid. `raw_bytes` counts the bytes to store. `grows` says that the leaf may be the
    one of the commit before with more at its end.
    """

    shape: Shape
    width: int
    raw_bytes: int
    dtype: str
    box: Box | None = None
    cells: tuple[int, int] | None = None
    grows: bool = False

    def grid(self, chunk_bytes: int) -> Grid:
        """Where the leaf, or its box, is cut."""
        if self.grows:
            return tapered_grid(self.shape[0], chunk_bytes)
        return grid(self.shape, self.width, chunk_bytes, self.box)


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


class Cut(NamedTuple):
    """Chunk `number` of a leaf's grid: bytes `start:stop` of the leaf."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks of a part, starting with chunk `first`: chunk `first + i` is bytes
    `cuts[i]:cuts[i + 1]` of the leaf. In a piece of a run, `lead` and `rest` count the bytes of the
    run before and after the piece."""

    part: PlanPart
    first: int
    cuts: tuple[int, ...]
    lead: int = 0
    rest: int = 0

    @property
    def raw_bytes(self) -> int:
        return self.cuts[-1] - self.cuts[0]

    def chunks(self) -> Iterator[Cut]:
        """The chunks, in order."""
        for number, (start, stop) in enumerate(pairwise(self.cuts), self.first):
            yield Cut(number, start, stop)

    def memory(self, cut: Cut, run: memoryview) -> memoryview:
        """The bytes of one chunk; `run` holds the bytes of all chunks."""
        return run[cut.start - self.cuts[0] : cut.stop - self.cuts[0]]

    def pieces(self) -> Iterator["ChunkRun"]:
        """The run in pieces of at most `WINDOW_BYTES`; a larger chunk is a piece alone."""
        for begin, cuts in _cut(self.cuts, WINDOW_BYTES):
            lead, rest = self.lead + cuts[0] - self.cuts[0], self.cuts[-1] - cuts[-1]
            yield ChunkRun(self.part, self.first + begin, cuts, lead, rest)

    def behind(self, count: int) -> "ChunkRun":
        """The run without its first `count` chunks."""
        lead = self.cuts[count] - self.cuts[0]
        return ChunkRun(self.part, self.first + count, self.cuts[count:], lead)


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The leaves stored `inline` in pages, and the `batches` of the rest, which goes to packs."""

    inline: tuple[int, ...]
    parts: tuple[PlanPart, ...]
    batches: tuple[tuple[ChunkRun, ...], ...]
    logical_bytes: int


def plan_chunks(
    parts: Sequence[Extent],
    chunk_bytes: int,
    run_bytes: int = RUN_BYTES,
    *,
    inline: tuple[int, ...] = (),
) -> CommitPlan:
    """The plan for parts of leaves, in order: all are stored as chunks, even small ones, but for
    those whose numbers are `inline`. A run holds at most `run_bytes`, or one chunk; a small memory
    budget asks for shorter runs."""
    pages = frozenset(inline)
    planned = tuple(_part(i, part, chunk_bytes) for i, part in enumerate(parts) if i not in pages)
    return CommitPlan(
        inline, planned, _batches_of(planned, run_bytes), sum(part.raw_bytes for part in parts)
    )


def _inline(leaves: Sequence[Extent]) -> tuple[int, ...]:
    """The numbers of leaves that lie in pages."""
    return tuple(i for i, leaf in enumerate(leaves) if leaf.raw_bytes <= INLINE_BYTES)


def _part(number: int, extent: Extent, chunk_bytes: int) -> PlanPart:
    cells = extent.grid(chunk_bytes)
    first, stop = extent.cells or (0, len(cells))
    return PlanPart(number, cells, extent.width, extent.raw_bytes, extent.dtype, first, stop)


def _batches_of(parts: Sequence[PlanPart], run_bytes: int) -> tuple[tuple[ChunkRun, ...], ...]:
    runs = ((run,) for part in parts for run in _runs(part, run_bytes))
    return tuple(grouped(runs, run_bytes))


def _runs(part: PlanPart, run_bytes: int) -> Iterator[ChunkRun]:
    whole = len(part) == len(part.grid)
    spans = part.grid.spans() if whole else map(part.grid.span, range(part.first, part.stop))
    starts, stops = zip(*spans, strict=True)
    for begin, cuts in _cut((starts[0], *stops), run_bytes):
        yield ChunkRun(part, part.first + begin, cuts)


def _cut(cuts: tuple[int, ...], most_bytes: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Split `cuts` into consecutive stretches of at most `most_bytes`; a larger chunk is a stretch
    alone. Each comes with the number of its first chunk."""
    begin = 0
    for end in range(1, len(cuts) - 1):
        if cuts[end + 1] - cuts[begin] > most_bytes:
            yield begin, cuts[begin : end + 1]
            begin = end
    yield begin, cuts[begin:]


def grouped(units: Iterable[Sequence[ChunkRun]], most_bytes: int) -> Iterator[tuple[ChunkRun, ...]]:
    """The runs of consecutive units, in groups of at most `BATCH_RUNS` runs and `most_bytes`; a
    larger unit is a group alone."""
    group: list[ChunkRun] = []
    size = 0
    for runs in units:
        nbytes = sum(run.raw_bytes for run in runs)
        if group and (size + nbytes > most_bytes or len(group) + len(runs) > BATCH_RUNS):
            yield tuple(group)
            group, size = [], 0
        group += runs
        size += nbytes
    if group:
        yield tuple(group)


def windows(batch: Sequence[ChunkRun]) -> Iterator[tuple[ChunkRun, ...]]:
    """The pieces of a batch's runs, in order, in windows of at most `WINDOW_BYTES`; a larger chunk
    is a window alone."""
    pieces = (run.pieces() if run.raw_bytes > WINDOW_BYTES else (run,) for run in batch)
    return grouped(((piece,) for some in pieces for piece in some), WINDOW_BYTES)


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """How to write some leaves, or parts of leaves, and what the last commit of the plan left for
    the next one."""

    parts: Sequence[Extent] = ()
    run_bytes: int = RUN_BYTES
    plan: CommitPlan = CommitPlan((), (), (), 0)
    hints: DedupHints = field(default_factory=DedupHints)

    def next(
        self,
        parts: Sequence[Extent],
        inline: tuple[int, ...],
        chunk_bytes: int,
        run_bytes: int = RUN_BYTES,
    ) -> "KeptPlan":
        """This plan, if it is of these parts, of which those are `inline`. Else another one, which
        keeps what is known of chunks if parts have only grown."""
        if (parts, inline, run_bytes) == (self.parts, self.plan.inline, self.run_bytes):
            return self
        plan = plan_chunks(parts, chunk_bytes, run_bytes, inline=inline)
        grown = _is_grown(self.parts, parts)
        hints = _carried(self.hints, self.plan, plan) if grown else DedupHints()
        return KeptPlan(parts, run_bytes, plan, hints)


class WholePlan:
    """How to write a state that one process holds whole. Kept, with its chunk ids, for the next
    commit of the same state."""

    def __init__(self) -> None:
        self._kept = KeptPlan()

    @property
    def hints(self) -> DedupHints:
        return self._kept.hints

    def of(self, flats: Flats, chunk_bytes: int, run_bytes: int) -> CommitPlan:
        with uncollected():
            leaves = [
                extent_of(flat, i) for flat in flats.values() for i in range(len(flat.leaves))
            ]
            self._kept = self._kept.next(leaves, _inline(leaves), chunk_bytes, run_bytes)
            return self._kept.plan


def _is_grown(before: Sequence[Extent], now: Sequence[Extent]) -> bool:
    """Whether leaves are those of before, but for the length of some that grow, as logs do."""
    return len(before) == len(now) and all(
        before[i] == leaf or (before[i].grows and leaf.grows) for i, leaf in enumerate(now)
    )


def _carried(hints: DedupHints, before: CommitPlan, now: CommitPlan) -> DedupHints:
    """What is known of the chunks of a plan, for one in which leaves have grown: all but of chunks
    that are cut elsewhere now."""
    if hints.last is None:
        return hints
    table = ChunkTable({part.leaf: range(part.first, part.stop) for part in now.parts})
    parts = {part.leaf: part for part in before.parts}
    for part in now.parts:
        if old := parts.get(part.leaf):
            count = len(part) if part.grid == old.grid else _alike(part.grid, old.grid)
            table.carry(part.leaf, range(part.first, part.first + count), hints.last)
    return DedupHints(table, hints.held)


def _alike(grid: Grid, other: Grid) -> int:
    """How many of the first cells of two vectors are the same."""
    spans = enumerate(grid.spans())
    return next((i for i, span in spans if i == len(other) or span != other.span(i)), len(grid))


def extent_of(flat: FlatState, i: int) -> Extent:
    """The planner's view of leaf `i`, stored whole."""
    source = flat.leaves[i]
    if flat.schema.kinds[i] == "tensor" and source.nbytes:
        dtype = flat.schema.dtypes[i]
        return Extent(flat.schema.shapes[i], source.width, source.nbytes, dtype)
    return extent_of_bytes(flat.schema.kinds[i], source.nbytes)


def extent_of_bytes(kind: LeafKind, nbytes: int) -> Extent:
    """The planner's view of a leaf that has no elements: values grow from commit to commit."""
    return Extent((nbytes,), 1, nbytes, "", grows=kind in ("value", "plain"))
