"""A commit of which several processes write parts, while somebody else's coordinator carries the
messages between them.

`distributed` has rounds of its own; here another library has already said who writes what, and
brings each writer's receipt to the one that publishes. The order is that of every commit: packs,
durable, on each writer; then metadata, document and log entry. A failure anywhere before the entry
leaves files that no entry names.
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
from ckptstore.commit.publish import Publisher, TreeContent, entry_body
from ckptstore.commit.write import read_all, write_chunks
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import SessionId, pack_rank
from ckptstore.core.model import INLINE_BYTES, LeafContent, PackRecord
from ckptstore.distributed import framing
from ckptstore.distributed.assemble import logical_bytes
from ckptstore.distributed.commit import RanksCommitted
from ckptstore.distributed.coordinator import record_of
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NoSpace
from ckptstore.log.log import Log, Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects import canonical
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, DedupHints
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.pack_writer import delete_own
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import Source


class Part(NamedTuple):
    """The bytes of a leaf, or of the box `extent.box` of it, and where they are. `leaf_bytes` are
    those of the whole leaf."""

    extent: Extent
    source: Source
    leaf_bytes: int


@dataclass(frozen=True, slots=True)
class PartsWritten:
    """What a writer has put into packs: the content of each part, and the receipt that `publish`
    wants."""

    contents: list[LeafContent]
    receipt: bytes


class PartsCommitter:
    """Writes and publishes parts of commits to one store; of several at once, too, as asynchronous
    saves are that overlap. Remembers what the next commit of the same parts can use."""

    def __init__(
        self, config: StoreConfig, objects: ObjectStore, log: Log, threads: ThreadPool
    ) -> None:
        self._config, self._objects, self._log, self._threads = config, objects, log, threads
        self._publisher = Publisher(config, objects)
        self._extents: list[Extent] = []
        self._runs = DedupHints()
        # What ends without being published, on other ranks or by a failure, is forgotten with its
        # session.
        self._opened: WeakValueDictionary[SessionId, Session] = WeakValueDictionary()
        self._own: WeakKeyDictionary[Session, tuple[PackSet, Dedup]] = WeakKeyDictionary()

    def open(self) -> Session:
        """The session under which all writers of a commit write; for the one that will publish."""
        session = open_session(self._objects.storage, "commit")
        self._opened[session.id] = session
        return session

    def write(self, session: SessionId, rank: int, parts: Sequence[Part]) -> PartsWritten:
        """Hash `parts` and pack what the store lacks; durable when this returns. `rank` tells the
        packs of several writers apart."""
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
            with suppress(
                CkptStoreError
            ):  # what is left carries the session's name, by which gc finds it
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

        Raises `Conflict` if others have removed meanwhile what a writer reused: write everything
        again, under another session; `InvalidInput` if two writers had one number, so that the
        packs of one lie over those of the other, in one process or in two.
        """
        heads = [canonical.decode(receipt) for receipt in receipts]
        written = [record_of(each) for head in heads for each in head["packs"]]
        _check_apart(written)
        packs, dedup = (
            self._own.pop(session) if session in self._own else self._beside(session.id, written)
        )
        state = self._log.replay()
        if not label.parents:
            label = replace(label, parents=state.runs.get(label.run, ())[-1:])
        metadata = self._publisher.write_metadata(trees, dedup, packs, layout)
        packs.wait()
        own = [pack.record for pack in packs.closed]
        records = own + [record for record in written if record not in own]
        _check_apart(
            records
        )  # once more: what this process wrote under a name must be what the receipt says of it
        reused = dedup.reused.union(*(head["reused"] for head in heads))
        leaves = sum(len(tree.schema) for tree in trees)
        published = self._publisher.write_document(
            session.id, label, metadata, records, logical_bytes=logical_bytes(trees), leaves=leaves
        )
        try:
            entry = self._log.append(entry_body(published, records, reused))
        except (Refused, NoSpace) as error:
            delete_own(self._objects.storage, published.own)
            session.abandon()
            if isinstance(error, Refused) and error.refusal.again:
                raise Conflict(
                    "others changed the store while this commit was written; repeat it"
                ) from error
            raise
        durable_s = time.perf_counter() - started
        session.end()
        index_packs(self._objects, entry, packs)
        chunks, new_chunks = (
            sum(head[name] for head in heads) for name in ("chunks", "new_chunks")
        )
        packed_s = max((head["packed_ns"] / 1e9 for head in heads), default=0.0)
        document = published.document
        return RanksCommitted(
            published.commit,
            document,
            CommitStats(
                document.logical_bytes,
                document.new_bytes,
                leaves,
                chunks,
                new_chunks,
                packed_s,
                durable_s,
                durable_s,
            ),
        )

    def _look(self, extents: list[Extent]) -> Dedup:
        if extents != self._extents:
            self._extents, self._runs = extents, DedupHints()
        state = self._log.replay()
        self._objects.sync(state)
        return Dedup(self._objects, state, self._runs)

    def _beside(self, session: SessionId, written: Sequence[PackRecord]) -> tuple[PackSet, Dedup]:
        """For who publishes and has written nothing: packs with names that no writer has."""
        rank = 1 + max((pack_rank(pack.id) for pack in written), default=-1)
        return PackSet.of(self._config, self._objects, session, self._threads, rank), self._look([])


def _check_apart(packs: Sequence[PackRecord]) -> None:
    twice = [name for name, count in Counter(pack.id for pack in packs).items() if count > 1]
    if twice:
        raise InvalidInput(
            f"two writers of this commit wrote a pack {twice[0]}: each needs a rank of its own; "
            "repeat the save"
        )


def encode_contents(contents: Sequence[LeafContent]) -> bytes:
    """Contents without boxes, for a message."""
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
