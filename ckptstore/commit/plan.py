"""How is a state divided into units of work? This plans only; no bytes move.

A run is up to 8 MiB of consecutive chunks of one leaf, which lie together in a pack. A batch, the
unit a thread takes, is one large run or many small ones, so that ten thousand small leaves need few
hand-overs. The thread copies, hashes and writes a batch in windows of 2 MiB.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.geometry import Grid, grid
from ckptstore.core.model import INLINE_BYTES, Box, Shape

BATCH_RUNS = 256
WINDOW_BYTES = 2 * MIB
"""A copy that leaves the core's cache would cost as much as its hash."""


@dataclass(frozen=True, slots=True)
class Part:
    """A leaf, or a part of one, stored as chunks `first:stop` of its grid.

    `leaf` is its number in the plan, `width` the bytes per element, `floating` whether elements are
    floats.
    """

    leaf: int
    grid: Grid
    width: int
    raw_bytes: int
    floating: bool
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


class Extent(NamedTuple):
    """The planner's view of a leaf; a leaf other than a tensor is a vector of bytes.

    With `box`, only that box of a leaf of `shape` is stored; with `cells`, only that half-open
    range of its grid. `raw_bytes` counts the bytes to store.
    """

    shape: Shape
    width: int
    raw_bytes: int
    floating: bool
    box: Box | None = None
    cells: tuple[int, int] | None = None


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of a part, starting with chunk `first`: chunk `first + i` is bytes
    `cuts[i]:cuts[i + 1]` of the leaf. A piece of a run has `lead` bytes of the run
    before it and `rest` behind it."""

    part: Part
    first: int
    cuts: tuple[int, ...]
    lead: int = 0
    rest: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The run's identity in its plan: its leaf and its first chunk."""
        return self.part.leaf, self.first

    @property
    def raw_bytes(self) -> int:
        return self.cuts[-1] - self.cuts[0]

    def pieces(self) -> Iterator["Run"]:
        """The run in pieces of at most `WINDOW_BYTES`, or one chunk."""
        begin = 0
        for end in range(1, len(self.cuts)):
            if end + 1 == len(self.cuts) or self.cuts[end + 1] - self.cuts[begin] > WINDOW_BYTES:
                yield Run(
                    self.part,
                    self.first + begin,
                    self.cuts[begin : end + 1],
                    self.cuts[begin] - self.cuts[0],
                    self.cuts[-1] - self.cuts[end],
                )
                begin = end


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The leaves stored `inline` in pages, and the `batches` of the rest, which goes to packs."""

    inline: tuple[int, ...]
    parts: tuple[Part, ...]
    batches: tuple[tuple[Run, ...], ...]
    logical_bytes: int


def plan_commit(
    leaves: Sequence[Extent], chunk_bytes: int, run_bytes: int = RUN_BYTES
) -> CommitPlan:
    """The plan for whole leaves, in order. A run holds at most `run_bytes`, or one chunk; a small
    memory budget asks for shorter runs."""
    inline = tuple(i for i, leaf in enumerate(leaves) if leaf.raw_bytes <= INLINE_BYTES)
    parts = tuple(
        _part(i, leaf, chunk_bytes)
        for i, leaf in enumerate(leaves)
        if leaf.raw_bytes > INLINE_BYTES
    )
    return CommitPlan(
        inline, parts, _batches_of(parts, run_bytes), sum(leaf.raw_bytes for leaf in leaves)
    )


def plan_chunks(
    parts: Sequence[Extent], chunk_bytes: int, run_bytes: int = RUN_BYTES
) -> CommitPlan:
    """The plan for parts of leaves, all stored as chunks, even small ones."""
    planned = tuple(_part(i, part, chunk_bytes) for i, part in enumerate(parts))
    return CommitPlan(
        (), planned, _batches_of(planned, run_bytes), sum(part.raw_bytes for part in parts)
    )


def _part(number: int, extent: Extent, chunk_bytes: int) -> Part:
    cells = grid(extent.shape, extent.width, chunk_bytes, extent.box)
    first, stop = extent.cells or (0, len(cells))
    return Part(number, cells, extent.width, extent.raw_bytes, extent.floating, first, stop)


def _batches_of(parts: Sequence[Part], run_bytes: int) -> tuple[tuple[Run, ...], ...]:
    return tuple(_batches((run for part in parts for run in _runs(part, run_bytes)), run_bytes))


def _runs(part: Part, run_bytes: int) -> Iterator[Run]:
    first, cuts = part.first, [part.grid.span(part.first)[0]]
    for _, stop in _spans(part):
        if stop - cuts[0] > run_bytes and len(cuts) > 1:
            yield Run(part, first, tuple(cuts))
            first, cuts = first + len(cuts) - 1, [cuts[-1]]
        cuts.append(stop)
    yield Run(part, first, tuple(cuts))


def _spans(part: Part) -> Iterator[tuple[int, int]]:
    if len(part) == len(part.grid):
        return part.grid.spans()
    return (part.grid.span(i) for i in range(part.first, part.stop))


def _batches(runs: Iterator[Run], run_bytes: int) -> Iterator[tuple[Run, ...]]:
    batch: list[Run] = []
    size = 0
    for run in runs:
        if batch and (size + run.raw_bytes > run_bytes or len(batch) == BATCH_RUNS):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(run)
        size += run.raw_bytes
    if batch:
        yield tuple(batch)


def windows(batch: Sequence[Run]) -> Iterator[list[Run]]:
    """The pieces of a batch's runs, in order, in windows of at most `WINDOW_BYTES`, or one
    chunk."""
    window: list[Run] = []
    size = 0
    for run in batch:
        for piece in run.pieces() if run.raw_bytes > WINDOW_BYTES else (run,):
            nbytes = piece.raw_bytes
            if window and size + nbytes > WINDOW_BYTES:
                yield window
                window, size = [], 0
            window.append(piece)
            size += nbytes
    if window:
        yield window
