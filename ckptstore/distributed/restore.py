"""A restore on many ranks: each reads what it needs, what several need is read or hashed by one,
and what fails on one fails on all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ckptstore.core.ids import CommitId
from ckptstore.distributed import framing
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.rank_view import RankView, owners
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.restore.reader import Tree
from ckptstore.restore.restore import Brought, RestoreOperation
from ckptstore.state.replication import is_bound_to_world_size

T = TypeVar("T")


class Common(Protocol):
    """What ranks do about the chunks that several of them need (`broadcast`,
    `shared_verification`)."""

    def need(self) -> bytes:
        """What this rank says of itself; nothing, if it works by itself."""

    def answer(self, handed_in: Sequence[bytes]) -> list[bytes]:
        """The coordinator's, to what all ranks say of themselves, if all say something: a task for
        each, or nothing for all."""

    def run(self, peers: Collective, task: bytes) -> Brought:
        """Do it."""


def restore_together(
    peers: Collective,
    commit: CommitId,
    begin: Callable[[], RestoreOperation],
    common_of: Callable[[RestoreOperation], Common],
) -> RestoreOperation:
    """Restore `commit` on every rank of `peers`. Nothing is touched before every rank has found
    that the commit fits its state, nothing is handed over before every rank has its part.
    `common_of` says what is done about chunks that several ranks need.

    Raises one error on all ranks: `Conflict` if they restore different commits, otherwise what the
    causes have in common.
    """
    begun: list[tuple[RestoreOperation, Common]] = []

    def bind() -> bytes:
        restoring = begin()
        common = common_of(restoring)
        begun.append((restoring, common))
        return framing.join([commit.encode(), type(common).__name__.encode(), common.need()])

    def share(handed_in: list[bytes]) -> list[bytes]:
        commits, kinds, needs = zip(*(framing.split(each, 3) for each in handed_in), strict=True)
        _check_same(commits)
        return (
            begun[0][1].answer(needs) if len(set(kinds)) == 1 and all(needs) else [b""] * len(needs)
        )

    task = peers.round("restore: bind", bind, share)
    restoring, common = begun[0]

    def read() -> bytes:
        restoring.read(common.run(peers, task) if task else None)
        return b""

    def finish() -> bytes:
        restoring.finish()
        return b""

    peers.round("restore: read", read, lambda handed_in: handed_in)
    peers.round("restore: finish", finish, lambda handed_in: handed_in)
    return restoring


def agreed(peers: Collective, candidates: Sequence[CommitId]) -> list[CommitId]:
    """The coordinator's candidates, on every rank."""
    mine = "\n".join(candidates).encode()
    answer = peers.round(
        "resume: choose", lambda: mine, lambda handed_in: [handed_in[0]] * len(handed_in)
    )
    return [CommitId(line) for line in answer.decode().splitlines()]


def on_all(peers: Collective, act: Callable[[], T]) -> T:
    """What `act` returns here; raises on every rank if it raises on any."""
    found: list[T] = []

    def mine() -> bytes:
        found.append(act())
        return b""

    peers.round("resume: open", mine, lambda handed_in: handed_in)
    return found[0]


def check_loaders(
    trees: Mapping[str, Tree], app_state: Mapping[str, Any], viewer: RankView
) -> None:
    """Raise `InvalidInput` for a data loader whose places were those of another number of ranks."""
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


def _check_same(handed_in: Sequence[bytes]) -> None:
    if len(set(handed_in)) > 1:
        named = ", ".join(
            f"rank {rank}: {commit.decode()[:12]}" for rank, commit in enumerate(handed_in)
        )
        raise Conflict(
            f"ranks restore different commits ({named}); name a commit by its step, its tag or its "
            "id on all of them"
        )
