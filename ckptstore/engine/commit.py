"""The journey of a state into the store: plan, pack, document, log entry, indexes, in this order.

The order is the crash-safety proof. A pack is durable before a document names its chunks, the document before the log entry names
it, and the commit exists when its entry does. A crash anywhere before leaves files that no entry names; gc removes them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptstore.core.config import PACK_BYTES_LOCAL, PACK_BYTES_REMOTE, StoreConfig
from ckptstore.core.ids import ChunkId, CommitId, SessionId, digest, document_key
from ckptstore.core.model import CommitDocument, LeafContent, Schema, TreeRef
from ckptstore.engine.plan import CommitPlan, Extent, plan_commit
from ckptstore.engine.transfer import Threads
from ckptstore.engine.write import Dedup, RunMemory, SessionPacks, Written, write_chunks, write_metadata
from ckptstore.errors import Conflict, NoSpace
from ckptstore.history import entries
from ckptstore.history.log import Log, Refused
from ckptstore.history.sessions import open_session
from ckptstore.objects import codecs
from ckptstore.objects.documents import content_id, encode_document
from ckptstore.objects.pack import PAGE, SCHEMA
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import encode_schema
from ckptstore.objects.store import ObjectStore
from ckptstore.state.flatten import flatten

if TYPE_CHECKING:
    from ckptstore.state.flatten import Flat

ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Label:
    """What a caller says about a commit beside its state."""

    run: str
    step: int | None = None
    message: str = ""
    metrics: tuple[tuple[str, float], ...] = ()
    tags: tuple[str, ...] = ()
    parents: tuple[CommitId, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What a commit cost. `new_bytes` is what the store's packs grew by; times are in seconds from the call."""

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
    entry: entries.Entry
    schemas: dict[str, Schema]
    stats: CommitStats


@dataclass(frozen=True, slots=True)
class _Tree:
    """One key of the state on its way: its leaves are numbers `first` and on of the plan."""

    key: str
    flat: "Flat"
    first: int


