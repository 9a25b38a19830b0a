"""How do packed chunks become a commit, or leave nothing behind?

Every commit is a transaction: writers pack chunks under one session, and one publisher writes
metadata, document and log entry. The order makes it crash-safe. A pack is durable before a document
names its chunks, the document before the log entry names it, and the commit exists when its entry
does. An earlier crash leaves files that no entry names, and gc removes them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ckptstore.commit import masters
from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest
from ckptstore.commit.hints import DedupHints
from ckptstore.commit.patching import Patcher, in_table
from ckptstore.commit.pending import UNWATCHED, Watch
from ckptstore.commit.plan import CommitPlan, Flats, WholePlan
from ckptstore.commit.predecessors import Predecessors
from ckptstore.commit.write import PARALLEL_BYTES, ChunkWriter, Measured, write_metadata
from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    CommitId,
    PackId,
    SessionId,
    digest,
    document_key,
    parse_pack_id,
    session_key,
)
from ckptstore.core.model import (
    SHARED,
    Cast,
    CommitDocument,
    LeafContent,
    PackRecord,
    Schema,
    TreeRef,
)
from ckptstore.core.options import Milestone
from ckptstore.core.process import uncollected
from ckptstore.core.statistics import Moments
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NoSpace
from ckptstore.log import entries
from ckptstore.log.admission import Demand, not_made
from ckptstore.log.entries import entry_of, new_packs
from ckptstore.log.log import Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects.codecs import codec_id
from ckptstore.objects.documents import content_id, decode_document, encode_document
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA
from ckptstore.objects.pages import split_pages
from ckptstore.objects.patches import ROUNDINGS
from ckptstore.objects.schema import LastSchemas, join_schemas
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import ChunkTable, Dedup
from ckptstore.repository.memory_budget import write_room
from ckptstore.repository.pack_writer import PackSet, delete_own
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.state.leaf_sources import Source, is_plain_node, numbered
from ckptstore.storage.contract import put_finished

if TYPE_CHECKING:
    from ckptstore.state.casting import Casting

ATTEMPTS = 5
"""A commit is written this often if others change the store meanwhile."""

SESSION_LOOKS_S = (0.0, 0.1, 0.4, 1.6)
"""Pauses before a look for the session's file: a network file system may show it late."""


@dataclass(frozen=True, slots=True)
class CommitStats:
    """The cost of a commit. `new_bytes` is the growth of the store's packs; times are seconds from
    the call. With `commit(…, stats=True)`, `tensors` has each tensor's moments by path, or None if
    storage failed when the commit was durable."""

    logical_bytes: int
    new_bytes: int
    leaves: int
    chunks: int
    new_chunks: int
    packed_s: float
    durable_s: float
    held_s: float
    tensors: Mapping[str, Moments] | None = None

    @property
    def written_bytes_per_s(self) -> float:
        """Durable write rate of this commit."""
        return self.new_bytes / self.durable_s


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that the log has acknowledged.

    `ids` are chunk ids, 32 bytes each, by leaf, for leaves stored as chunks. Numbering continues
    from key to key. A commit of many ranks has none.
    """

    id: CommitId
    document: CommitDocument
    stats: CommitStats
    ids: Mapping[int, bytes] = field(default_factory=dict)


class TreeContent(NamedTuple):
    """One key of a state whose chunks are packed, or the tree that some share: its schema, and its
    leaves' contents in order. A shared tree has the `keys` of the state."""

    key: str
    schema: Schema
    contents: Sequence[LeafContent]
    keys: tuple[str, ...] = ()


def stored_trees(trees: Iterable[TreeContent]) -> Iterator[TreeContent]:
    """The trees as they are stored, by their names: keys of plain values share one
    (docs/format.md §7). One that is shared stays as it is."""
    sharing: list[TreeContent] = []
    for tree in trees:
        if not tree.keys and (tree.key == SHARED or is_plain_node(tree.schema.skeleton)):
            sharing.append(tree)
        else:
            yield tree
    if sharing:
        sharing.sort(key=lambda tree: tree.key)
        schema = join_schemas([(tree.key, tree.schema) for tree in sharing])
        contents = [content for tree in sharing for content in tree.contents]
        yield TreeContent(SHARED, schema, contents)


