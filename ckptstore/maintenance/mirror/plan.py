"""Planning a mirror run from both folded logs: the commits and tags that the target lacks. Pure.

A commit is the same in every store: its document is copied byte for byte, so id, parents and time
stay. Retention is separate for each store: commits forgotten in the target are not sent again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.log.state import State


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """A commit to send; `session` names its document in the source, `tags` appear with it."""

    commit: CommitId
    session: SessionId
    run: str
    step: int | None
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TagMove:
    """A tag that is to name `commit` in the target, where it names `previous` now, or nothing."""

    name: str
    commit: CommitId
    previous: CommitId | None


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """The commits to send, oldest first; `tags` are those of commits that the target has already.

    `rejected` tags name another commit in the target and may not be moved; `forgotten` commits are
    forgotten in the target and stay so.
    """

    commits: tuple[CommitTransfer, ...]
    tags: tuple[TagMove, ...]
    rejected: tuple[TagMove, ...]
    forgotten: tuple[CommitId, ...]
    present: int

    @property
    def empty(self) -> bool:
        return not self.commits and not self.tags


def plan_mirror(
    source: State,
    target: State,
    wanted: Collection[CommitId],
    *,
    tags: bool = True,
    force: bool = False,
) -> MirrorPlan:
    """Plan to send those of `wanted` that the target lacks, with the tags that name them; with
    `force`, tags move."""
    rows = sorted(
        (row.n, commit, row) for commit, row in source.commits.items() if commit in wanted
    )
    missing = [(commit, row) for _, commit, row in rows if commit not in target.commits]
    forgotten = tuple(
        commit for _, commit, _ in rows if commit in target.commits and target.commits[commit].soft
    )
    moves = _tag_moves(source, target, set(wanted).difference(forgotten)) if tags else []
    rejected = tuple(move for move in moves if move.previous is not None and not force)
    allowed = [move for move in moves if move not in rejected]
    by_commit: dict[CommitId, list[str]] = {}
    for move in allowed:
        by_commit.setdefault(move.commit, []).append(move.name)
    return MirrorPlan(
        tuple(
            CommitTransfer(commit, row.session, row.run, row.step, tuple(by_commit.get(commit, ())))
            for commit, row in missing
        ),
        tuple(move for move in allowed if move.commit in target.commits),
        rejected,
        forgotten,
        len(rows) - len(missing) - len(forgotten),
    )


def all_commits(state: State, run: str | None = None) -> frozenset[CommitId]:
    """Every commit that is not forgotten, of one run or of all."""
    return frozenset(
        commit for commit, row in state.commits.items() if not row.soft and run in (None, row.run)
    )


def with_ancestors(state: State, commits: Iterable[CommitId]) -> frozenset[CommitId]:
    """`commits` and all their ancestors that the store still has."""
    found: set[CommitId] = set()
    waiting = list(commits)
    while waiting:
        commit = waiting.pop()
        row = state.commits.get(commit)
        if row is not None and not row.soft and commit not in found:
            found.add(commit)
            waiting.extend(row.parents)
    return frozenset(found)


def _tag_moves(source: State, target: State, commits: Collection[CommitId]) -> list[TagMove]:
    return [
        TagMove(name, commit, target.tags.get(name))
        for name, commit in sorted(source.tags.items())
        if commit in commits and target.tags.get(name) != commit
    ]
