"""How is a commit made when another library, such as DCP, assigns its parts to writers?

That library brings the writers' receipts to the publisher. The order is that of every commit:
durable packs of each writer, then metadata, document and log entry. A failure before the entry
leaves only files that no entry names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.plan import Extent, KeptPlan
from ckptstore.commit.transaction import (
    Committed,
    Destination,
    Receipt,
    Transaction,
    TreeContent,
    logical_bytes,
)
from ckptstore.core.ids import SessionId, pack_rank
from ckptstore.core.model import INLINE_BYTES, LeafContent
from ckptstore.errors import Conflict
from ckptstore.log.log import Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.state.leaf_sources import Source


class GivenPart(NamedTuple):
    """The bytes of a leaf, or of its box `extent.box`, and their source. `leaf_bytes` is the size
    of the whole leaf, `path` its path or DCP's name, if that is known.
    """

    extent: Extent
    source: Source
    leaf_bytes: int
    path: str = ""


class PartsWritten(NamedTuple):
    """The result of a writer: the content of each part, and the receipt for `publish`."""

    contents: list[LeafContent]
    receipt: list[Any]


class PartsCommitter:
    """Writes and publishes parts of commits to one store, several commits at once if asynchronous
    saves overlap. Keeps dedup hints for the next commit of the same parts.
    """

    def __init__(self, to: Destination) -> None:
        self._to = to
        # One attribute, replaced as a whole: saves that overlap each take hints of their own parts.
        self._last = KeptPlan()
        # Weak, so that saves that fail, or that another rank publishes, leave with their session.
        self._opened: WeakValueDictionary[SessionId, Session] = WeakValueDictionary()
        self._own: WeakKeyDictionary[Session, Transaction] = WeakKeyDictionary()

    def open(self) -> Session:
        """Open the session under which all writers of a commit write. Called by the publisher."""
        session = open_session(self._to.objects.storage, "commit")
        self._opened[session.id] = session
        return session

    def write(
        self, session: SessionId, rank: int, parts: Sequence[GivenPart], run: str = ""
    ) -> PartsWritten:
        """Hash `parts` and pack the chunks that the store lacks; they are durable on return. `rank`
        keeps the pack names of several writers apart. Chunks may become patches of what the newest
        commit of `run` has.
        """
        extents = [part.extent for part in parts]
        inline = tuple(i for i, part in enumerate(parts) if part.leaf_bytes <= INLINE_BYTES)
        kept = self._last = self._last.next(extents, inline, self._to.config.chunk_bytes)
        before = None
        if not kept.hints.last:
            before = self._to.before(run, (), {i: part.path for i, part in enumerate(parts)})
        with Transaction(self._to, session, rank=rank) as transaction:
            sources = [part.source for part in parts]
            ids = transaction.write(kept.plan, sources, hints=kept.hints, before=before)
            receipt = transaction.receipt()
            contents = [
                LeafContent(ids=ids[i], raw_bytes=part.source.nbytes)
                if i in ids
                else LeafContent(inline=part.source.read_all())
                for i, part in enumerate(parts)
            ]
        if opened := self._opened.get(session):
            self._own[opened] = transaction
        return PartsWritten(contents, receipt.encode())

    def publish(
        self,
        session: Session,
        label: CommitMetadata,
        trees: Sequence[TreeContent],
        layout: bytes | None,
        receipts: Sequence[Any],
        started: float,
        asked: list[SessionId],
    ) -> Committed:
        """Append the commit of what all writers have written, and close the session. A label
        without parents gets the run's newest commit. Once the log is asked to take it, its session
        is in `asked`.

        Raises `Conflict` if reused chunks were removed meanwhile: write everything again under
        another session. Raises `InvalidInput` if two writers had one rank, in one process or in
        two, so that their packs have the same names.
        """
        told = [Receipt.decode(receipt) for receipt in receipts]
        transaction = self._own.pop(session, None)
        if transaction is None:  # a publisher that has written nothing takes no writer's names
            rank = 1 + max((pack_rank(pack.id) for each in told for pack in each.packs), default=-1)
            transaction = Transaction(self._to, session.id, rank=rank)
        transaction.owns, transaction.asked = session, asked
        try:
            with transaction:
                published = transaction.publish(
                    label, trees, logical_bytes=logical_bytes(trees), layout=layout, receipts=told
                )
        except Refused as error:
            if error.refusal.again:
                raise Conflict(
                    "others changed the store while this commit was written; repeat it"
                ) from error
            raise
        return published.committed(started)
