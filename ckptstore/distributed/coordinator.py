"""What does the coordinator do for a commit of many ranks? It plans, resolves content and
publishes. It alone appends to the log.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.publish import Metadata, Published, Publisher, entry_body
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import SessionId, digest, parse_pack_id
from ckptstore.core.model import PackRecord, Schema
from ckptstore.core.process import uncollected
from ckptstore.distributed import framing
from ckptstore.distributed.assemble import Assembler, Observation, Receipt, layout_of, logical_bytes
from ckptstore.distributed.describe import RankTree, decode_description, decode_reports, split_ids
from ckptstore.distributed.framing import cause_of
from ckptstore.distributed.merge import merge
from ckptstore.distributed.plan import RanksPlan, Shared, plan_ranks
from ckptstore.distributed.rank_plan import encode_tasks
from ckptstore.distributed.resolve_content import Decided, decide
from ckptstore.errors import Conflict, Corrupt, NoSpace
from ckptstore.log import entries
from ckptstore.log.log import Log, Refused
from ckptstore.log.sessions import Session, open_session
from ckptstore.objects import canonical
from ckptstore.objects.documents import encode_document
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup
from ckptstore.repository.memory_budget import WINDOW_BYTES
from ckptstore.repository.pack_set import PackSet
from ckptstore.repository.pack_writer import delete_own

SAME, PLANNED, DESCRIBE = b"same", b"planned", b"describe"
"""Answers of the first round: repeat the last task; follow this task; the digest is unknown, send
the description.
"""

DONE, AGAIN, REFUSED = b"done", b"again", b"refused"
"""Answers of the last round: committed; write the removed chunks again; refused, with the reason.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """How ranks commit. The coordinator's options count."""

    canonical: bool = True
    trust_replicated: bool = True
    window_bytes: int = WINDOW_BYTES


