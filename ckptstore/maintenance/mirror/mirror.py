"""How commits get from one store into another: only the chunks that the target lacks travel, each
verified on the way.

Commit by commit, the oldest first. What a commit needs is looked up in the target's own chunk
index, so how packs are laid out on either side does not matter. A commit with much to carry goes in
parcels: each is registered in the target's log when its packs are durable, so that whoever repeats
a push that was killed finds them there. The commit's entry comes last and makes it appear whole,
with its tags.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from ckptstore.commit.publish import entry_body, put_document
from ckptstore.commit.write import write_metadata
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, document_key
from ckptstore.core.model import CommitDocument, PackRecord, Schema
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NoSpace, NotFound
from ckptstore.log import entries
from ckptstore.log.fold import Code
from ckptstore.log.log import Refused
from ckptstore.log.resolve import resolved
from ckptstore.log.sessions import Session, open_session
from ckptstore.maintenance.mirror.plan import CommitTransfer, MirrorPlan, plan_mirror
from ckptstore.maintenance.progress import Counter, Progress, silent
from ckptstore.maintenance.tags import set_tag
from ckptstore.objects import codecs
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA, TENSOR
from ckptstore.repository import footers
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.pack_reader import read_chunks
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.pack_writer import delete_own
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.restore.reader import Reader, Tree

logger = logging.getLogger("ckptstore")

ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """What a plan moves: chunks that the target lacks and their raw bytes, and the bytes of
    schemas, pages and layouts among them."""

    chunks: int
    raw_bytes: int
    metadata_bytes: int


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What was planned and done; a dry run has `load` instead. `stored_bytes` is what the target's
    packs and documents grew by; `damaged` are commits that the source could not give whole, and
    why: they are left out, the others travel."""

    plan: MirrorPlan
    sent: tuple[CommitId, ...] = ()
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    damaged: tuple[tuple[CommitId, str], ...] = ()
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """How to bring commits over: with the `tags` that name them, which move with `force`; with
    `verify`, what was written is read back before a commit appears. `batch_bytes` is about how much
    a kill may cost (default: a pack per thread)."""

    tags: bool = True
    force: bool = False
    verify: bool = False
    batch_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of one leaf that the target lacks, one behind the other, at most `RUN_BYTES` of
    them."""

    ids: tuple[ChunkId, ...]
    sizes: tuple[int, ...]
    width: int

    @property
    def raw_bytes(self) -> int:
        return sum(self.sizes)


class _DamagedSource(Exception):
    """The source cannot give what a commit needs; the message says why."""


@contextmanager
def _reading_source() -> Iterator[None]:
    """What is damaged in here is damaged in the source, not in the target."""
    try:
        yield
    except (Corrupt, NotFound) as error:
        raise _DamagedSource(str(error)) from error


@dataclass(slots=True)
class _Tally:
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    sent: list[CommitId] = field(default_factory=list)
    damaged: list[tuple[CommitId, str]] = field(default_factory=list)


def mirror(
    source: StoreHandle,
    target: StoreHandle,
    wanted: Collection[CommitId],
    options: MirrorOptions,
    threads: ThreadPool,
    *,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Mirrored:
    """Bring `wanted`, commits of `source`, into `target`, or with `dry_run` only say what that
    would move. What is interrupted can be repeated: what arrived is not sent again.

    Raises `InvalidInput` for stores that cut chunks differently, `Conflict`, before anything is
    sent, if a tag would have to move, `Unavailable` if either storage fails. A commit that the
    source cannot give whole is left out, and named in the result.
    """
    _check_alike(source, target)
    plan = plan_mirror(
        source.log.replay(), target.log.replay(), wanted, tags=options.tags, force=options.force
    )
    porter = _Mirror(source, target, options, threads, progress)
    if dry_run:
        return replace(Mirrored(plan), load=porter.weigh(plan))
    if plan.rejected:
        raise Conflict(_rejection(plan, target.url))
    return porter.apply(plan)


def _check_alike(source: StoreHandle, target: StoreHandle) -> None:
    if source.storage.url == target.storage.url:
        raise InvalidInput(f"{source.url} is both source and target; name another store")
    ours, theirs = source.config.chunk_bytes, target.config.chunk_bytes
    if ours != theirs:
        raise InvalidInput(
            f"{source.url} cuts chunks of {ours} bytes and {target.url} of {theirs}, so the same "
            "commit would get another id there; "
            f"make the target by `ckptstore clone`, or by `ckptstore init --chunk-size {ours}`"
        )


class _Mirror:
    """Brings commits of `source` into `target`. Both stay in use by others meanwhile."""

    def __init__(
        self,
        source: StoreHandle,
        target: StoreHandle,
        options: MirrorOptions,
        threads: ThreadPool,
        progress: Progress,
    ) -> None:
        self._source, self._target, self._threads = source, target, threads
        self._options, self._progress = options, progress
        self._batch_bytes = (
            options.batch_bytes or target.storage.capabilities.pack_bytes * threads.count
        )
        self._from = Reader(source.config, source.objects, threads)
        self._to = Reader(target.config, target.objects, threads)
        self._schemas: dict[str, Schema] = {}

    def weigh(self, plan: MirrorPlan) -> Load:
        """What the plan would move. Reads the pages of its commits, and no tensor."""
        self._source.objects.sync(self._source.log.replay())
        dedup = self._dedup()
        chunks = raw_bytes = metadata_bytes = 0
        for travel in plan.commits:
            try:
                _, document, trees = self._read(travel)
                chunk_batch = list(self._cargo(trees, dedup))
                metadata = self._metadata(document)
            except _DamagedSource as error:
                logger.warning(
                    "commit %s (step %s) cannot be sent: %s", travel.commit[:12], travel.step, error
                )
                continue
            fresh = [
                len(data)
                for (data, _), new in zip(
                    metadata.values(), dedup.fresh(list(metadata)), strict=True
                )
                if new
            ]
            chunks += sum(len(part.ids) for part in chunk_batch) + len(fresh)
            raw_bytes += sum(part.raw_bytes for part in chunk_batch)
            metadata_bytes += sum(fresh)
        return Load(chunks, raw_bytes, metadata_bytes)

    def apply(self, plan: MirrorPlan) -> Mirrored:
        """Carry out `plan`, which rejects no tag."""
        self._target.check_writable()
        self._source.objects.sync(self._source.log.replay())
        tally = _Tally()
        counter = Counter(self._progress, "commits", len(plan.commits))
        try:
            for travel in plan.commits:
                try:
                    self._send(travel, tally)
                except _DamagedSource as error:
                    logger.warning(
                        "commit %s (step %s) was not sent: %s",
                        travel.commit[:12],
                        travel.step,
                        error,
                    )
                    tally.damaged.append((travel.commit, str(error)))
                counter.add()
            for move in plan.tags:
                set_tag(
                    self._target,
                    self._to,
                    move.name,
                    resolved(self._target.log.replay(), move.commit),
                )
        finally:
            self._target.follow(self._schemas)
        return Mirrored(
            plan,
            tuple(tally.sent),
            tally.chunks,
            tally.raw_bytes,
            tally.stored_bytes,
            tuple(tally.damaged),
        )

    # -- one commit --

    def _send(self, travel: CommitTransfer, tally: _Tally) -> None:
        stored, document, trees = self._read(travel)
        for attempt in range(ATTEMPTS):
            try:
                with open_session(self._target.storage, "push") as session:
                    self._attempt(session, travel, document, stored, trees, tally)
                break
            except Refused as error:
                if error.refusal.code is Code.COMMIT_KNOWN:
                    return  # somebody else brought it meanwhile
                if not error.refusal.again or attempt == ATTEMPTS - 1:
                    raise
        tally.sent.append(travel.commit)
        self._schemas |= {tree.ref.schema.hex(): tree.schema for tree in trees}

    def _attempt(
        self,
        session: Session,
        travel: CommitTransfer,
        document: CommitDocument,
        stored: bytes,
        trees: Sequence[Tree],
        tally: _Tally,
    ) -> None:
        dedup = self._dedup()
        *batches, last = _batches(self._cargo(trees, dedup), self._batch_bytes)
        new_bytes = 0
        for batch in batches:
            records = self._register(batch, dedup, tally)
            new_bytes += sum(record.bytes for record in records)
        packs = self._packs(session)
        try:
            self._carry(last, packs, tally)
            write_metadata(self._metadata(document), dedup, packs)
            self._close(packs)
            new_bytes += sum(p.record.bytes * (2 if p.record.metadata else 1) for p in packs.closed)
            published = put_document(
                self._target.storage,
                document_key(session.id, travel.commit),
                document,
                travel.commit,
                stored,
            )
            told = entry_body(published, [pack.record for pack in packs.closed], dedup.reused)
            body = replace(told, session=session.id, tags=travel.tags, new_bytes=new_bytes)
        except BaseException:
            packs.drop()
            raise
        try:
            entry = self._target.log.append(body, time_ns=document.time_ns)
        except (
            Refused,
            NoSpace,
            # nothing was appended; after any other error that is not known, and nothing may be
            # deleted
        ):
            packs.drop()
            delete_own(self._target.storage, published.own)
            raise
        self._index(entry, packs)
        tally.stored_bytes += new_bytes + len(stored)

    def _register(
        self, batch: Sequence[ChunkBatch], dedup: Dedup, tally: _Tally
    ) -> tuple[PackRecord, ...]:
        """Send a parcel and list its packs, so that they outlive this process. A gc in between may
        condemn them, but waits for the session of the commit before it deletes them."""
        with open_session(self._target.storage, "push") as session:
            packs = self._packs(session)
            try:
                self._carry(batch, packs, tally)
                self._close(packs)
            except BaseException:
                packs.drop()
                raise
            state = self._target.log.replay()
            records = tuple(pack.record for pack in packs.closed)
            try:
                entry = self._target.log.append(
                    entries.Register(session.id, state.n, state.fence, records, frozenset())
                )
            except (Refused, NoSpace):
                packs.drop()
                raise
            dedup.reused.update(self._index(entry, packs))
        return records

    def _packs(self, session: Session) -> PackSet:
        return PackSet.of(self._target.config, self._target.objects, session.id, self._threads)

    def _dedup(self) -> Dedup:
        state = self._target.log.replay()
        self._target.objects.sync(state)
        return Dedup(self._target.objects, state, DedupHints())

    def _read(self, travel: CommitTransfer) -> tuple[bytes, CommitDocument, list[Tree]]:
        """The commit's document, as it is stored and decoded, and its trees."""
        with _reading_source():
            stored = self._source.storage.read(document_key(travel.session, travel.commit))
            document = decode_document(stored, travel.commit)
            return stored, document, [self._from.tree(key, ref) for key, ref in document.trees]

    def _metadata(self, document: CommitDocument) -> dict[ChunkId, tuple[bytes, int]]:
        kinds = _metadata_kinds(document)
        with _reading_source():
            data = self._source.objects.read_metadata_many(list(kinds))
        return {chunk: (raw, kind) for (chunk, kind), raw in zip(kinds.items(), data, strict=True)}

    def _cargo(self, trees: Sequence[Tree], dedup: Dedup) -> Iterator[ChunkBatch]:
        """What of the trees' chunks the target lacks, leaf by leaf."""
        for tree in trees:
            for content in tree.contents:
                if content.ids:
                    yield from self._leaf_cargo(content.ids, dedup)

    def _leaf_cargo(self, ids: bytes, dedup: Dedup) -> Iterator[ChunkBatch]:
        chunks = [ChunkId(ids[i : i + CHUNK_ID_BYTES]) for i in range(0, len(ids), CHUNK_ID_BYTES)]
        fresh = [chunk for chunk, new in zip(chunks, dedup.fresh(chunks), strict=True) if new]
        if not fresh:
            return
        with _reading_source():
            where = self._source.objects.located(b"".join(fresh))
        sizes, width = where["raw"].tolist(), int(where["width"][0])
        for first, stop in _cut(sizes, RUN_BYTES):
            yield ChunkBatch(tuple(fresh[first:stop]), tuple(sizes[first:stop]), width)

    # -- bytes --

    def _carry(self, batch: Sequence[ChunkBatch], packs: PackSet, tally: _Tally) -> None:
        """Read, verify and write; afterwards the packs are on their way."""
        runs = shared(list(_runs(batch)))
        workers = [
            _Carrier(self._source, runs, packs) for _ in range(min(self._threads.count, len(batch)))
        ]
        if workers:
            self._threads.together([worker.work for worker in workers], runs.stop)
        tally.chunks += sum(len(chunk_batch.ids) for chunk_batch in batch)
        tally.raw_bytes += sum(chunk_batch.raw_bytes for chunk_batch in batch)

    def _close(self, packs: PackSet) -> None:
        """Wait until the packs are durable; with `verify`, read them back."""
        packs.wait()
        for pack in packs.closed if self._options.verify else ():
            rows = footers.read_table(
                self._target.storage, pack.record.id, metadata=pack.record.metadata
            )
            for _ in read_chunks(
                self._target.storage, pack.record.id, rows, metadata=pack.record.metadata
            ):
                pass

    def _index(self, entry: entries.Entry, packs: PackSet) -> set[int]:
        assert isinstance(entry.body, entries.Commit | entries.Register)
        tables = {pack.record.id: pack.table for pack in packs.closed}
        for record in entry.body.packs:
            self._target.objects.registered(record.number, record.id, tables[record.id])
        return {record.number for record in entry.body.packs}


