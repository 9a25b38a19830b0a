"""How does one process commit a state? Plan, packs, document, log entry, indexes, in this order.

The order makes it crash-safe. A pack is durable before a document names its chunks, the document
before the log entry names it, and the commit exists when its entry does. An earlier crash leaves
files that no entry names, and gc removes them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.commit.plan import CommitPlan, Extent, plan_commit
from ckptstore.commit.publish import Metadata, Published, Publisher, TreeContent, entry_body
from ckptstore.commit.write import Written, read_all, write_chunks
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument, LeafContent, Schema
from ckptstore.core.options import Milestone
from ckptstore.errors import Conflict, NoSpace
from ckptstore.log import entries
from ckptstore.log.log import Log, Refused
from ckptstore.log.sessions import Session, open_session
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
    """The cost of a commit. `new_bytes` is the growth of the store's packs; times are seconds from
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
    """Chunk ids, 32 bytes each, by leaf, for leaves stored as chunks. Numbering continues from key
    to key."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """One key of the state; its leaves are numbers `first` and on of the plan."""

    key: str
    flat: FlatState
    first: int


class Committer:
    """Commits states of one process to one store, one at a time. Keeps the plan and its chunk ids
    for the next commit of the same state."""

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
        """Write a flattened state and append its entry; the commit is durable on return.

        Without parents in `label`, the run's newest commit is the parent. Times count from
        `started`, a value of `time.perf_counter`. `watch` follows the progress and may stop it.
        Staging and encoding stay within `memory_budget_bytes`.

        Raises `InvalidInput` for too small a budget, `Unavailable` if storage fails, `Conflict` if
        others kept removing chunks to be reused, and exceptions of `watch`. After any of them the
        store is as before.
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
                written, metadata = self._write(trees, plan, dedup, packs, watch, room.threads)
                packed_s = time.perf_counter() - started
                watch.reached(Milestone.WRITTEN)
                records = [pack.record for pack in packs.closed]
                published = self._publisher.write_document(
                    session.id,
                    label,
                    metadata,
                    records,
                    logical_bytes=plan.logical_bytes,
                    leaves=sum(len(tree.flat.leaves) for tree in trees),
                )
                watch.publishing()
            except BaseException as error:
                packs.drop()
                if isinstance(error, NoSpace):
                    # The session has no objects left; the gc that frees space need not wait for it.
                    session.end()
                raise
            entry = self._append(published, packs, dedup, session)
            durable_s = time.perf_counter() - started
            watch.reached(Milestone.DURABLE)
            index_packs(self._objects, entry, packs)
        document = published.document
        stats = CommitStats(
            plan.logical_bytes,
            document.new_bytes,
            document.leaves,
            written.chunks,
            written.new_chunks,
            packed_s,
            durable_s,
            held_s=time.perf_counter() - started,
        )
        schemas = {tree.key: tree.flat.schema for tree in trees}
        return Committed(published.commit, document, schemas, stats, written.ids)

    def _write(
        self,
        trees: Sequence[_Tree],
        plan: CommitPlan,
        dedup: Dedup,
        packs: PackSet,
        watch: Watch,
        max_workers: int | None,
    ) -> tuple[Written, Metadata]:
        """Write the new chunks and metadata to packs, and wait until they are durable."""
        sources = [leaf for tree in trees for leaf in tree.flat.leaves]
        written = write_chunks(
            plan, sources, dedup, packs, self._threads, watch, max_workers=max_workers
        )
        watch.reached(Milestone.HASHED)
        metadata = self._publisher.write_metadata(_contents(trees, plan, written), dedup, packs)
        packs.wait()
        return written, metadata

    def _append(
        self, published: Published, packs: PackSet, dedup: Dedup, session: Session
    ) -> entries.Entry:
        """Append the log entry. After a refusal, delete what was written; after any other error the
        entry may exist, and everything stays."""
        records = [pack.record for pack in packs.closed]
        try:
            return self._log.append(entry_body(published, records, dedup.reused))
        except (Refused, NoSpace):
            packs.drop()
            delete_own(self._objects.storage, published.own)
            session.end()
            raise


def index_packs(objects: ObjectStore, entry: entries.Entry, packs: PackSet) -> None:
    """Add to the chunk index those of `packs` that `entry` registered."""
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
    """The planner's view of leaf `i`, stored whole."""
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
