"""The journey of a state into the store: plan, pack, document, log entry, indexes, in this order.

The order is the crash-safety proof. A pack is durable before a document names its chunks, the
document before the log entry names it, and the commit exists when its entry does. A crash anywhere
before leaves files that no entry names; gc removes them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import UNWATCHED, Milestone, Watch
from ckptstore.commit.plan import CommitPlan, Extent, plan_commit
from ckptstore.commit.publish import Publisher, TreeContent, entry_body
from ckptstore.commit.write import Written, read_all, write_chunks
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument, LeafContent, Schema
from ckptstore.errors import Conflict, NoSpace
from ckptstore.log import entries
from ckptstore.log.log import Log, Refused
from ckptstore.log.sessions import open_session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.memory_budget import WriteRoom, write_room
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.pack_writer import delete_own
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState

ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What a commit cost. `new_bytes` is what the store's packs grew by; times are in seconds from
    the call."""

    logical_bytes: int
    new_bytes: int
    leaves: int
    chunks: int
    new_chunks: int
    packed_s: float
    durable_s: float
    held_s: float

    @property
    def written_bytes_per_s(self) -> float:
        """Durable write rate of this commit."""
        return self.new_bytes / self.durable_s


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that the log has acknowledged."""

    id: CommitId
    document: CommitDocument
    schemas: dict[str, Schema]
    stats: CommitStats
    ids: dict[int, bytes]
    """The ids of the chunks of each leaf that has some, 32 bytes each; leaves are numbered through
    all keys."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """One key of the state on its way: its leaves are numbers `first` and on of the plan."""

    key: str
    flat: FlatState
    first: int


class Committer:
    """Commits states of one process to one store, one commit at a time. Remembers what the next
    commit of the same state can use again."""

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, log: Log, threads: ThreadPool
    ) -> None:
        self._config, self._objects, self._log, self._threads = config, objects, log, threads
        self._extents: list[Extent] = []
        self._run_bytes = 0
        self._plan = plan_commit([], config.chunk_bytes)
        self._runs = DedupHints()
        self._publisher = Publisher(config, objects)

    def commit(
        self,
        flats: Mapping[str, FlatState],
        label: CommitMetadata,
        started: float,
        watch: Watch = UNWATCHED,
        *,
        memory_budget_bytes: int | None = None,
    ) -> Committed:
        """Write a flattened state and append its entry; durable when this returns. A label without
        parents gets the run's newest commit as parent; times are counted from `started`, of
        `time.perf_counter`. `watch` is told of the progress, and may stop it. What is staged or
        encoded stays within the budget.

        Raises `InvalidInput` for a budget that is too small, `Unavailable` if storage fails,
        `Conflict` if others kept removing what this commit wanted to reuse, and what `watch`
        raises. Whatever is raised, the store is as it was.
        """
        room = write_room(
            memory_budget_bytes,
            self._config.chunk_bytes,
            self._threads.count,
            encoding=self._config.codec != "raw",
        )
        trees, first = [], 0
        for key, flat in flats.items():
            trees.append(_Tree(key, flat, first))
            first += len(flat.leaves)
        plan = self._plan_for(
            [extent_of(tree.flat, i) for tree in trees for i in range(len(tree.flat.leaves))],
            room.run_bytes,
        )
        for _ in range(ATTEMPTS):
            watch.starting()
            try:
                return self._attempt(trees, plan, label, started, watch, room)
            except Refused as error:
                if not error.refusal.again:
                    raise
                last = error
        raise Conflict(
            f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; "
            "repeat it"
        ) from last

    def _plan_for(self, extents: list[Extent], run_bytes: int) -> CommitPlan:
        if extents != self._extents or run_bytes != self._run_bytes:
            self._extents, self._run_bytes, self._runs = extents, run_bytes, DedupHints()
            self._plan = plan_commit(extents, self._config.chunk_bytes, run_bytes)
        return self._plan

    def _attempt(
        self,
        trees: Sequence[_Tree],
        plan: CommitPlan,
        label: CommitMetadata,
        started: float,
        watch: Watch,
        room: WriteRoom,
    ) -> Committed:
        with open_session(self._objects.storage, "commit") as session:
            state = self._log.replay()
            self._objects.sync(state)
            if not label.parents:
                label = replace(label, parents=state.runs.get(label.run, ())[-1:])
            packs = PackSet.of(
                self._config, self._objects, session.id, self._threads, unbuffered=room.unbuffered
            )
            dedup = Dedup(self._objects, state, self._runs)
            try:
                sources = [leaf for tree in trees for leaf in tree.flat.leaves]
                written = write_chunks(
                    plan, sources, dedup, packs, self._threads, watch, max_workers=room.threads
                )
                watch.reached(Milestone.HASHED)
                metadata = self._publisher.write_metadata(
                    _contents(trees, plan, written), dedup, packs
                )
                packs.wait()
                packed_s = time.perf_counter() - started
                watch.reached(Milestone.WRITTEN)
                records = [pack.record for pack in packs.closed]
                leaves = sum(len(tree.flat.leaves) for tree in trees)
                published = self._publisher.write_document(
                    session.id,
                    label,
                    metadata,
                    records,
                    logical_bytes=plan.logical_bytes,
                    leaves=leaves,
                )
                watch.publishing()
            except BaseException as error:
                packs.drop()
                if isinstance(error, NoSpace):
                    # nothing bears its name any more: the gc that makes room need not wait for it
                    session.end()
                raise
            try:
                entry = self._log.append(entry_body(published, records, dedup.reused))
            except (
                Refused,
                NoSpace,
                # nothing was appended; after any other error that is not known, and nothing may be
                # deleted
            ):
                packs.drop()
                delete_own(self._objects.storage, published.own)
                session.end()
                raise
            durable_s = time.perf_counter() - started
            watch.reached(Milestone.DURABLE)
            index_packs(self._objects, entry, packs)
        held_s = time.perf_counter() - started
        document = published.document
        stats = CommitStats(
            plan.logical_bytes,
            document.new_bytes,
            document.leaves,
            written.chunks,
            written.new_chunks,
            packed_s,
            durable_s,
            held_s,
        )
        return Committed(
            published.commit,
            document,
            {tree.key: tree.flat.schema for tree in trees},
            stats,
            written.ids,
        )


def index_packs(objects: ObjectStore, entry: entries.Entry, packs: PackSet) -> None:
    """Put into the chunk index those of `packs` that `entry` has registered."""
    assert isinstance(entry.body, entries.Commit)
    tables = {pack.record.id: pack.table for pack in packs.closed}
    for record in entry.body.packs:
        if record.id in tables:
            objects.registered(record.number, record.id, tables[record.id])


def _contents(trees: Sequence[_Tree], plan: CommitPlan, written: Written) -> Iterator[TreeContent]:
    inline = frozenset(plan.inline)
    for tree in trees:
        yield TreeContent(
            tree.key,
            tree.flat.schema,
            [_content(tree, i, inline, written) for i in range(len(tree.flat.leaves))],
        )


def extent_of(flat: FlatState, i: int) -> Extent:
    """What a plan must know of leaf `i`, held whole."""
    source = flat.leaves[i]
    if flat.schema.kinds[i] == "tensor" and source.nbytes:
        dtype = flat.schema.dtypes[i]
        return Extent(
            flat.schema.shapes[i],
            source.width,
            source.nbytes,
            dtype.startswith(("float", "bfloat")),
        )
    return Extent((source.nbytes,), 1, source.nbytes, False)


def _content(tree: _Tree, i: int, inline: frozenset[int], written: Written) -> LeafContent:
    number, source = tree.first + i, tree.flat.leaves[i]
    if number not in inline:
        return LeafContent(ids=written.ids[number], raw_bytes=source.nbytes)
    return LeafContent(inline=read_all(source), raw_bytes=source.nbytes)
