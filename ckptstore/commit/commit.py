"""What is asked of a committer, and how is a state planned that one process holds whole?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.commit.plan import CommitPlan, Extent, is_floating, plan_commit
from ckptstore.commit.transaction import (
    TreeContent,
)
from ckptstore.core.model import LeafContent
from ckptstore.core.options import Ranks
from ckptstore.core.process import uncollected
from ckptstore.repository.dedup import DedupHints
from ckptstore.state.leaf_sources import FlatState, read_all
from ckptstore.state.staging_buffers import Buffer

Flats: TypeAlias = Mapping[str, FlatState]
"""A flattened state, by key."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What to commit. `prepare` runs where its failure reaches every rank; times count from
    `started`, a value of `time.perf_counter`; `watch` follows the progress and may stop it. A
    worker process reads the state from `buffer`."""

    prepare: Callable[[], tuple[CommitMetadata, Flats]]
    started: float
    watch: Watch = UNWATCHED
    memory_budget_bytes: int | None = None
    ranks: Ranks = field(default_factory=Ranks)
    buffer: Buffer | None = None


class WholePlan:
    """How to write a state that one process holds whole. Kept, with its chunk ids, for the next
    commit of the same state."""

    def __init__(self) -> None:
        self._extents: list[Extent] | None = None
        self._run_bytes = 0
        self._plan = CommitPlan((), (), (), 0)
        self.hints = DedupHints()

    def of(self, flats: Flats, chunk_bytes: int, run_bytes: int) -> CommitPlan:
        with uncollected():
            extents = [
                extent_of(flat, i) for flat in flats.values() for i in range(len(flat.leaves))
            ]
            if extents != self._extents or run_bytes != self._run_bytes:
                self._extents, self._run_bytes, self.hints = extents, run_bytes, DedupHints()
                self._plan = plan_commit(extents, chunk_bytes, run_bytes)
            return self._plan


def extent_of(flat: FlatState, i: int) -> Extent:
    """The planner's view of leaf `i`, stored whole."""
    source = flat.leaves[i]
    if flat.schema.kinds[i] == "tensor" and source.nbytes:
        floating = is_floating(flat.schema.dtypes[i])
        return Extent(flat.schema.shapes[i], source.width, source.nbytes, floating)
    return Extent((source.nbytes,), 1, source.nbytes, False)


def contents_of(flats: Flats, plan: CommitPlan, ids: Mapping[int, bytes]) -> Iterator[TreeContent]:
    inline = frozenset(plan.inline)
    firsts: Sequence[int] = [0, *accumulate(len(flat.leaves) for flat in flats.values())]
    for first, (key, flat) in zip(firsts, flats.items(), strict=False):
        contents = [
            LeafContent(inline=read_all(source), raw_bytes=source.nbytes)
            if first + i in inline
            else LeafContent(ids=ids[first + i], raw_bytes=source.nbytes)
            for i, source in enumerate(flat.leaves)
        ]
        yield TreeContent(key, flat.schema, contents)
