"""Mirroring commits from one store to another: only chunks that the target lacks are sent, each
verified.

Commits are sent one by one, the oldest first. The target's own chunk index tells which chunks it
lacks, so the layout of packs may differ. A large commit is sent in batches. Each batch is
registered in the target's log once its packs are durable, so that a repeated push after a kill
finds them. The commit's entry comes last and makes it visible as a whole, with its tags.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TypeAlias

from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.commit.write import write_metadata
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, CommitId, document_key, session_key
from ckptstore.core.model import CommitDocument
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.log.admission import Code, tags_free
from ckptstore.log.entries import entry_of, new_bytes_of, new_packs
from ckptstore.log.log import Refused
from ckptstore.log.resolve import resolved
from ckptstore.log.sessions import open_session
from ckptstore.maintenance import Counter, Progress, Spread, Stores, here, silent
from ckptstore.maintenance.check.trees import metadata_of
from ckptstore.maintenance.forget import set_tag
from ckptstore.maintenance.mirror_patches import LackedChunk, MirrorPatcher, find_bases
from ckptstore.maintenance.mirror_plan import CommitTransfer, MirrorPlan, plan_between
from ckptstore.maintenance.mover import (
    WORKER_THREADS,
    Writing,
    Written,
    each_written,
    fill,
    list_packs,
    memory_for,
    packs_of,
    persist,
    raw_bytes_of,
)
from ckptstore.objects import codecs
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import TENSOR
from ckptstore.plugins.signing.signatures import copy_signatures
from ckptstore.repository import footers
from ckptstore.repository.chunk_reader import cut, read_chunks
from ckptstore.repository.dedup import Dedup, items_of
from ckptstore.repository.pack_writer import PackSet, PackWriter, new_chunk
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import Scratch, ThreadPool, shared
from ckptstore.restore.reader import Reader, Tree

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a plan: chunks that the target lacks, their raw bytes, and the bytes of
    schemas, pages and layouts among them."""

    chunks: int
    raw_bytes: int
    metadata_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Mirrored:
    """The plan and its result; a dry run has `load` instead.

    `stored_bytes` is the growth of the target's packs and documents. `damaged` are commits that the
    source could not read completely, with the reason; the others are sent, but for those that were
    forgotten meanwhile.
    """

    plan: MirrorPlan
    sent: tuple[CommitId, ...] = ()
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    damaged: tuple[tuple[CommitId, str], ...] = ()
    load: Load | None = None

    def __repr__(self) -> str:
        return f"<mirror: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        plan, load = self.plan, self.load
        if load is not None:
            size = bytes_text(load.raw_bytes + load.metadata_bytes)
            commits, chunks = count_text(len(plan.commits), "commit"), load.chunks
            lines = [f"would send {commits}: {count_text(chunks, 'chunk')}, {size} before encoding"]
        else:
            commits, chunks = count_text(len(self.sent), "commit"), self.chunks
            stored = bytes_text(self.stored_bytes)
            lines = [f"sent {commits}: {count_text(chunks, 'chunk')}, {stored} stored"]
        if plan.present:
            lines.append(f"{count_text(plan.present, 'commit')} already there")
        lines += (f"tag {move}" for move in plan.tags)
        return "\n".join(lines)

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody must look at."""
        forgotten = count_text(len(self.plan.forgotten), "commit")
        undelete = "`ckptstore undelete` brings them back"
        return (
            *(f"tag {move}: it moves by --force only" for move in self.plan.rejected),
            *([f"{forgotten} forgotten there stay so; {undelete}"] if self.plan.forgotten else []),
            *(f"commit {commit[:12]} was not sent: {why}" for commit, why in self.plan.pinned),
            *(f"commit {commit[:12]} was not sent: {why}" for commit, why in self.damaged),
        )


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """Options of a mirror run: send the `tags` of the commits, moved with `force`; with
    `verify`, read the written data back before a commit appears. `batch_bytes` is about the cost
    of a kill (default: a pack per thread). `holds` sends the tags of hollow directories, too."""

    tags: bool = True
    force: bool = False
    verify: bool = False
    batch_bytes: int | None = None
    holds: bool = False


Batch: TypeAlias = Sequence[LackedChunk]
"""Consecutive chunks of one leaf, at most `RUN_BYTES` of them."""


class DamagedMirrorSource(Exception):
    """The source cannot read what a commit needs; the message says why."""


@contextmanager
def reading_source() -> Iterator[None]:
    """Attribute damage found in the block to the source, not the target."""
    try:
        yield
    except (Corrupt, NotFound) as error:
        raise DamagedMirrorSource(str(error)) from error


def mirror(
    source: StoreHandle,
    target: StoreHandle,
    wanted: Collection[CommitId],
    options: MirrorOptions,
    threads: ThreadPool,
    *,
    dry_run: bool = False,
    progress: Progress = silent,
    spread: Spread[Stores] | None = None,
) -> Mirrored:
    """Send `wanted`, commits of `source`, to `target`; with `dry_run` only compute the load. An
    interrupted run can be repeated without sending again what arrived. `spread` copies chunks, by
    default `threads`.

    Raises `InvalidInput` for stores with different chunk sizes, `Conflict` if a tag would have to
    move, before anything is sent unless the tag is set meanwhile, and `Unavailable` if either
    storage fails. A commit that the source cannot read is skipped and named in the result.
    """
    _check_alike(source, target)
    asked = {"tags": options.tags, "force": options.force, "holds": options.holds}
    plan = plan_between(source, target, wanted, **asked)
    run = _Mirror(source, target, options, threads, progress, plan, spread)
    if dry_run:
        return Mirrored(plan, load=run.weigh())
    if plan.rejected:
        raise Conflict(_rejection(plan, target.url))
    return run.apply()


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


def _check_apart(source: StoreHandle, target: StoreHandle) -> None:
    """Raise `InvalidInput` for two ways to one place, such as a link or a second mount: whoever
    deletes here what the mirror has would delete it there. Copies of a store share its id, but not
    the file of a session."""
    if source.config.store != target.config.store:
        return
    session = open_session(target.storage, "push")
    try:
        if source.storage.size(session_key(session.id)) is not None:
            raise InvalidInput(
                f"{source.url} and {target.url} lead to the same store; name another one"
            )
    finally:
        session.end()


class _Mirror:
    """Sends commits from `source` to `target`. Others may use both meanwhile."""

    def __init__(
        self,
        source: StoreHandle,
        target: StoreHandle,
        options: MirrorOptions,
        threads: ThreadPool,
        progress: Progress,
        plan: MirrorPlan,
        spread: Spread[Stores] | None,
    ) -> None:
        self._source, self._target, self._threads = source, target, threads
        self._into = Destination(target, threads)
        self._options, self._progress, self._engine = options, progress, spread
        writers = WORKER_THREADS if spread else threads.count
        self._batch_bytes = options.batch_bytes or target.storage.capabilities.pack_bytes * writers
        self._from = Reader(source.config, source.objects, threads)
        self._to = Reader(target.config, target.objects, threads)
        self._done = Mirrored(plan)

    def weigh(self) -> Load:
        """The load of the plan. Reads the pages of its commits, and no tensor."""
        self._source.objects.sync(self._source.log.replay())
        dedup = self._into.look()
        chunks = raw_bytes = metadata_bytes = 0
        for transfer in self._done.plan.commits:
            try:
                _, document, trees = self._read(transfer)
                lacked = list(chain.from_iterable(self._missing_batches(trees, dedup)))
                metadata = self._metadata(document)
            except DamagedMirrorSource as error:
                self._skip(transfer, error)
                continue
            fresh = [len(metadata[chunk][0]) for chunk in dedup.fresh(metadata)]
            chunks += len(lacked) + len(fresh)
            raw_bytes += raw_bytes_of(lacked)
            metadata_bytes += sum(fresh)
        return Load(chunks, raw_bytes, metadata_bytes)

    def apply(self) -> Mirrored:
        """Carry out the plan, which has no rejected tags."""
        self._target.check_writable()
        _check_apart(self._source, self._target)
        self._source.objects.sync(self._source.log.replay())
        plan = self._done.plan
        counter = Counter(self._progress, "commits", len(plan.commits))
        try:
            for transfer in plan.commits:
                try:
                    self._send(transfer)
                except DamagedMirrorSource as error:
                    self._skip(transfer, error)
                counter.add()
            self._sign()
            for move in plan.tags:
                self._tag(move.tag, move.commit)
        finally:
            self._target.follow()
        return self._done

    def _sign(self) -> None:
        """Copy the signatures of commits that both stores have now, also those made since."""
        there = self._target.log.replay().commits
        copy_signatures(self._source.storage, self._target.storage, there)

    def _tag(self, tag: str, commit: CommitId) -> None:
        there = resolved(self._target.log.replay(), commit)
        set_tag(self._target, self._to, tag, there, move=self._options.force)

    def _skip(self, transfer: CommitTransfer, error: DamagedMirrorSource) -> None:
        """A commit that cannot be read is damaged, unless it was forgotten or thinned meanwhile:
        then a gc may have deleted it."""
        row = self._source.log.replay().commits.get(transfer.commit)
        if row is None or row.soft:
            logger.info("commit %s is gone or thinned meanwhile; not sent", transfer.commit[:12])
            return
        logger.warning(
            "commit %s (step %s) cannot be sent: %s", transfer.commit[:12], transfer.step, error
        )
        damaged = (*self._done.damaged, (transfer.commit, str(error)))
        self._done = replace(self._done, damaged=damaged)

    # -- one commit --

    def _send(self, transfer: CommitTransfer) -> None:
        stored, document, trees = self._read(transfer)
        try:
            persist(self._target, lambda: self._attempt(transfer, document, stored, trees))
        except Refused as error:
            if error.refusal.code is not Code.COMMIT_KNOWN:
                raise
            # Another process sent it meanwhile, perhaps with other tags.
            for tag in transfer.tags:
                self._tag(tag, transfer.commit)
            return
        self._done = replace(self._done, sent=(*self._done.sent, transfer.commit))

    def _attempt(
        self,
        transfer: CommitTransfer,
        document: CommitDocument,
        stored: bytes,
        trees: Sequence[Tree],
    ) -> None:
        """Send what the target lacks of a commit, and append its entry."""
        with Transaction.begin(self._into, what="push") as transaction:
            dedup, packs = transaction.look(), transaction.packs
            missing = list(self._missing_batches(trees, dedup))
            bases = find_bases(self._source, transfer, trees, missing)
            sends = list(self._sends(missing, bases, dedup))
            last = [] if self._engine else sends[-1:]
            new_bytes = self._register(sends[: len(sends) - len(last)], dedup)
            for each in last:
                copy_chunks(self._source, self._target, self._threads, dedup, packs, each)
            self._count(missing)
            write_metadata(self._metadata(document), dedup, packs)
            packs.wait()
            if self._options.verify:
                read_back(self._target, packs)
            records = [pack.record for pack in packs.closed]
            new_bytes += sum(record.stored_bytes for record in records)
            replaces, state = transfer.replaces, self._target.log.state
            # A place in the history has what the target grew by for all commits that had it.
            old = state.commits.get(replaces) if replaces else None
            old_bytes = new_bytes_of(self._target.log.entry(old.n)) if old else 0
            body = replace(
                entry_of(
                    document, transfer.commit, len(stored), records, dedup.reused, replaces=replaces
                ),
                session=transaction.session,
                parents=tuple(
                    named if state.in_place_of(named) in state.commits else there
                    for named, there in zip(document.parents, transfer.parents, strict=True)
                ),
                tags=transfer.tags,
                new_bytes=old_bytes + new_bytes,
            )
            # A commit that takes another's place has its time; the entry says when that one went.
            time_ns = None if replaces else document.time_ns
            demand = None if self._options.force else tags_free(transfer.tags, transfer.commit)
            entry = transaction.append(body, stored, time_ns=time_ns, demand=demand)
            transaction.index(new_packs(entry))
            stored_bytes = self._done.stored_bytes + new_bytes + len(stored)
            self._done = replace(self._done, stored_bytes=stored_bytes)

    def _sends(
        self, missing: Sequence[Batch], bases: Mapping[ChunkId, ChunkId], dedup: Dedup
    ) -> Iterator["Send"]:
        """The batches, each with its bases. Another host does not know which packs of the target
        this one distrusts."""
        held = dedup.held(b"".join(set(bases.values())))
        sound = {c: b for c, b in bases.items() if b in held and not dedup.is_distrusted(c)}
        for batches in cut(missing, raw_bytes_of, self._batch_bytes):
            its = {c.id: sound[c.id] for batch in batches for c in batch if c.id in sound}
            yield Send(batches, its, self._options.verify)

    def _register(self, sends: Sequence["Send"], dedup: Dedup) -> int:
        """Send batches and list their packs, so that they outlive this process; returns their
        bytes. A concurrent gc may condemn them, and the packs of their bases, but waits for the
        commit's session before it deletes them."""
        spread = self._engine or here((self._source, self._target), self._threads)
        nbytes = 0
        with closing(each_written(self._into, "push", spread, send, sends)) as done:
            for _, reused, transaction in done:
                with transaction:
                    records = list_packs(self._target.log, transaction)
                dedup.reuse(reused)
                dedup.reuse(record.number for record in records)
                nbytes += sum(record.bytes for record in records)
        return nbytes

    def _read(self, transfer: CommitTransfer) -> tuple[bytes, CommitDocument, list[Tree]]:
        """The commit's document, as stored and decoded, and its trees."""
        with reading_source():
            stored = self._source.storage.read(document_key(transfer.session, transfer.commit))
            document = decode_document(stored, transfer.commit)
            return stored, document, list(self._from.trees(document.trees).values())

    def _metadata(self, document: CommitDocument) -> dict[ChunkId, tuple[bytes, int]]:
        kinds = metadata_of(document)
        with reading_source():
            data = self._source.objects.read_metadata_many(kinds)
        return {chunk: (data[chunk], kind) for chunk, kind in kinds.items()}

    def _missing_batches(self, trees: Sequence[Tree], dedup: Dedup) -> Iterator[Batch]:
        """Batches of the trees' chunks that the target lacks, leaf by leaf; looked up together."""
        leaf_of: dict[bytes, int] = {}
        for n, content in enumerate(content for tree in trees for content in tree.contents):
            for chunk in items_of(content.ids):
                leaf_of.setdefault(chunk, n)
        fresh = dedup.fresh(map(ChunkId, leaf_of))
        with reading_source():
            where = self._source.objects.located(b"".join(fresh))
        lacked = [LackedChunk(*row) for row in where[["chunk", "raw", "width", "codec"]].tolist()]
        for _, leaf in groupby(lacked, key=lambda chunk: leaf_of[chunk.id]):
            yield from cut(list(leaf), lambda chunk: chunk.raw_bytes, RUN_BYTES)

    def _count(self, batches: Sequence[Batch]) -> None:
        chunks = list(chain.from_iterable(batches))
        self._done = replace(
            self._done,
            chunks=self._done.chunks + len(chunks),
            raw_bytes=self._done.raw_bytes + raw_bytes_of(chunks),
        )