class Committer:
    """Commits states of one process to one store, one commit at a time. Remembers what the next commit of the same state can use again."""

    def __init__(self, config: StoreConfig, objects: ObjectStore, log: Log, threads: Threads) -> None:
        self._config, self._objects, self._log, self._threads = config, objects, log, threads
        self._extents: list[Extent] = []
        self._plan = plan_commit([], config.chunk_bytes)
        self._runs = RunMemory()
        self._schemas: dict[str, tuple[Schema, ChunkId, bytes]] = {}

    def commit(self, app_state: Mapping[str, Any], label: Label, *, allow_pickle: bool = False) -> Committed:
        """Write `app_state` and append its entry; durable when this returns. A label without parents gets the run's newest commit as
        parent.

        Raises `InvalidInput` for a state that cannot be stored, `Unavailable` if storage fails, `Conflict` if others kept removing what
        this commit wanted to reuse. Whatever is raised, the store is as it was.
        """
        started = time.perf_counter()
        flats = flatten(app_state, allow_pickle=allow_pickle)
        trees, first = [], 0
        for key, flat in flats.items():
            trees.append(_Tree(key, flat, first))
            first += len(flat.leaves)
        plan = self._plan_for([_extent(tree.flat, i) for tree in trees for i in range(len(tree.flat.leaves))])
        for _ in range(ATTEMPTS):
            try:
                return self._attempt(trees, plan, label, started)
            except Refused as error:
                if not error.refusal.again:
                    raise
                last = error
        raise Conflict(f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; repeat it") from last

    def _plan_for(self, extents: list[Extent]) -> CommitPlan:
        if extents != self._extents:
            self._extents, self._plan, self._runs = extents, plan_commit(extents, self._config.chunk_bytes), RunMemory()
        return self._plan

    def _encoded(self, key: str, schema: Schema) -> tuple[ChunkId, bytes]:
        known = self._schemas.get(key)
        if known is None or known[0] != schema:
            data = encode_schema(schema)
            known = self._schemas[key] = schema, ChunkId(digest(data)), data
        return known[1], known[2]

    def _attempt(self, trees: Sequence[_Tree], plan: CommitPlan, label: Label, started: float) -> Committed:
        with open_session(self._objects.backend, "commit") as session:
            state = self._log.replay()
            self._objects.sync(state)
            if not label.parents:
                label = replace(label, parents=state.runs.get(label.run, ())[-1:])
            remote = self._objects.backend.durable_root is None
            packs = SessionPacks(
                self._objects,
                session.id,
                self._threads,
                codec=codecs.codec_id(self._config.codec),
                pack_bytes=PACK_BYTES_REMOTE if remote else PACK_BYTES_LOCAL,
            )
            dedup = Dedup(self._objects, state, self._runs)
            try:
                written = write_chunks(plan, [leaf for tree in trees for leaf in tree.flat.leaves], dedup, packs, self._threads)
                refs = self._write_trees(trees, plan, written, dedup, packs)
                packs.wait()
                packed_s = time.perf_counter() - started
                document, commit, document_bytes = self._write_document(session.id, trees, refs, plan, packs, label)
            except BaseException:
                packs.drop()
                raise
            body = _entry_body(document, commit, document_bytes, packs, dedup)
            try:
                entry = self._log.append(body)
            except (Refused, NoSpace):  # nothing was appended; after any other error that is not known, and nothing may be deleted
                packs.drop()
                self._objects.backend.delete(document_key(session.id, commit))
                raise
            durable_s = time.perf_counter() - started
            self._index(entry, packs)
        held_s = time.perf_counter() - started
        stats = CommitStats(
            plan.logical_bytes, document.new_bytes, document.leaves, written.chunks, written.new_chunks, packed_s, durable_s, held_s
        )
        return Committed(commit, document, entry, {tree.key: tree.flat.schema for tree in trees}, stats)

    def _write_trees(
        self, trees: Sequence[_Tree], plan: CommitPlan, written: Written, dedup: Dedup, packs: SessionPacks
    ) -> tuple[tuple[str, TreeRef], ...]:
        inline = frozenset(plan.inline)
        metadata: dict[ChunkId, tuple[bytes, int]] = {}
        refs = []
        for tree in trees:
            schema_id, schema = self._encoded(tree.key, tree.flat.schema)
            pages = split_pages(tree.flat.schema.kinds, [_content(tree, i, inline, written) for i in range(len(tree.flat.leaves))])
            named = [(ChunkId(digest(data)), data) for data in pages]
            ref = TreeRef(schema_id, tuple(chunk for chunk, _ in named))
            metadata[ref.schema] = (schema, SCHEMA)
            metadata.update((chunk, (data, PAGE)) for chunk, data in named)
            refs.append((tree.key, ref))
        write_metadata(metadata, dedup, packs)
        for chunk, (data, _) in metadata.items():
            self._objects.remember_metadata(chunk, data)
        return tuple(refs)

    def _write_document(
        self,
        session: SessionId,
        trees: Sequence[_Tree],
        refs: tuple[tuple[str, TreeRef], ...],
        plan: CommitPlan,
        packs: SessionPacks,
        label: Label,
    ) -> tuple[CommitDocument, CommitId, int]:
        document = CommitDocument(
            store=self._config.store,
            session=session,
            run=label.run,
            step=label.step,
            message=label.message,
            time_ns=time.time_ns(),
            parents=label.parents,
            metrics=label.metrics,
            tags=label.tags,
            trees=refs,
            layout=None,
            content=content_id(refs),
            logical_bytes=plan.logical_bytes,
            new_bytes=sum(p.record.bytes * (2 if p.record.metadata else 1) for p in packs.closed),
            leaves=sum(len(tree.flat.leaves) for tree in trees),
        )
        commit, stored = encode_document(document)
        self._objects.backend.put(document_key(session, commit), stored)
        return document, commit, len(stored)

    def _index(self, entry: entries.Entry, packs: SessionPacks) -> None:
        assert isinstance(entry.body, entries.Commit)
        tables = {pack.record.id: pack.table for pack in packs.closed}
        for record in entry.body.packs:
            self._objects.registered(record.number, record.id, tables[record.id])


def _entry_body(document: CommitDocument, commit: CommitId, document_bytes: int, packs: SessionPacks, dedup: Dedup) -> entries.Commit:
    return entries.Commit(
        session=document.session,
        commit=commit,
        content=document.content,
        run=document.run,
        step=document.step,
        parents=document.parents,
        message=document.message,
        metrics=document.metrics,
        tags=document.tags,
        packs=tuple(pack.record for pack in packs.closed),
        reused=frozenset(dedup.reused),
        schemas=tuple((key, ref.schema.hex()) for key, ref in document.trees),
        logical_bytes=document.logical_bytes,
        new_bytes=document.new_bytes,
        leaves=document.leaves,
        document_bytes=document_bytes,
    )


def _extent(flat: "Flat", i: int) -> Extent:
    source = flat.leaves[i]
    if flat.schema.kinds[i] == "tensor" and source.nbytes:
        dtype = flat.schema.dtypes[i]
        return Extent(flat.schema.shapes[i], source.width, source.nbytes, dtype.startswith(("float", "bfloat")))
    return Extent((source.nbytes,), 1, source.nbytes, False)


def _content(tree: _Tree, i: int, inline: frozenset[int], written: Written) -> LeafContent:
    number, source = tree.first + i, tree.flat.leaves[i]
    if number not in inline:
        return LeafContent(ids=written.ids[number], raw_bytes=source.nbytes)
    memory = source.memory()
    if memory is not None:
        return LeafContent(inline=bytes(memory), raw_bytes=source.nbytes)
    buffer = bytearray(source.nbytes)
    source.stage(0, source.nbytes, memoryview(buffer))
    return LeafContent(inline=bytes(buffer), raw_bytes=source.nbytes)