def _keys_of(trees: Sequence[TreeContent]) -> tuple[str, ...]:
    """The keys of the state, in its order."""
    return next((tree.keys for tree in trees if tree.keys), tuple(tree.key for tree in trees))


def logical_bytes(trees: Sequence[TreeContent]) -> int:
    """Raw bytes of a state: an alias has no content."""
    contents = [content for tree in trees for content in tree.contents]
    return sum(each.raw_bytes or len(each.inline or b"") for each in contents)


class Destination:
    """An open store as its committers see it. `schemas` caches the encoded ones of the last
    commit."""

    def __init__(self, handle: StoreHandle, threads: ThreadPool) -> None:
        self.config, self.log, self.threads = handle.config, handle.log, threads
        self.storage, self.patch_memory = handle.storage, handle.patch_memory
        self.schemas = LastSchemas()
        self._handle = handle

    @property
    def objects(self) -> ObjectStore:
        """The store's chunks. The first use opens this host's chunk index."""
        return self._handle.objects

    def before(
        self, run: str, parents: Sequence[CommitId], paths: Mapping[int, str]
    ) -> Predecessors | None:
        """The chunks of the commit that the next one of a run follows, by the paths of a plan's
        leaves; None if there is none."""
        state = self.log.replay()
        commits = (*parents, *state.runs.get(run, ())[-1:])
        known = [commit for commit in commits if commit in state.commits]
        if not known or not self.patch_memory.is_used:
            return None
        session = state.commits[known[0]].session
        return Predecessors(self.objects, session, known[0], paths, self.config.chunk_bytes)

    def look(self) -> Dedup:
        """Deduplication against the chunks that the store has now."""
        state = self.log.replay()
        self.objects.sync(state)
        return Dedup(self.objects, state)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A writer's report to the publisher: whether its store has the session's file, its durable
    packs, the packs that it reuses, and how many chunks it hashed and wrote."""

    session_seen: bool
    packs: tuple[PackRecord, ...]
    reused: frozenset[int]
    chunks: int
    new_chunks: int

    def encode(self) -> list[Any]:
        """The receipt as lists and numbers."""
        packs = [[pack.id, pack.bytes, pack.chunks] for pack in self.packs]
        return [self.session_seen, packs, sorted(self.reused), self.chunks, self.new_chunks]

    @classmethod
    def decode(cls, said: Any) -> Self:
        """The inverse of `encode`; raises `Corrupt`."""
        try:
            seen, packs, reused, chunks, new_chunks = said
            records = tuple(
                PackRecord(parse_pack_id(name), int(nbytes), int(count), metadata=False)
                for name, nbytes, count in packs
            )
            reuses = frozenset(map(int, reused))
            return cls(bool(seen), records, reuses, int(chunks), int(new_chunks))
        except (TypeError, ValueError) as error:
            raise Corrupt(
                f"a rank's receipt is damaged: {error!r}; do all ranks run one version of "
                "ckptstore?"
            ) from error


class Published(NamedTuple):
    """A commit whose entry is in the log since `durable_at`; `packs` are the numbers and names of
    its new ones, and all writers' chunks are counted. Times are those of `time.perf_counter`."""

    commit: CommitId
    document: CommitDocument
    packs: Sequence[tuple[int, PackId]]
    chunks: int
    new_chunks: int
    packed_at: float
    durable_at: float

    def committed(
        self,
        started: float,
        ids: Mapping[int, bytes] = MappingProxyType({}),
    ) -> Committed:
        """The commit and its cost, for a caller who called at `started`."""
        stats = CommitStats(
            self.document.logical_bytes,
            self.document.new_bytes,
            self.document.leaves,
            self.chunks,
            self.new_chunks,
            self.packed_at - started,
            self.durable_at - started,
            time.perf_counter() - started,
        )
        return Committed(self.commit, self.document, stats, ids)


