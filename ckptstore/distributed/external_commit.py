"""How do several processes write parts of one commit that another library coordinates?

`distributed.commit` has rounds of its own. Here another library, such as DCP, assigns the writers
and brings their receipts to the publisher. The order is that of every commit: durable packs on each
writer, then metadata, document and log entry. A failure before the entry leaves only files that no
entry names.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from ckptstore.commit.commit import CommitStats, index_packs
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.plan import Extent, plan_chunks
from ckptstore.commit.publish import Published, Publisher, TreeContent, entry_body
from ckptstore.commit.write import read_all, write_chunks
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import SessionId, pack_rank
from ckptstore.core.model import INLINE_BYTES, LeafContent, PackRecord
from ckptstore.distributed import framing
from ckptstore.distributed.assemble import logical_bytes
from ckptstore.distributed.commit import RanksCommitted
from ckptstore.distributed.coordinator import record_of
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NoSpace
from ckptstore.log.entries import Commit as CommitBody
from ckptstore.log.entries import Entry
from ckptstore.log.log import Log, Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects import canonical
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.pack_writer import PackSet, delete_own
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import Source


class Part(NamedTuple):
    """The bytes of a leaf, or of its box `extent.box`, and their source. `leaf_bytes` is the size
    of the whole leaf.
    """

    extent: Extent
    source: Source
    leaf_bytes: int


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """The result of a writer: the content of each part, and the receipt for `publish`."""

    contents: list[LeafContent]
    receipt: bytes


class PartsCommitter:
    """Writes and publishes parts of commits to one store, several commits at once if asynchronous
    saves overlap. Keeps dedup hints for the next commit of the same parts.
    """

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, log: Log, threads: ThreadPool
    ) -> None:
        self._config, self._objects, self._log, self._threads = config, objects, log, threads
        self._publisher = Publisher(config, objects)
        self._extents: list[Extent] = []
        self._runs = DedupHints()
        # Weak, so that saves that fail, or that another rank publishes, leave with their session.
        self._opened: WeakValueDictionary[SessionId, Session] = WeakValueDictionary()
        self._own: WeakKeyDictionary[Session, tuple[PackSet, Dedup]] = WeakKeyDictionary()

    def open(self) -> Session:
        """Open the session under which all writers of a commit write. Called by the publisher."""
        session = open_session(self._objects.storage, "commit")
        self._opened[session.id] = session
        return session

    def write(self, session: SessionId, rank: int, parts: Sequence[Part]) -> PartsWritten:
        """Hash `parts` and pack the chunks that the store lacks; they are durable on return. `rank`
        keeps the pack names of several writers apart.
        """
        started = time.perf_counter()
        packs = PackSet.of(self._config, self._objects, session, self._threads, rank)
        dedup = self._look([part.extent for part in parts])
        chunked = [i for i, part in enumerate(parts) if part.leaf_bytes > INLINE_BYTES]
        try:
            plan = plan_chunks([parts[i].extent for i in chunked], self._config.chunk_bytes)
            written = write_chunks(
                plan, [parts[i].source for i in chunked], dedup, packs, self._threads
            )
            packs.wait()
            ids = {i: written.ids[number] for number, i in enumerate(chunked)}
            contents = [
                LeafContent(ids=ids[i], raw_bytes=part.source.nbytes)
                if i in ids
                else LeafContent(inline=read_all(part.source))
                for i, part in enumerate(parts)
            ]
        except BaseException:
            with suppress(CkptStoreError):  # gc finds leftovers by the session's name
                packs.drop()
            raise
        if opened := self._opened.get(session):
            self._own[opened] = packs, dedup
        head = {
            "packs": [
                [pack.record.id, pack.record.bytes, pack.record.chunks] for pack in packs.closed
            ],
            "reused": sorted(dedup.reused),
            "chunks": written.chunks,
            "new_chunks": written.new_chunks,
            "packed_ns": int((time.perf_counter() - started) * 1e9),
        }
        return PartsWritten(contents, canonical.encode(head))

    def publish(
        self,
        session: Session,
        label: CommitMetadata,
        trees: Sequence[TreeContent],
        layout: bytes | None,
        receipts: Sequence[bytes],
        started: float,
    ) -> RanksCommitted:
        """Append the commit of what all writers have written, and end the session. A label without
        parents gets the run's newest commit.

        Raises `Conflict` if reused chunks were removed meanwhile: write everything again under
        another session. Raises `InvalidInput` if two writers had one rank, in one process or in
        two, so that their packs have the same names.
        """
        heads = [canonical.decode(receipt) for receipt in receipts]
        written = [record_of(each) for head in heads for each in head["packs"]]
        _check_distinct(written)
        packs, dedup = (
            self._own.pop(session)
            if session in self._own
            else self._publisher_packs(session.id, written)
        )
        if not label.parents:
            tip = self._log.replay().runs.get(label.run, ())[-1:]
            label = replace(label, parents=tip)
        metadata = self._publisher.write_metadata(trees, dedup, packs, layout)
        packs.wait()
        own = [pack.record for pack in packs.closed]
        records = own + [record for record in written if record not in own]
        # again: this process' packs must match the receipts' records of the same name
        _check_distinct(records)
        reused = dedup.reused.union(*(head["reused"] for head in heads))
        leaves = sum(len(tree.schema) for tree in trees)
        published = self._publisher.write_document(
            session.id, label, metadata, records, logical_bytes=logical_bytes(trees), leaves=leaves
        )
        entry = self._append(session, published, entry_body(published, records, reused))
        durable_s = time.perf_counter() - started
        session.end()
        index_packs(self._objects, entry, packs)
        document = published.document
        stats = CommitStats(
            document.logical_bytes,
            document.new_bytes,
            leaves,
            sum(head["chunks"] for head in heads),
            sum(head["new_chunks"] for head in heads),
            max((head["packed_ns"] / 1e9 for head in heads), default=0.0),
            durable_s,
            durable_s,
        )
        return RanksCommitted(published.commit, document, stats)

    def _append(self, session: Session, published: Published, body: CommitBody) -> Entry:
        """Append the entry. After a refusal, delete this process' packs and abandon the session."""
        try:
            return self._log.append(body)
        except (Refused, NoSpace) as error:
            delete_own(self._objects.storage, published.own)
            session.abandon()
            if isinstance(error, Refused) and error.refusal.again:
                raise Conflict(
                    "others changed the store while this commit was written; repeat it"
                ) from error
            raise

    def _look(self, extents: list[Extent]) -> Dedup:
        if extents != self._extents:
            self._extents, self._runs = extents, DedupHints()
        state = self._log.replay()
        self._objects.sync(state)
        return Dedup(self._objects, state, self._runs)

    def _publisher_packs(
        self, session: SessionId, written: Sequence[PackRecord]
    ) -> tuple[PackSet, Dedup]:
        """Packs of a publisher that has written no part, under names that no writer uses."""
        rank = 1 + max((pack_rank(pack.id) for pack in written), default=-1)
        return PackSet.of(self._config, self._objects, session, self._threads, rank), self._look([])


def _check_distinct(packs: Sequence[PackRecord]) -> None:
    twice = [name for name, count in Counter(pack.id for pack in packs).items() if count > 1]
    if twice:
        raise InvalidInput(
            f"two writers of this commit wrote a pack {twice[0]}: each needs a rank of its own; "
            "repeat the save"
        )


def encode_contents(contents: Sequence[LeafContent]) -> bytes:
    """Contents without boxes, as one message."""
    heads = canonical.encode(
        [content.raw_bytes if content.inline is None else None for content in contents]
    )
    return framing.join(
        [
            heads,
            *(content.ids if content.inline is None else content.inline for content in contents),
        ]
    )


def decode_contents(data: bytes, count: int) -> list[LeafContent]:
    """The inverse of `encode_contents`; raises `Corrupt`."""
    heads, *parts = framing.split(data, count + 1)
    return [
        LeafContent(inline=part)
        if raw_bytes is None
        else LeafContent(ids=part, raw_bytes=raw_bytes)
        for raw_bytes, part in zip(canonical.decode(heads), parts, strict=True)
    ]
