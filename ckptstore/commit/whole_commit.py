"""How does one process commit a state that it holds whole? A plan of whole leaves, one transaction,
and no messages. Imports no torch, so that commands which commit files start quickly.
"""

from typing import TYPE_CHECKING

from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest
from ckptstore.commit.plan import Flats, WholePlan
from ckptstore.commit.transaction import (
    ATTEMPTS,
    Committed,
    Destination,
    Transaction,
    contents_of,
    no_cast,
)
from ckptstore.core.options import Milestone
from ckptstore.errors import Conflict
from ckptstore.log.log import Refused
from ckptstore.repository.memory_budget import write_room

if TYPE_CHECKING:
    from ckptstore.state.casting import Casting


class WholeCommitter:
    """Commits whole states to one store, one at a time. Keeps the plan for the next commit."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._whole = WholePlan()

    def commit(self, request: CommitRequest) -> Committed:
        """Write a state and append its entry; the commit is durable on return.

        Staged and encoded bytes stay within the request's budget. Raises `InvalidInput` for too
        small a budget, `Unavailable` if storage fails, `Conflict` if others kept removing chunks to
        be reused, and exceptions of `watch`. After any of them the store is as before.
        """
        to, watch = self._to, request.watch
        room = write_room(
            request.memory_budget_bytes,
            to.config.chunk_bytes,
            to.threads.count,
            encoding=to.config.codec != "raw",
        )
        label, flats = request.prepare()
        casting = casting_of(flats, label)
        flats = casting.flats if casting else flats
        plan = self._whole.of(flats, to.config.chunk_bytes, room.run_bytes)
        sources = [leaf for flat in flats.values() for leaf in flat.leaves]
        for _ in range(ATTEMPTS):
            watch.starting()
            try:
                with Transaction.begin(to, unbuffered=room.unbuffered) as whole:
                    whole.measured = request.measured
                    hints = self._whole.hints
                    ids = whole.write(plan, sources, watch, hints=hints, max_workers=room.threads)
                    watch.reached(Milestone.HASHED)
                    trees = contents_of(flats, plan, ids)
                    cast = casting.report if casting else no_cast
                    published = whole.publish(
                        label, trees, logical_bytes=plan.logical_bytes, watch=watch, cast=cast
                    )
                    return published.committed(request.started, ids)
            except Refused as error:
                if not error.refusal.again:
                    raise
                last = error
        raise contended() from last


def casting_of(flats: Flats, label: CommitMetadata) -> "Casting | None":
    """The conversions that the label asks for."""
    if not label.cast:
        return None
    # Imported here: worker processes and commands, which have no torch, cast nothing.
    from ckptstore.state.casting import Casting

    return Casting(flats, label.cast, label.unchecked)


def contended() -> Conflict:
    """The error after every attempt was refused."""
    return Conflict(
        f"the commit was refused {ATTEMPTS} times because others changed the store meanwhile; "
        "repeat it"
    )