def no_cast() -> Cast | None:
    """The `cast` of a commit of which no leaf was converted."""
    return None


class Transaction:
    """One writer's part of a commit, and its publication if this writer is the publisher.

    As a context manager it deletes what this writer wrote if the block raises, unless the log may
    name that (`is_asked`). It closes its session if it `owns` that. Statistics go to `measured`, if
    set.
    """

    def __init__(
        self,
        to: Destination,
        session: SessionId,
        *,
        rank: int = 0,
        unbuffered: bool = False,
        owns: Session | None = None,
    ) -> None:
        self.session, self.owns = session, owns
        self.measured: Measured | None = None
        self.patching = True
        """Whether chunks may be kept in memory and stored as patches; not within a budget."""
        self.is_with_publisher = False
        """Whether it is known that this writer has the publisher's store."""
        self.table: ChunkTable | None = None
        """The chunks of the last `write`."""
        self.asked: list[SessionId] = []
        """The sessions whose commit was to be this one, and may have been made; this one is added.
        """
        codec = codec_id(to.config.codec)
        self.packs = PackSet(
            to.storage, session, to.threads, codec=codec, rank=rank, unbuffered=unbuffered
        )
        self._to = to
        self._chunks = self._new_chunks = 0
        self._has_peers = False
        self._dedup: Dedup | None = None

    @classmethod
    def begin(cls, to: Destination, *, what: str = "commit", unbuffered: bool = False) -> Self:
        """A transaction of one writer, with a session of its own."""
        session = open_session(to.storage, what)
        try:
            return cls(to, session.id, unbuffered=unbuffered, owns=session)
        except BaseException:
            session.abandon()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        undone = False
        try:
            if error and not self.is_asked:
                self.packs.drop()
                undone = isinstance(error, Refused | NoSpace)
        finally:
            if self.owns:
                # A session without objects ends, so that the gc which makes room need not wait.
                ended = error is None or (undone and not self._has_peers)
                self.owns.end() if ended else self.owns.abandon()

    @property
    def is_asked(self) -> bool:
        """Whether the log was asked to take what this writer wrote, and its answer is unknown."""
        return self.session in self.asked

    def asks(self) -> None:
        """From now on, only the log can tell whether it has what this writer wrote."""
        self.asked.append(self.session)

    def not_taken(self) -> None:
        """The log was not asked, or has refused."""
        if self.is_asked:
            self.asked.remove(self.session)

    def look(self) -> Dedup:
        """Deduplication against the chunks that the store had at the first call of this method.
        That call comes after the session was opened, so gc spares those chunks."""
        self._dedup = self._dedup or self._to.look()
        return self._dedup

    def write(
        self,
        plan: CommitPlan,
        sources: Sequence[Source],
        watch: Watch = UNWATCHED,
        *,
        hints: DedupHints | None = None,
        before: Predecessors | None = None,
        max_workers: int | None = None,
    ) -> dict[int, bytes]:
        """Hash the chunks of `plan` on at most `max_workers` threads and pack those that the store
        lacks; returns the chunk ids by leaf, in grid order. Raises the failure of any thread.

        `hints` know the last commit of the same plan, and then this one. Where they know none,
        `before` has chunks that may be bases of patches. Afterwards the packs are closing;
        `receipt` and `publish` wait for them.
        """
        made = ChunkTable({part.leaf: range(part.first, part.stop) for part in plan.parts})
        hints, dedup = hints or DedupHints(), self.look()
        patcher, memory = None, self._to.patch_memory
        patching = self.patching and memory.is_used
        pairs = masters.NO_PAIRS
        if patching and any(part.dtype in ROUNDINGS for part in plan.parts):
            pairs = masters.find(plan, sources)
        planned = masters.beside(plan, pairs) if pairs else plan.batches
        batches, threads = shared(planned), self._to.threads
        small = sum(part.raw_bytes for part in plan.parts) <= PARALLEL_BYTES
        count = min(max_workers or threads.count, threads.count, len(planned))
        replaced = in_table(hints.last) if hints.last else before and before.near_chunk
        if replaced and patching:
            patcher = Patcher(self._to.objects, hints.held, memory, replaced)
        scratch = threads.scratch
        store = dedup, self.packs, watch, scratch, self.measured, patcher
        work = batches, sources, made, hints.last, *store

        def rounder() -> masters.Rounder | None:
            return masters.Rounder(plan, pairs, scratch) if pairs else None

        writers = [ChunkWriter(*work, rounder()) for _ in range(min(count, 1) if small else count)]
        if writers:
            threads.together([writer.work for writer in writers], batches.stop)
        self._chunks += sum(map(len, plan.parts))
        self._new_chunks += sum(writer.new_chunks for writer in writers)
        hints.last = self.table = made
        return made.ids_by_leaf()

    def receipt(self) -> Receipt:
        """This writer's receipt, once its packs are durable."""
        seen = self.is_with_publisher or self._sees_session()  # while packs are being closed
        self.packs.wait()
        return Receipt(
            seen,
            tuple(pack.record for pack in self.packs.closed),
            frozenset(self.look().reused),
            self._chunks,
            self._new_chunks,
        )

    def publish(
        self,
        label: CommitMetadata,
        trees: Iterable[TreeContent],
        *,
        logical_bytes: int,
        layout: bytes | None = None,
        receipts: Sequence[Receipt] = (),
        watch: Watch = UNWATCHED,
        cast: Callable[[], Cast | None] = no_cast,
    ) -> Published:
        """Append the commit of what this writer has packed, or all writers by `receipts`, which may
        include this one's.

        The parent is the last of the label's unanswered commits that the log took, or that of the
        label, or the run's newest commit. `cast` is called when all leaves were read. Raises what
        the log raises; after `Refused` and `NoSpace` the document is deleted.
        """
        trees = list(trees)
        refs, layout_id, leaves = self._write_metadata(stored_trees(trees), layout)
        self.packs.wait()
        packed_at = time.perf_counter()
        watch.reached(Milestone.WRITTEN)
        records = self._records(receipts)
        self._has_peers = len(records) > len(self.packs.closed)
        document = CommitDocument(
            store=self._to.config.store,
            session=self.session,
            run=label.run,
            step=label.step,
            message=label.message,
            time_ns=time.time_ns(),
            parents=label.parents or self._to.log.replay().runs.get(label.run, ())[-1:],
            metrics=label.metrics,
            tags=label.tags,
            keys=_keys_of(trees),
            trees=refs,
            layout=layout_id,
            content=content_id(refs),
            logical_bytes=logical_bytes,
            new_bytes=sum(record.stored_bytes for record in records),
            leaves=leaves,
            links=label.links,
            cast=cast(),
        )
        reused = self.look().reused.union(*(receipt.reused for receipt in receipts))
        commit, document, entry = self._append_commit(
            document, label.unanswered, records, reused, watch
        )
        packs = new_packs(entry)
        durable_at = time.perf_counter()
        watch.reached(Milestone.DURABLE)
        self.index(packs)
        chunks = sum(each.chunks for each in receipts) if receipts else self._chunks
        new_chunks = sum(each.new_chunks for each in receipts) if receipts else self._new_chunks
        return Published(commit, document, packs, chunks, new_chunks, packed_at, durable_at)

    def _append_commit(
        self,
        document: CommitDocument,
        unanswered: tuple[SessionId, ...],
        records: Sequence[PackRecord],
        reused: Set[int],
        watch: Watch,
    ) -> tuple[CommitId, CommitDocument, entries.Entry]:
        """Append the commit of `document`, on top of the last of the `unanswered` that the log
        took. The others are over: whoever stood still before it asked the log adds nothing when it
        goes on. One that is on its way takes the number of this entry, or never arrives."""
        for session in unanswered:
            with suppress(Refused):  # the log took its commit, or it is over
                self._to.log.append(entries.Over((session,)))
        while True:
            commit, stored = encode_document(document)
            body = entry_of(document, commit, len(stored), records, reused)
            demand = not_made(unanswered[::-1], None)
            try:
                return commit, document, self.append(body, stored, watch=watch, demand=demand)
            except Refused as error:
                made = next((s for s in unanswered if s in error.refusal.sessions), None)
                if made is None:
                    raise
                unanswered = unanswered[unanswered.index(made) + 1 :]
                document = replace(document, parents=error.refusal.commits)

    def append(
        self,
        body: entries.Commit | entries.Register,
        document: bytes = b"",
        *,
        watch: Watch = UNWATCHED,
        time_ns: int | None = None,
        demand: Demand | None = None,
    ) -> entries.Entry:
        """Append an entry, which is returned with its packs numbered. The `document` of a commit is
        written first.

        After a refusal, the document is deleted and the packs are to be dropped. After any other
        error of the log the entry may exist, and everything stays.
        """
        own: tuple[str, ...] = ()
        if isinstance(body, entries.Commit):
            assert document, "a commit is its document"
            key = document_key(body.session, body.commit)
            own = (key,) if put_finished(self._to.storage, key, document) else ()
            watch.publishing(self.session)
            demand = not_made(tuple(self.asked), demand)
        self.asks()
        try:
            entry = self._to.log.append(body, time_ns=time_ns, demand=demand)
        except (Refused, NoSpace):
            self.not_taken()
            delete_own(self._to.storage, own)
            raise
        return entry

    def index(self, registered: Iterable[tuple[int, PackId]]) -> None:
        """Add this writer's packs to the chunk index, under the numbers that the log gave them."""
        tables = {pack.record.id: pack.table for pack in self.packs.closed}
        for number, name in registered:
            if name in tables:
                self._to.objects.registered(number, name, tables[name])

    def _write_metadata(
        self, trees: Iterable[TreeContent], layout: bytes | None
    ) -> tuple[tuple[tuple[str, TreeRef], ...], ChunkId | None, int]:
        """Pack the new schemas, pages and layout; returns how the document refers to them, and the
        number of leaves."""
        chunks: dict[ChunkId, tuple[bytes, int]] = {}
        refs, leaves = [], 0

        def add(data: bytes, kind: int) -> ChunkId:
            chunk = ChunkId(digest(data))
            chunks[chunk] = data, kind
            return chunk

        for name, schema, contents, _ in trees:
            schema_id = add(self._to.schemas.encode(name, schema), SCHEMA)
            pages = split_pages(schema.kinds, contents)
            refs.append((name, TreeRef(schema_id, tuple(add(page, PAGE) for page in pages))))
            leaves += len(schema)
        layout_id = None if layout is None else add(layout, LAYOUT)
        write_metadata(chunks, self.look(), self.packs)
        return tuple(sorted(refs)), layout_id, leaves

    def _sees_session(self) -> bool:
        for wait_s in SESSION_LOOKS_S:
            time.sleep(wait_s)
            if self._to.storage.size(session_key(self.session)) is not None:
                return True
        return False

    def _records(self, receipts: Sequence[Receipt]) -> list[PackRecord]:
        """The packs of all writers. Raises `InvalidInput` for two packs of one name: two writers
        had one rank; and for a writer that has another store, or another copy of this one, where
        this one's log cannot find its packs. The file of this session lies in one place, so such a
        writer does not see it."""
        blind = [writer for writer, receipt in enumerate(receipts) if not receipt.session_seen]
        # If nobody sees it, a gc has ended the session, and the log refuses its entry.
        if blind and self._sees_session():
            raise InvalidInput(
                f"rank {blind[0]} has not written to the store at {self._to.storage.url} that rank "
                "0 has opened: a path on each host's own disk is another store on each host, also "
                "if one was copied from the other; open one that all ranks reach, a shared "
                "directory or a bucket"
            )
        own = [pack.record for pack in self.packs.closed]
        told = [pack for each in receipts for pack in each.packs]
        records = own + [pack for pack in told if pack not in own]
        for packs in (told, records):
            name, count = Counter(pack.id for pack in packs).most_common(1)[0] if packs else ("", 0)
            if count > 1:
                raise InvalidInput(
                    f"two writers of this commit wrote a pack {name}: each needs a rank of its "
                    "own; repeat the save"
                )
        return records


