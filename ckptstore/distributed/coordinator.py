"""How does rank 0 lead the commit of many ranks? It plans, resolves content and publishes; it alone
appends to the log.

A failure before the entry leaves only files that no entry names.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import Watch
from ckptstore.commit.transaction import Destination, Receipt, Transaction, logical_bytes
from ckptstore.core.ids import SessionId
from ckptstore.core.model import Cast
from ckptstore.core.options import Ranks
from ckptstore.core.process import uncollected
from ckptstore.distributed.assemble import (
    Assembler,
    Decided,
    Report,
    Written,
    decide,
    layout_of,
)
from ckptstore.distributed.merge import Described, RankTree, decode_description, merge
from ckptstore.distributed.plan import RanksPlan, plan_ranks
from ckptstore.distributed.rank_worker import encode_tasks
from ckptstore.errors import Conflict
from ckptstore.log.log import Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects.documents import encode_document

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
        known = Described()
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
        self._observed = [observed for _, observed in handed_in]
        with uncollected():
            reports = [{number: Report(*each) for number, each in found} for found, _ in handed_in]
            self._decided = decide(self._plan, reports)
        return self._decided.writes

    def publish(
        self,
        handed_in: Sequence[Any],
        label: CommitMetadata,
        transaction: Transaction,
        watch: Watch,
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
                watch=watch,
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
    return [label.run, label.step, [list(each) for each in label.cast], label.turn]


def _merged(label: CommitMetadata, errors: Sequence[Any]) -> Cast | None:
    if not label.cast:
        return None
    # Imported here: worker processes, which have no torch, cast nothing.
    from ckptstore.state.casting import merged

    return merged(label.cast, errors, label.unchecked)


def _check_labels(heads: Sequence[list[Any]], label: CommitMetadata) -> None:
    for rank, head in enumerate(heads):
        if head != head_of(label):
            run, step, cast, turn = head
            if turn != label.turn:
                raise Conflict(
                    f"rank {rank} brings its state of another call of commit_async than rank 0; "
                    "nothing was made of the two: begin the training anew, and resume"
                )
            if [run, step] == head_of(label)[:2]:
                raise Conflict(
                    f"rank {rank} casts {dict(cast)}, rank 0 {dict(label.cast)}; they must agree"
                )
            raise Conflict(
                f"rank {rank} commits step {step} of run {run}, rank 0 step {label.step} of run "
                f"{label.run}; they must agree"
            )