class Coordinator:
    """The coordinator of one store's commits. Keeps the last plan, which holds while every rank's
    description stays the same.
    """

    def __init__(self, config: StoreConfig, objects: ObjectStore, log: Log) -> None:
        self._config, self._objects, self._log = config, objects, log
        self._publisher = Publisher(config, objects)
        self._described: list[bytes] = []
        self._descriptions: list[list[RankTree]] = []
        self._options: Options | None = None
        self._plan = RanksPlan([])
        self._assembler = Assembler(self._plan)
        self._layout = b""
        self._decided = Decided()
        self._sightings: list[Observation] = []
        self.session: Session | None = None
        self.asked = False
        """Whether an append was sent to the log and its answer is unknown."""

    def plan(
        self, handed_in: Sequence[bytes], label: CommitMetadata, options: Options
    ) -> list[bytes]:
        """Answer the ranks' descriptions."""
        messages = [framing.split(each, 3) for each in handed_in]
        _check_labels([head for head, _, _ in messages], label)
        digests = [found for _, found, _ in messages]
        full = [description for _, _, description in messages]
        if not all(full) and digests != self._described:
            return [framing.join([DESCRIBE, b"", b""])] * len(messages)
        session = self._open_session()
        # A rank that sends its description has no task: it has a new store object, or a rank could
        # not follow the plan.
        if digests == self._described and options == self._options and not any(full):
            return [framing.join([SAME, session.encode(), b""])] * len(messages)
        with uncollected():
            tasks = self._tasks(digests, full, options)
        return [framing.join([PLANNED, session.encode(), task]) for task in tasks]

    def _tasks(self, digests: list[bytes], full: Sequence[bytes], options: Options) -> list[bytes]:
        """Make a new plan. `full` are the ranks' descriptions; an empty one means that the last
        plan's still holds.
        """
        known: dict[bytes, Schema] = {}
        descriptions = self._descriptions
        if digests != self._described:
            descriptions = [decode_description(each, known) for each in full]
        self._described = []
        merged, chunk_bytes, size = merge(descriptions), self._config.chunk_bytes, len(full)
        self._plan = plan_ranks(
            merged,
            size,
            chunk_bytes,
            canonical=options.canonical,
            window_bytes=options.window_bytes,
        )
        self._assembler = Assembler(self._plan)
        self._layout = layout_of(self._plan, size)
        keys = [[tree.key for tree in trees] for trees in descriptions]
        tasks = encode_tasks(self._plan, keys, trust_replicated=options.trust_replicated)
        self._described, self._descriptions, self._options = digests, descriptions, options
        return tasks

    def decide(self, handed_in: Sequence[bytes]) -> list[bytes]:
        """Answer the ranks' reports with the chunks that each rank still has to write."""
        parts = [framing.split(each, 3) for each in handed_in]
        counts = [0] * len(parts)
        for places in self._plan.reported.values():
            for place in places:
                counts[place.rank] += 1
        self._decided = decide(
            self._plan,
            [decode_reports(part[0], count) for part, count in zip(parts, counts, strict=True)],
        )
        self._sightings = [
            Observation(shared[number], cell, chunk)
            for shared, (_, where, ids) in zip(self._shared_by_rank(len(parts)), parts, strict=True)
            for (number, cell), chunk in zip(canonical.decode(where), split_ids(ids), strict=True)
        ]
        return [
            canonical.encode([list(write) for write in writes]) for writes in self._decided.writes
        ]

    def _shared_by_rank(self, size: int) -> list[list[Shared]]:
        """The shared boxes of each rank's task, in its order."""
        shared: list[list[Shared]] = [[] for _ in range(size)]
        for each in self._plan.shared:
            shared[each.place.rank].append(each)
        return shared

    def publish(
        self, handed_in: Sequence[bytes], label: CommitMetadata, dedup: Dedup, packs: PackSet
    ) -> list[bytes]:
        """Append the commit of what ranks have written; returns the outcome for each rank.

        An error is raised only before the append, or if its outcome is unknown; in the second case
        nothing may be deleted.
        """
        heads, receipts = _receipts(handed_in)
        with uncollected():
            trees = self._assembler.assemble(self._decided, receipts, self._sightings)
        metadata = self._publisher.write_metadata(trees, dedup, packs, self._layout)
        packs.wait()
        records = [pack.record for pack in packs.closed]
        records += [record_of(each) for head in heads[1:] for each in head["packs"]]
        reused = dedup.reused.union(*(head["reused"] for head in heads[1:]))
        if not label.parents:
            label = replace(label, parents=self._log.replay().runs.get(label.run, ())[-1:])
        published = self._publisher.write_document(
            packs.session,
            label,
            metadata,
            records,
            logical_bytes=logical_bytes(trees),
            leaves=sum(len(tree.schema) for tree in trees),
        )
        return self._append(published, metadata, records, reused, heads)

    def close(self, *, ended: bool) -> None:
        """Close the session."""
        session, self.session = self.session, None
        if session is not None:
            session.end() if ended else session.abandon()

    def _append(
        self,
        published: Published,
        metadata: Metadata,
        records: list[PackRecord],
        reused: frozenset[int] | set[int],
        heads: list[Any],
    ) -> list[bytes]:
        self.asked = True
        try:
            entry = self._log.append(entry_body(published, records, reused))
        except (Refused, NoSpace) as error:
            self.asked = False
            delete_own(self._objects.storage, published.own)
            self.close(ended=isinstance(error, NoSpace))
            if isinstance(error, Refused) and error.refusal.again:
                return [framing.join([AGAIN, self._open_session().encode(), b""])] * len(heads)
            return refused(error, len(heads))
        assert isinstance(entry.body, entries.Commit)
        numbers = canonical.encode([[record.number, record.id] for record in entry.body.packs])
        totals = {
            name: sum(head[name] for head in heads)
            for name in ("chunks", "new_chunks", "sent_bytes")
        }
        _, stored = encode_document(published.document)
        found = framing.join([published.commit.encode(), numbers, canonical.encode(totals)])
        return [framing.join([DONE, stored, found])] * len(heads)

    def _open_session(self) -> SessionId:
        self.close(ended=False)
        self.asked = False
        self.session = open_session(self._objects.storage, "commit")
        return self.session.id


def refused(error: Exception, size: int) -> list[bytes]:
    """The answer to `size` ranks for a commit that is certainly not in the log."""
    return [framing.join([REFUSED, canonical.encode(list(cause_of(error))), b""])] * size


def head_of(label: CommitMetadata) -> bytes:
    """The metadata that all ranks must agree on."""
    return canonical.encode([label.run, label.step])


def digest_of(description: bytes) -> bytes:
    return digest(description)


def _check_labels(heads: Sequence[bytes], label: CommitMetadata) -> None:
    for rank, head in enumerate(heads):
        if head != head_of(label):
            run, step = canonical.decode(head)
            raise Conflict(
                f"rank {rank} commits step {step} of run {run}, rank 0 step {label.step} of run "
                f"{label.run}; they must agree"
            )


def _receipts(handed_in: Sequence[bytes]) -> tuple[list[Any], list[Receipt]]:
    parts = [framing.split(each, 4) for each in handed_in]
    return [canonical.decode(part[0]) for part in parts], [Receipt(*part[1:]) for part in parts]


def record_of(fields: Sequence[Any]) -> PackRecord:
    """A pack as a rank's receipt names it; raises `Corrupt`."""
    name, nbytes, chunks = fields
    if not isinstance(nbytes, int) or not isinstance(chunks, int):
        raise Corrupt("a rank's receipt is damaged; do all ranks run one version of ckptstore?")
    return PackRecord(parse_pack_id(name), nbytes, chunks, metadata=False)
