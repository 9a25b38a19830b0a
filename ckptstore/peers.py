"""With which other ranks does a call act? Only this module leads to `distributed`, so a process
that works alone never imports it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptstore.commit.commit_metadata import CommitRequest
from ckptstore.commit.transaction import Committed, Destination, WholeCommitter
from ckptstore.core.forks import cached_property
from ckptstore.core.options import TIMEOUT_S, Ranks
from ckptstore.errors import InvalidInput

if TYPE_CHECKING:
    from ckptstore.distributed.collective import Collective
    from ckptstore.distributed.commit import RanksCommitter

ALONE = "alone"
"""Given instead of a process group: this process works alone, whatever is initialized."""


def collective_of(
    process_group: Any = None, timeout_s: float = TIMEOUT_S, *, behind: bool = False
) -> "Collective | None":
    """The connected ranks of `process_group` (default: the default group); None if this process
    works alone.

    It works alone if nothing is initialized, the group has one rank, or `process_group` is
    `"alone"`. A commit `behind` its caller uses connections of its own, so that its rounds do not
    mix with the caller's. On first use all ranks of the group must call this.

    Raises `InvalidInput` if this process is not in the group, and `Unavailable` if the ranks cannot
    reach each other.
    """
    if not is_several(process_group):
        return None
    from ckptstore.distributed.gloo import connected

    return connected(process_group, timeout_s, behind=behind)


@contextmanager
def calling(what: str, ranks: Ranks) -> "Iterator[Collective | None]":
    """The connected ranks, for a call that begins with the round `what`.

    A rank that is interrupted in the block before that round takes part in it all the same, and it
    fails on all ranks. They would wait for this one, and take its next call for this one.
    """
    begun: list[tuple[Collective, int]] = []
    try:
        if peers := collective_of(ranks.process_group, ranks.timeout_s):
            begun.append((peers, peers.turn))
        yield peers
    except BaseException as error:
        if isinstance(error, Exception) or not is_several(ranks.process_group):
            raise
        if not begun or (begun[0][0].turn == begun[0][1] and not begun[0][0].lost):
            peers = collective_of(ranks.process_group, ranks.timeout_s)
            assert peers  # there are several
            peers.fail(what, error)
        raise


def is_several(process_group: Any = None) -> bool:
    """Whether several ranks act together. Raises `InvalidInput` for an invalid group."""
    if isinstance(process_group, str):
        if process_group != ALONE:
            raise InvalidInput(
                f"process_group is {process_group!r}; wanted a process group, None, or {ALONE!r}"
            )
        return False
    dist: Any = sys.modules.get("torch.distributed")  # a process with peers has imported it
    if not (dist and dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidInput(
                "a process_group was given, but torch.distributed is not initialized"
            )
        return False
    group = process_group if process_group is not None else dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise InvalidInput(
            "this process is no member of the process_group; only its ranks may call"
        )
    return len(dist.get_process_group_ranks(group)) > 1


def leads_all() -> bool:
    """Whether this process is the first of all ranks, or has no peers."""
    return not is_several() or sys.modules["torch.distributed"].get_rank() == 0


def agreed_schedule(options: Mapping[str, Any], due: bool, came: bool) -> tuple[bool, bool]:
    """Whether a commit is due, and whether a signal came; all ranks that commit together get the
    same answer."""
    ranks = options.get("ranks") or Ranks()
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    return peers.is_due(due, came) if peers else (due, came)


class Committer:
    """Commits states to one store, one at a time, alone or with other ranks."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self._whole = WholeCommitter(to)

    @cached_property
    def _together(self) -> "RanksCommitter":
        from ckptstore.distributed.commit import RanksCommitter

        return RanksCommitter(self._to)

    def way(self, peers: "Collective | None") -> Callable[[CommitRequest], Committed]:
        """The function that writes a state, or with `peers` this rank's part of one:
        `WholeCommitter.commit` or `RanksCommitter.commit`."""
        return self._whole.commit if peers is None else partial(self._together.commit, peers=peers)
