"""How do many ranks restore one commit together?

Each rank reads what it needs. One rank reads or hashes a chunk that several need. A failure on one
rank fails the restore on all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ckptstore.core.ids import CommitId
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.rank_view import RankView, owners
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.restore.restore import Brought, RestoreOperation
from ckptstore.state.replication import is_bound_to_world_size

T = TypeVar("T")


class Common(Protocol):
    """How ranks share the work on chunks that several of them need (`broadcast`,
    `shared_verification`).
    """

    def need(self) -> Any:
        """This rank's need, for the coordinator; None if it works alone."""

    def answer(self, handed_in: Sequence[Any]) -> list[Any]:
        """The coordinator's answer to the needs of all ranks: a task for each, or nothing for all
        if any rank works alone.
        """

    def run(self, peers: Collective, task: Any) -> Brought:
        """Carry out a task."""


def restore_together(
    peers: Collective,
    commit: CommitId,
    begin: Callable[[], RestoreOperation],
    common_of: Callable[[RestoreOperation], Common],
) -> RestoreOperation:
    """Restore `commit` on every rank of `peers`.

    No target changes before every rank has checked that the commit fits its state, and no result is
    returned before every rank has its part. `common_of` gives the way to share chunks that several
    ranks need.

    Raises one error on all ranks: `Conflict` if they restore different commits, otherwise the class
    that the causes share.
    """
    begun: list[tuple[RestoreOperation, Common]] = []

    def bind() -> Any:
        restoring = begin()
        common = common_of(restoring)
        begun.append((restoring, common))
        return commit, type(common).__name__, common.need()

    def share(handed_in: list[Any]) -> list[Any]:
        commits, kinds, needs = zip(*handed_in, strict=True)
        _check_same(commits)
        alike = len(set(kinds)) == 1 and all(needs)
        return begun[0][1].answer(needs) if alike else [None] * len(needs)

    task = peers.round("restore: bind", bind, share)
    restoring, common = begun[0]

    def read() -> None:
        restoring.read(common.run(peers, task) if task else None)

    peers.round("restore: read", read, lambda handed_in: handed_in)
    peers.round("restore: finish", restoring.finish, lambda handed_in: handed_in)
    return restoring


def agreed(peers: Collective, candidates: Sequence[CommitId]) -> list[CommitId]:
    """The coordinator's candidates, on every rank."""
    found: list[CommitId] = peers.round(
        "resume: choose", lambda: candidates, lambda handed_in: [handed_in[0]] * len(handed_in)
    )
    return found


def on_all(peers: Collective, act: Callable[[], T]) -> T:
    """The result of `act` on this rank; an error on any rank is raised on every rank."""
    found: list[T] = []

    peers.round("resume: open", lambda: found.append(act()), lambda handed_in: handed_in)
    return found[0]


def check_loaders(
    trees: Mapping[str, Tree], app_state: Mapping[str, Any], viewer: RankView
) -> None:
    """Raise `InvalidInput` for a data loader saved by another number of ranks."""
    for key, tree in trees.items():
        then = frozenset[int]().union(*owners(tree.schema.skeleton))
        other = then and then != frozenset(range(viewer.size)) and not viewer.private
        if other and key in app_state and is_bound_to_world_size(app_state[key]):
            raise InvalidInput(
                f"{key} is a data loader of {len(then)} ranks, and there are {viewer.size} now: "
                "places in the data would be lost. "
                f"Leave {key} out of the state and begin the epoch anew; or, for a loader that can "
                "go on from the states of others, set "
                f"any_world_size = True on it and pass private={{rank: rank whose to take}}"
            )


def _check_same(handed_in: Sequence[str]) -> None:
    if len(set(handed_in)) > 1:
        named = ", ".join(f"rank {rank}: {commit[:12]}" for rank, commit in enumerate(handed_in))
        raise Conflict(
            f"ranks restore different commits ({named}); name a commit by its step, its tag or its "
            "id on all of them"
        )
