"""Mirroring commits from one store to another: only chunks that the target lacks are sent, each
verified.

Commits are sent one by one, the oldest first. The target's own chunk index tells which chunks it
lacks, so the layout of packs may differ. A large commit is sent in batches. Each batch is
registered in the target's log once its packs are durable, so that a repeated push after a kill
finds them. The commit's entry comes last and makes it visible as a whole, with its tags.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckptstore.commit.transaction import ATTEMPTS, Destination, Transaction, entry_of
from ckptstore.commit.write import write_metadata
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, document_key
from ckptstore.core.model import CommitDocument, Schema
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.log import entries
from ckptstore.log.fold import Code
from ckptstore.log.log import Refused
from ckptstore.log.resolve import resolved
from ckptstore.maintenance.mirror.chunk_batches import (
    ChunkBatch,
    CopyWorker,
    DamagedMirrorSource,
    cut,
    group_batches,
    reading_source,
    runs_of,
)
from ckptstore.maintenance.mirror.plan import CommitTransfer, MirrorPlan, plan_mirror
from ckptstore.maintenance.progress import Counter, Progress, silent
from ckptstore.maintenance.tags import set_tag
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA
from ckptstore.repository import footers
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.pack_reader import read_chunks
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool, shared
from ckptstore.restore.reader import Reader, Tree
from ckptstore.storage.contract import put_finished

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a plan: chunks that the target lacks, their raw bytes, and the bytes of
    schemas, pages and layouts among them."""

    chunks: int
    raw_bytes: int
    metadata_bytes: int


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The plan and its result; a dry run has `load` instead.

    `stored_bytes` is the growth of the target's packs and documents. `damaged` are commits that the
    source could not read completely, with the reason; the others are sent.
    """

    plan: MirrorPlan
    sent: tuple[CommitId, ...] = ()
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    damaged: tuple[tuple[CommitId, str], ...] = ()
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """Options of a mirror run: send the `tags` of the commits, moved with `force`; with
    `verify`, read the written data back before a commit appears. `batch_bytes` is about the cost
    of a kill (default: a pack per thread)."""

    tags: bool = True
    force: bool = False
    verify: bool = False
    batch_bytes: int | None = None


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
    """Send `wanted`, commits of `source`, to `target`; with `dry_run` only compute the load. An
    interrupted run can be repeated without sending again what arrived.

    Raises `InvalidInput` for stores with different chunk sizes, `Conflict`, before anything is
    sent, if a tag would have to move, and `Unavailable` if either storage fails. A commit that the
    source cannot read is skipped and named in the result.
    """
    _check_alike(source, target)
    plan = plan_mirror(
        source.log.replay(), target.log.replay(), wanted, tags=options.tags, force=options.force
    )
    transfer = _Mirror(source, target, options, threads, progress)
    if dry_run:
        return replace(Mirrored(plan), load=transfer.weigh(plan))
    if plan.rejected:
        raise Conflict(_rejection(plan, target.url))
    return transfer.apply(plan)


def _check_alike(source: StoreHandle, target: StoreHandle) -> None:
    if source.storage.url == target.storage.url:
        raise InvalidInput(f"{source.url} is both source and target; name another store")
    ours, theirs = source.config.chunk_bytes, target.config.chunk_bytes
    if ours != theirs:
        raise InvalidInput(
            f"{source.url} cuts chunks of {ours} bytes and {target.url} of {theirs}, so the same "
            "commit would get another id there; "
            f"create the target by `ckptstore clone`, or by `ckptstore init --chunk-size {ours}`"
        )


class _Mirror:
    """Sends commits from `source` to `target`. Others may use both meanwhile."""

    def __init__(
        self,
        source: StoreHandle,
        target: StoreHandle,
        options: MirrorOptions,
        threads: ThreadPool,
        progress: Progress,
    ) -> None:
        self._source, self._target, self._threads = source, target, threads
        self._into = Destination(target, threads)
        self._options, self._progress = options, progress
        self._batch_bytes = (
            options.batch_bytes or target.storage.capabilities.pack_bytes * threads.count
        )
        self._from = Reader(source.config, source.objects, threads)
        self._to = Reader(target.config, target.objects, threads)
        self._schemas: dict[str, Schema] = {}

    def weigh(self, plan: MirrorPlan) -> Load:
        """The load of the plan. Reads the pages of its commits, and no tensor."""
        self._source.objects.sync(self._source.log.replay())
        dedup = self._into.look(DedupHints())
        chunks = raw_bytes = metadata_bytes = 0
        for transfer in plan.commits:
            try:
                _, document, trees = self._read(transfer)
                chunk_batch = list(self._missing_batches(trees, dedup))
                metadata = self._metadata(document)
            except DamagedMirrorSource as error:
                logger.warning(
                    "commit %s (step %s) cannot be sent: %s",
                    transfer.commit[:12],
                    transfer.step,
                    error,
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
        """Carry out `plan`, which has no rejected tags."""
        self._target.check_writable()
        self._source.objects.sync(self._source.log.replay())
        tally = _Tally()
        counter = Counter(self._progress, "commits", len(plan.commits))
        try:
            for transfer in plan.commits:
                try:
                    self._send(transfer, tally)
                except DamagedMirrorSource as error:
                    logger.warning(
                        "commit %s (step %s) was not sent: %s",
                        transfer.commit[:12],
                        transfer.step,
                        error,
                    )
                    tally.damaged.append((transfer.commit, str(error)))
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

    def _send(self, transfer: CommitTransfer, tally: _Tally) -> None:
        stored, document, trees = self._read(transfer)
        for attempt in range(ATTEMPTS):
            try:
                with Transaction.begin(self._into, DedupHints(), what="push") as transaction:
                    self._attempt(transaction, transfer, document, stored, trees, tally)
                break
            except Refused as error:
                if error.refusal.code is Code.COMMIT_KNOWN:
                    # Another process sent it meanwhile.
                    return
                if not error.refusal.again or attempt == ATTEMPTS - 1:
                    raise
        tally.sent.append(transfer.commit)
        self._schemas |= {tree.ref.schema.hex(): tree.schema for tree in trees}

    def _attempt(
        self,
        transaction: Transaction,
        transfer: CommitTransfer,
        document: CommitDocument,
        stored: bytes,
        trees: Sequence[Tree],
        tally: _Tally,
    ) -> None:
        dedup, packs = transaction.look(), transaction.packs
        *batches, last = group_batches(self._missing_batches(trees, dedup), self._batch_bytes)
        new_bytes = 0
        for batch in batches:
            new_bytes += self._register(batch, dedup, tally)
        self._copy(last, packs, tally)
        write_metadata(self._metadata(document), dedup, packs)
        self._close(packs)
        records = [pack.record for pack in packs.closed]
        new_bytes += sum(record.bytes * (2 if record.metadata else 1) for record in records)
        key = document_key(transaction.session, transfer.commit)
        own = (key,) if put_finished(self._target.storage, key, stored) else ()
        body = replace(
            entry_of(document, transfer.commit, len(stored), records, dedup.reused),
            session=transaction.session,
            tags=transfer.tags,
            new_bytes=new_bytes,
        )
        transaction.index(transaction.append(body, own, time_ns=document.time_ns))
        tally.stored_bytes += new_bytes + len(stored)

    def _register(self, batch: Sequence[ChunkBatch], dedup: Dedup, tally: _Tally) -> int:
        """Send a batch and list its packs, so that they outlive this process; returns their bytes.
        A concurrent gc may condemn them, but waits for the commit's session before it deletes them.
        """
        with Transaction.begin(self._into, DedupHints(), what="push") as transaction:
            self._copy(batch, transaction.packs, tally)
            self._close(transaction.packs)
            state = self._target.log.replay()
            records = tuple(pack.record for pack in transaction.packs.closed)
            registered = transaction.append(
                entries.Register(transaction.session, state.n, state.fence, records, frozenset())
            )
            transaction.index(registered)
        dedup.reused.update(number for number, _ in registered)
        return sum(record.bytes for record in records)

    def _read(self, transfer: CommitTransfer) -> tuple[bytes, CommitDocument, list[Tree]]:
        """The commit's document, as stored and decoded, and its trees."""
        with reading_source():
            stored = self._source.storage.read(document_key(transfer.session, transfer.commit))
            document = decode_document(stored, transfer.commit)
            return stored, document, [self._from.tree(key, ref) for key, ref in document.trees]

    def _metadata(self, document: CommitDocument) -> dict[ChunkId, tuple[bytes, int]]:
        kinds = _metadata_kinds(document)
        with reading_source():
            data = self._source.objects.read_metadata_many(list(kinds))
        return {chunk: (raw, kind) for (chunk, kind), raw in zip(kinds.items(), data, strict=True)}

    def _missing_batches(self, trees: Sequence[Tree], dedup: Dedup) -> Iterator[ChunkBatch]:
        """Batches of the trees' chunks that the target lacks, leaf by leaf."""
        for tree in trees:
            for content in tree.contents:
                if content.ids:
                    yield from self._leaf_batches(content.ids, dedup)

    def _leaf_batches(self, ids: bytes, dedup: Dedup) -> Iterator[ChunkBatch]:
        chunks = [ChunkId(ids[i : i + CHUNK_ID_BYTES]) for i in range(0, len(ids), CHUNK_ID_BYTES)]
        fresh = [chunk for chunk, new in zip(chunks, dedup.fresh(chunks), strict=True) if new]
        if not fresh:
            return
        with reading_source():
            where = self._source.objects.located(b"".join(fresh))
        sizes, width = where["raw"].tolist(), int(where["width"][0])
        for first, stop in cut(sizes, RUN_BYTES):
            yield ChunkBatch(tuple(fresh[first:stop]), tuple(sizes[first:stop]), width)

    # -- bytes --

    def _copy(self, batch: Sequence[ChunkBatch], packs: PackSet, tally: _Tally) -> None:
        """Read, verify and write; afterwards the packs are being written."""
        runs = shared(list(runs_of(batch)))
        workers = [
            CopyWorker(self._source, runs, packs)
            for _ in range(min(self._threads.count, len(batch)))
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


def _metadata_kinds(document: CommitDocument) -> dict[ChunkId, int]:
    kinds = {
        chunk: kind
        for _, ref in document.trees
        for chunk, kind in ((ref.schema, SCHEMA), *((page, PAGE) for page in ref.pages))
    }
    if document.layout is not None:
        kinds[document.layout] = LAYOUT
    return kinds


def _rejection(plan: MirrorPlan, url: str) -> str:
    named = "; ".join(
        f"{move.name} is {str(move.previous)[:12]} there and {move.commit[:12]} here"
        for move in plan.rejected[:4]
    )
    return (
        f"tags of {url} would move, so nothing was sent: {named}; move them by --force "
        "(force=True), or leave tags out (--no-tags)"
    )