def paths_of(flats: Flats) -> dict[int, str]:
    """The paths of the leaves of a state that one process holds whole, by number."""
    return {
        first + i: path
        for _, flat, first in numbered(flats)
        for i, path in enumerate(flat.schema.paths)
    }


def contents_of(flats: Flats, plan: CommitPlan, ids: Mapping[int, bytes]) -> Iterator[TreeContent]:
    """The content of each key of a state that one process holds whole; `ids` is by leaf."""
    inline = frozenset(plan.inline)
    for key, flat, first in numbered(flats):
        with uncollected():
            contents = [
                LeafContent(inline=source.read_all(), raw_bytes=source.nbytes)
                if first + i in inline
                else LeafContent(ids=ids[first + i], raw_bytes=source.nbytes)
                for i, source in enumerate(flat.leaves)
            ]
        yield TreeContent(key, flat.schema, contents, flat.keys)


class WholeCommitter:
    """Commits whole states to one store, one at a time. Keeps the plan for the next commit."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._whole = WholePlan()

    def commit(self, request: CommitRequest) -> Committed:
        """Write a state and append its entry; the commit is durable on return.

        Staged and encoded bytes stay within the request's budget. Raises `InvalidInput` for too
        small a budget, `Unavailable` if storage fails, `Conflict` if others kept removing chunks to
        be reused, and exceptions of `watch`. After any of them the store is as before.
        """
        to, watch = self._to, request.watch
        room = write_room(
            request.memory_budget_bytes,
            to.config.chunk_bytes,
            to.threads.count,
            encoding=to.config.codec != "raw",
        )
        label, flats = request.prepared()
        casting = casting_of(flats, label)
        flats = casting.flats if casting else flats
        plan = self._whole.of(flats, to.config.chunk_bytes, room.run_bytes)
        sources = [leaf for flat in flats.values() for leaf in flat.leaves]
        for _ in range(ATTEMPTS):
            watch.starting()
            try:
                with Transaction.begin(to, unbuffered=room.unbuffered) as whole:
                    whole.measured, whole.asked = request.measured, request.asked
                    whole.patching = request.memory_budget_bytes is None
                    hints = self._whole.hints
                    before = None
                    if not hints.last:
                        before = to.before(label.run, label.parents, paths_of(flats))
                    ids = whole.write(
                        plan, sources, watch, hints=hints, before=before, max_workers=room.threads
                    )
                    if request.buffer:
                        # Not what `hints` know: a commit of another thread may be there.
                        request.buffer.hashed_by = whole.table
                    watch.reached(Milestone.HASHED)
                    trees = contents_of(flats, plan, ids)
                    cast = casting.report if casting else no_cast
                    published = whole.publish(
                        label, trees, logical_bytes=plan.logical_bytes, watch=watch, cast=cast
                    )
                    return published.committed(request.started, ids)
            except Refused as error:
                if not set(error.refusal.sessions).isdisjoint(request.asked):
                    return self._made(error.refusal.commits[0], request.started, ids)
                if not error.refusal.again:
                    raise
                last = error
        raise contended() from last

    def _made(self, commit: CommitId, started: float, ids: Mapping[int, bytes]) -> Committed:
        """A commit that the log has taken, although nobody could tell."""
        key = document_key(self._to.log.state.commits[commit].session, commit)
        document = decode_document(self._to.storage.read(key), commit)
        now, chunks = time.perf_counter(), sum(map(len, ids.values())) // CHUNK_ID_BYTES
        return Published(commit, document, (), chunks, 0, now, now).committed(started, ids)


def casting_of(flats: Flats, label: CommitMetadata) -> "Casting | None":
    """The conversions that the label asks for."""
    if not label.cast:
        return None
    # Imported here: worker processes and commands, which have no torch, cast nothing.
    from ckptstore.state.casting import Casting

    return Casting(flats, label.cast, label.unchecked)


def contended() -> Conflict:
    """The error after every attempt was refused."""
    return Conflict(
        f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; "
        "repeat it"
    )
