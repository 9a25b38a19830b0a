"""Which bytes of which leaves are one piece of work: deciding only, no bytes move.

A run is up to 8 MiB of consecutive chunks of one leaf. A batch is what a thread takes at a time: one large run, or many small ones, so
that ten thousand small leaves do not cost ten thousand hand-overs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.geometry import Grid, grid
from ckptstore.core.model import INLINE_BYTES, Shape

BATCH_RUNS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """A leaf that is stored as chunks: its number in the plan, its cut, its element width in bytes, and whether its elements are floats."""

    leaf: int
    grid: Grid
    width: int
    raw_bytes: int
    floating: bool


class Extent(NamedTuple):
    """What the plan must know of a leaf; one that is no tensor is a vector of its bytes."""

    shape: Shape
    width: int
    raw_bytes: int
    floating: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of a part from chunk `first` on: chunk `first + i` is the bytes `cuts[i]:cuts[i + 1]` of the leaf."""

    part: Part
    first: int
    cuts: tuple[int, ...]

    @property
    def raw_bytes(self) -> int:
        return self.cuts[-1] - self.cuts[0]


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """`inline` are the leaves whose bytes go into pages; the rest goes to packs, batch by batch."""

    inline: tuple[int, ...]
    parts: tuple[Part, ...]
    batches: tuple[tuple[Run, ...], ...]
    logical_bytes: int


def plan_commit(leaves: Sequence[Extent], chunk_bytes: int) -> CommitPlan:
    """The plan for leaves in order."""
    inline = tuple(i for i, leaf in enumerate(leaves) if leaf.raw_bytes <= INLINE_BYTES)
    parts = tuple(
        Part(i, grid(leaf.shape, leaf.width, chunk_bytes), leaf.width, leaf.raw_bytes, leaf.floating)
        for i, leaf in enumerate(leaves)
        if leaf.raw_bytes > INLINE_BYTES
    )
    batches = tuple(_batches(run for part in parts for run in _runs(part)))
    return CommitPlan(inline, parts, batches, sum(leaf.raw_bytes for leaf in leaves))


def _runs(part: Part) -> Iterator[Run]:
    first, cuts = 0, [0]
    for _, stop in part.grid.spans():
        if stop - cuts[0] > RUN_BYTES and len(cuts) > 1:
            yield Run(part, first, tuple(cuts))
            first, cuts = first + len(cuts) - 1, [cuts[-1]]
        cuts.append(stop)
    yield Run(part, first, tuple(cuts))


def _batches(runs: Iterator[Run]) -> Iterator[tuple[Run, ...]]:
    batch: list[Run] = []
    size = 0
    for run in runs:
        if batch and (size + run.raw_bytes > RUN_BYTES or len(batch) == BATCH_RUNS):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(run)
        size += run.raw_bytes
    if batch:
        yield tuple(batch)