# -- bytes --


@dataclass(frozen=True, slots=True)
class Send:
    """Chunks to copy, the chunks of the target that some may be patches of, and whether to read the
    packs back."""

    batches: Sequence[Batch]
    bases: Mapping[ChunkId, ChunkId]
    verify: bool


def send(stores: Stores, threads: ThreadPool, given: Writing[Send]) -> Written[frozenset[int]]:
    """Copy chunks into new packs; the result are the packs that patches there rely on."""
    (source, target), what = stores, given.item
    source.objects.sync(source.log.state)
    dedup = Dedup(target.objects, target.log.state)
    if what.bases:
        dedup = Destination(target, threads).look()
    with packs_of(target, threads, given.session) as packs:
        copy_chunks(source, target, threads, dedup, packs, what)
        packs.wait()
        if what.verify:
            read_back(target, packs)
    return Written(tuple(packs.closed), frozenset(dedup.reused))


def copy_chunks(
    source: StoreHandle,
    target: StoreHandle,
    threads: ThreadPool,
    dedup: Dedup,
    packs: PackSet,
    what: Send,
) -> None:
    """Read, verify and write; afterwards the packs are being written."""
    patcher = MirrorPatcher(source, target, dedup, what.bases)
    # Small leaves are grouped, so that each read fetches many.
    runs = shared(cut(what.batches, raw_bytes_of, RUN_BYTES))

    def copy_runs() -> None:
        scratch = Scratch()
        with packs.writing() as writer:
            for run in runs:
                chunks = list(chain.from_iterable(run))
                with memory_for(chunks, scratch) as rows, patcher.olds(chunks, scratch) as olds:
                    with reading_source():
                        why = "being sent to a mirror"
                        fill(source.objects, rows, why, verify_ids=True, bases=olds)
                    made = patcher.make(rows, olds)
                    raws = {chunk.id: raw for chunk, raw in rows if chunk.id not in made}
                    _add_whole(writer, run, raws, packs.codec)
                    if made:
                        writer.add_patches(list(made.values()))
                    writer.flush()

    threads.together([copy_runs] * min(threads.count, len(what.batches)), runs.stop)


def read_back(target: StoreHandle, packs: PackSet) -> None:
    """Read durable packs, and verify what they have."""
    for record in (pack.record for pack in packs.closed):
        for _ in read_chunks(target.storage, record, footers.read_table(target.storage, record)):
            pass


def _add_whole(
    writer: PackWriter, batches: Iterable[Batch], raws: Mapping[ChunkId, memoryview], codec: int
) -> None:
    """Queue those chunks of batches that `raws` has, encoded as the target is set to."""
    for batch in batches:
        width = batch[0].width
        if whole := [chunk for chunk in batch if chunk.id in raws]:
            writer.add(
                [new_chunk(chunk.id, raws[chunk.id]) for chunk in whole],
                width,
                TENSOR,
                codec=codecs.SPLIT_ZSTD if codec == codecs.ZSTD and width > 1 else codec,
                run_bytes=raw_bytes_of(whole),
            )


def _rejection(plan: MirrorPlan, url: str) -> str:
    named = "; ".join(map(str, plan.rejected[:4]))
    return (
        f"tags of {url} would move, so nothing was sent: {named}; move them by --force "
        "(force=True), or leave tags out (--no-tags)"
    )
