"""How far a commit has come: milestones, and who is told of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptstore.commit.plan import Run


class Milestone(StrEnum):
    """What happens to a commit, in order: the caller goes on; the state is copied; its chunks have
    ids; packs are closed; it exists."""

    HELD = "held"
    STAGED = "staged"
    HASHED = "hashed"
    WRITTEN = "written"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """A milestone of the commit of `step`, reached so many seconds after the call; `state_bytes` is
    the state's size."""

    milestone: Milestone
    step: int | None
    seconds: float
    state_bytes: int


class Watch:
    """What a commit calls on its way, from any of its threads; this one lets it go its way. What a
    method raises, the commit raises."""

    def starting(self) -> None:
        """An attempt begins, the first or, because others changed the store meanwhile, another one:
        all sources are read (again)."""

    def worked(self, batch: Sequence[Run]) -> None:
        """A batch was hashed and what is new of it written: its sources will not be asked for these
        bytes again in this attempt."""

    def reached(self, milestone: Milestone) -> None:
        """`HASHED`, `WRITTEN` or `DURABLE`."""

    def publishing(self) -> None:
        """The log entry is about to be appended: from here on the commit can no longer be called
        off."""


UNWATCHED = Watch()
