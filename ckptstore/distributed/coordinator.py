"""How is a commit of several processes published, by rank 0 or by another library's coordinator?

The coordinator of ranks plans, resolves content and publishes; it alone appends to the log. Where
another library, such as DCP, assigns the writers, it brings their receipts to a publisher
(`PartsCommitter`). The order is that of every commit: durable packs on each writer, then metadata,
document and log entry. A failure before the entry leaves only files that no entry names.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.plan import Extent, plan_chunks
from ckptstore.commit.transaction import Committed, Destination, Receipt, Transaction, TreeContent
from ckptstore.core.ids import SessionId, pack_rank
from ckptstore.core.model import INLINE_BYTES, Cast, LeafContent, Schema
from ckptstore.core.options import Ranks
from ckptstore.core.process import uncollected
from ckptstore.distributed.assemble import (
    Assembler,
    Decided,
    Report,
    Written,
    decide,
    layout_of,
    logical_bytes,
)
from ckptstore.distributed.merge import RankTree, decode_description, merge
from ckptstore.distributed.plan import RanksPlan, plan_ranks
from ckptstore.distributed.rank_worker import encode_tasks
from ckptstore.errors import Conflict
from ckptstore.log.log import Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects.documents import encode_document
from ckptstore.repository.dedup import DedupHints
from ckptstore.state.leaf_sources import Source

SAME, PLANNED, DESCRIBE = "same", "planned", "describe"
"""Answers of the first round: repeat the last task; follow this task; the digest is unknown, send
the description.
"""

DONE, AGAIN, REFUSED = "done", "again", "refused"
"""Answers of the last round: committed; write the removed chunks again; refused, with the reason.
"""


class Coordinator:
    """The coordinator of one store's commits. Keeps the last plan, which holds while every rank's
    description stays the same.
    """

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._described: list[bytes] = []
        self._descriptions: list[list[RankTree]] = []
        self._options: tuple[bool, bool, int] | None = None
        self._plan = RanksPlan([])
        self._assembler = Assembler(self._plan)
        self._layout = b""
        self._decided = Decided()
        self._observed: list[bytes] = []
        self.session: Session | None = None

    def plan(
        self,
        handed_in: Sequence[Any],
        label: CommitMetadata,
        ranks: Ranks,
        window_bytes: int,
    ) -> list[Any]:
        """Answer the ranks' descriptions."""
        _check_labels([head for head, _, _ in handed_in], label)
        digests = [found for _, found, _ in handed_in]
        full = [description for _, _, description in handed_in]
        if not all(full) and digests != self._described:
            return [(DESCRIBE, "", b"")] * len(handed_in)
        session = self._open_session()
        # A rank that sends its description has no task: it has a new store object, or a rank could
        # not follow the plan.
        options = ranks.canonical, ranks.trust_replicated, window_bytes
        known = digests == self._described and options == self._options
        if known and not any(full):
            return [(SAME, session, b"")] * len(handed_in)
        with uncollected():
            tasks = self._tasks(digests, full, *options)
        return [(PLANNED, session, task) for task in tasks]

    def _tasks(
        self,
        digests: list[bytes],
        full: Sequence[bytes],
        canonical: bool,
        trust_replicated: bool,
        window_bytes: int,
    ) -> list[bytes]:
        """Make a new plan. `full` are the ranks' descriptions; an empty one means that the last
        plan's still holds.
        """
        known: dict[bytes, Schema] = {}
        descriptions = self._descriptions
        if digests != self._described:
            descriptions = [decode_description(each, known) for each in full]
        self._described = []
        size = len(full)
        self._plan = plan_ranks(
            merge(descriptions),
            size,
            self._to.config.chunk_bytes,
            canonical=canonical,
            window_bytes=window_bytes,
        )
        self._assembler = Assembler(self._plan)
        self._layout = layout_of(self._plan, size)
        keys = [[tree.key for tree in trees] for trees in descriptions]
        tasks = encode_tasks(self._plan, keys, trust_replicated=trust_replicated)
        self._described, self._descriptions = digests, descriptions
        self._options = canonical, trust_replicated, window_bytes
        return tasks

    def decide(self, handed_in: Sequence[Any]) -> list[Any]:
        """Answer the ranks' reports with the chunks that each rank still has to write."""
        reports = [{number: Report(*each) for number, each in found} for found, _ in handed_in]
        self._observed = [observed for _, observed in handed_in]
        self._decided = decide(self._plan, reports)
        return self._decided.writes

    def publish(
        self, handed_in: Sequence[Any], label: CommitMetadata, transaction: Transaction
    ) -> list[Any]:
        """Append the commit of what ranks have written; returns the outcome for each rank.

        An error is raised only before the append, or if its outcome is unknown; in the second case
        nothing may be deleted.
        """
        receipts = [Receipt.decode(receipt) for receipt, _, _ in handed_in]
        written = [Written(*each) for _, each, _ in handed_in]
        errors = [each for _, _, each in handed_in]
        with uncollected():
            trees = self._assembler.assemble(self._decided, written, self._observed)
        try:
            published = transaction.publish(
                label,
                trees,
                logical_bytes=logical_bytes(trees),
                layout=self._layout,
                receipts=receipts,
                cast=partial(_merged, label, errors),
            )
        except Refused as error:
            self.close(ended=False)
            if not error.refusal.again:
                raise
            return [(AGAIN, self._open_session())] * len(handed_in)
        _, stored = encode_document(published.document)
        packs = [list(pack) for pack in published.packs]
        answer = published.commit, stored, packs, published.chunks, published.new_chunks
        return [(DONE, answer)] * len(handed_in)

    def close(self, *, ended: bool) -> None:
        """Close the session."""
        session, self.session = self.session, None
        if session is not None:
            session.end() if ended else session.abandon()

    def _open_session(self) -> SessionId:
        self.close(ended=False)
        self.session = open_session(self._to.objects.storage, "commit")
        return self.session.id