class _Carrier:
    """One thread that brings chunks from the source into a pack of its own in the target."""

    def __init__(
        self, source: StoreHandle, runs: Iterable[Sequence[ChunkBatch]], packs: PackSet
    ) -> None:
        self._source, self._runs, self._packs = source, runs, packs
        self._pack_writer = packs.pack_writer()
        self._memory = bytearray(RUN_BYTES)

    def work(self) -> None:
        try:
            for run in self._runs:
                self._run(run)
            self._packs.close_aside(self._pack_writer)
        except BaseException:
            self._pack_writer.discard()
            raise

    def _run(self, run: Sequence[ChunkBatch]) -> None:
        buffers = self._buffers([size for chunk_batch in run for size in chunk_batch.sizes])
        ids = b"".join(chunk for chunk_batch in run for chunk in chunk_batch.ids)
        with _reading_source():
            self._source.objects.read_into(
                ids, buffers, describe=lambda i: "on its way to a mirror"
            )
        filled = iter(buffers)
        for chunk_batch in run:
            codec = (
                codecs.SPLIT_ZSTD
                if self._packs.codec == codecs.ZSTD and chunk_batch.width > 1
                else self._packs.codec
            )
            raws = list(islice(filled, len(chunk_batch.ids)))
            self._pack_writer.add(
                chunk_batch.ids,
                raws,
                chunk_batch.width,
                TENSOR,
                codec=codec,
                run_bytes=chunk_batch.raw_bytes,
            )
        self._pack_writer.flush()

    def _buffers(self, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for chunks of `sizes`: the same for every batch, as fresh memory costs as much as
        the copy into it."""
        if sum(sizes) > len(self._memory):  # chunks may be larger than a run
            self._memory = bytearray(sum(sizes))
        memory, ends = memoryview(self._memory), list(accumulate(sizes))
        return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _metadata_kinds(document: CommitDocument) -> dict[ChunkId, int]:
    kinds = {
        chunk: kind
        for _, ref in document.trees
        for chunk, kind in ((ref.schema, SCHEMA), *((page, PAGE) for page in ref.pages))
    }
    if document.layout is not None:
        kinds[document.layout] = LAYOUT
    return kinds


def _cut(sizes: Sequence[int], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of items of at most `limit_bytes` together, or of one item."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > limit_bytes:
            yield first, i
            first, total = i, 0
        total += size
    if sizes:
        yield first, len(sizes)


def _runs(batch: Sequence[ChunkBatch]) -> Iterator[Sequence[ChunkBatch]]:
    """Small leaves together, so that each read fetches many."""
    for first, stop in _cut([chunk_batch.raw_bytes for chunk_batch in batch], RUN_BYTES):
        yield batch[first:stop]


def _batches(chunk_batch: Iterable[ChunkBatch], batch_bytes: int) -> list[list[ChunkBatch]]:
    """At least one parcel, which may be empty."""
    batches: list[list[ChunkBatch]] = [[]]
    size = 0
    for part in chunk_batch:
        if batches[-1] and size + part.raw_bytes > batch_bytes:
            batches.append([])
            size = 0
        batches[-1].append(part)
        size += part.raw_bytes
    return batches


def _rejection(plan: MirrorPlan, url: str) -> str:
    named = "; ".join(
        f"{move.name} is {str(move.previous)[:12]} there and {move.commit[:12]} here"
        for move in plan.rejected[:4]
    )
    return (
        f"tags of {url} would move, so nothing was sent: {named}; move them by --force "
        "(force=True), or leave tags out (--no-tags)"
    )
