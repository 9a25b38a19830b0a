"""What ranks agree on ahead of a commit in the background: that one is due, and that all of them
can begin it."""

from collections.abc import Callable, Sequence

from ckptstore.distributed.collective import Collective


def begun_by_all(peers: Collective, begin: Callable[[], str]) -> str:
    """Call `begin` on every rank, which returns why this rank cannot begin now, or nothing; gives
    every rank what was said on any.

    What `begin` raises on one rank is raised on all.
    """

    def answer(handed_in: Sequence[bytes]) -> list[bytes]:
        reasons = "; ".join(
            f"rank {rank}: {why.decode()}" for rank, why in enumerate(handed_in) if why
        )
        return [reasons.encode()] * len(handed_in)

    return peers.round("commit: begin", lambda: begin().encode(), answer).decode()


def is_due_for_all(peers: Collective, due: bool, came: bool) -> tuple[bool, bool]:
    """Whether a commit is due, as the coordinator says, and whether a signal came to any rank."""

    def answer(handed_in: Sequence[bytes]) -> list[bytes]:
        return [bytes([handed_in[0][0], any(each[1] for each in handed_in)])] * len(handed_in)

    found = peers.round("every: decide", lambda: bytes([due, came]), answer)
    return bool(found[0]), bool(found[1])