def head_of(label: CommitMetadata) -> list[Any]:
    """The metadata that all ranks must agree on."""
    return [label.run, label.step, [list(each) for each in label.cast]]


def _merged(label: CommitMetadata, errors: Sequence[Any]) -> Cast | None:
    if not label.cast:
        return None
    # Imported here: worker processes, which have no torch, cast nothing.
    from ckptstore.state.casting import merged

    return merged(label.cast, errors, label.unchecked)


def _check_labels(heads: Sequence[list[Any]], label: CommitMetadata) -> None:
    for rank, head in enumerate(heads):
        if head != head_of(label):
            run, step, cast = head
            if [run, step] == head_of(label)[:2]:
                raise Conflict(
                    f"rank {rank} casts {dict(cast)}, rank 0 {dict(label.cast)}; they must agree"
                )
            raise Conflict(
                f"rank {rank} commits step {step} of run {run}, rank 0 step {label.step} of run "
                f"{label.run}; they must agree"
            )


class Part(NamedTuple):
    """The bytes of a leaf, or of its box `extent.box`, and their source. `leaf_bytes` is the size
    of the whole leaf.
    """

    extent: Extent
    source: Source
    leaf_bytes: int


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
        self._last: tuple[list[Extent], DedupHints] = [], DedupHints()
        # Weak, so that saves that fail, or that another rank publishes, leave with their session.
        self._opened: WeakValueDictionary[SessionId, Session] = WeakValueDictionary()
        self._own: WeakKeyDictionary[Session, Transaction] = WeakKeyDictionary()

    def open(self) -> Session:
        """Open the session under which all writers of a commit write. Called by the publisher."""
        session = open_session(self._to.objects.storage, "commit")
        self._opened[session.id] = session
        return session

    def write(self, session: SessionId, rank: int, parts: Sequence[Part]) -> PartsWritten:
        """Hash `parts` and pack the chunks that the store lacks; they are durable on return. `rank`
        keeps the pack names of several writers apart.
        """
        extents = [part.extent for part in parts]
        known, hints = self._last
        if extents != known:
            hints = DedupHints()
            self._last = extents, hints
        chunked = [i for i, part in enumerate(parts) if part.leaf_bytes > INLINE_BYTES]
        plan = plan_chunks([extents[i] for i in chunked], self._to.config.chunk_bytes)
        with Transaction(self._to, session, rank=rank) as transaction:
            sources = [parts[i].source for i in chunked]
            found = transaction.write(plan, sources, hints=hints)
            receipt = transaction.receipt()
            ids = {i: found[number] for number, i in enumerate(chunked)}
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
    ) -> Committed:
        """Append the commit of what all writers have written, and close the session. A label
        without parents gets the run's newest commit.

        Raises `Conflict` if reused chunks were removed meanwhile: write everything again under
        another session. Raises `InvalidInput` if two writers had one rank, in one process or in
        two, so that their packs have the same names.
        """
        told = [Receipt.decode(receipt) for receipt in receipts]
        transaction = self._own.pop(session, None)
        if transaction is None:  # a publisher that has written nothing takes no writer's names
            rank = 1 + max((pack_rank(pack.id) for each in told for pack in each.packs), default=-1)
            transaction = Transaction(self._to, session.id, rank=rank)
        transaction.owns = session
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
