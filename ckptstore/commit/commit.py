"""How does one process commit a state? The short way: a plan of whole leaves, and no rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.commit.plan import CommitPlan, Extent, is_floating, plan_commit
from ckptstore.commit.transaction import (
    ATTEMPTS,
    Committed,
    Destination,
    Transaction,
    TreeContent,
)
from ckptstore.commit.write import read_all
from ckptstore.core.model import LeafContent
from ckptstore.core.options import Milestone, Ranks
from ckptstore.errors import Conflict
from ckptstore.log.log import Refused
from ckptstore.repository.dedup import DedupHints
from ckptstore.repository.memory_budget import WriteRoom, write_room
from ckptstore.state.leaf_sources import FlatState
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


class WholeCommitter:
    """Commits states that one process holds whole. Keeps the plan and its chunk ids for the next
    commit of the same state."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._extents: list[Extent] = []
        self._run_bytes = 0
        self._plan = plan_commit([], to.config.chunk_bytes)
        self._hints = DedupHints()

    def commit(self, request: CommitRequest) -> Committed:
        """See `distributed.commit.Committer`."""
        to, config = self._to, self._to.config
        room = write_room(
            request.memory_budget_bytes,
            config.chunk_bytes,
            to.threads.count,
            encoding=config.codec != "raw",
        )
        label, flats = request.prepare()
        plan = self._plan_for(flats, room.run_bytes)
        for _ in range(ATTEMPTS):
            request.watch.starting()
            try:
                with Transaction.begin(to, self._hints, unbuffered=room.unbuffered) as transaction:
                    return self._attempt(transaction, request, label, flats, plan, room)
            except Refused as error:
                if not error.refusal.again:
                    raise
                last = error
        raise contended() from last

    def _plan_for(self, flats: Flats, run_bytes: int) -> CommitPlan:
        extents = [extent_of(flat, i) for flat in flats.values() for i in range(len(flat.leaves))]
        if extents != self._extents or run_bytes != self._run_bytes:
            self._extents, self._run_bytes, self._hints = extents, run_bytes, DedupHints()
            self._plan = plan_commit(extents, self._to.config.chunk_bytes, run_bytes)
        return self._plan

    def _attempt(
        self,
        transaction: Transaction,
        request: CommitRequest,
        label: CommitMetadata,
        flats: Flats,
        plan: CommitPlan,
        room: WriteRoom,
    ) -> Committed:
        sources = [leaf for flat in flats.values() for leaf in flat.leaves]
        written = transaction.write(plan, sources, request.watch, max_workers=room.threads)
        request.watch.reached(Milestone.HASHED)
        published = transaction.publish(
            label,
            _contents(flats, plan, written.ids),
            logical_bytes=plan.logical_bytes,
            watch=request.watch,
        )
        stats = published.stats(request.started)
        schemas = {key: flat.schema for key, flat in flats.items()}
        return Committed(published.commit, published.document, stats, schemas, written.ids)


def contended() -> Conflict:
    return Conflict(
        f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; "
        "repeat it"
    )


def extent_of(flat: FlatState, i: int) -> Extent:
    """The planner's view of leaf `i`, stored whole."""
    source = flat.leaves[i]
    if flat.schema.kinds[i] == "tensor" and source.nbytes:
        floating = is_floating(flat.schema.dtypes[i])
        return Extent(flat.schema.shapes[i], source.width, source.nbytes, floating)
    return Extent((source.nbytes,), 1, source.nbytes, False)


def _contents(flats: Flats, plan: CommitPlan, ids: Mapping[int, bytes]) -> Iterator[TreeContent]:
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
