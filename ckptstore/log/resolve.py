"""Resolving a ref to a commit by the folded log. Pure.

The catalog answers queries from its tables faster. Restores and changes are resolved here, because
the log's entries are verified by hashes, while one flipped bit in a table could make another commit
the best.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.refs import Best, Latest, Name, Ref, Step
from ckptstore.errors import Corrupt
from ckptstore.log.state import CommitRow, State, best


class Resolved(NamedTuple):
    """A commit of the log, with the tags that name it."""

    id: CommitId
    session: SessionId
    step: int | None
    tags: tuple[str, ...]


def resolve(state: State, ref: Ref, run: str | None) -> Resolved | None:
    """Resolve `ref`, in `run` if it names none; None if no commit matches, or several begin with
    its digits.

    Raises `Corrupt` if more generations are requested than there are commits and the parents form a
    circle.
    """
    commit = _resolve(state, ref, run)
    return None if commit is None or commit not in state.commits else resolved(state, commit)


def newest_first(state: State, run: str) -> list[Resolved]:
    """The commits of `run` that are not forgotten, newest first."""
    return [resolved(state, commit) for commit, _ in _by_age(state, run)]


def resolved(state: State, commit: CommitId) -> Resolved:
    """The log's record of a commit."""
    row = state.commits[commit]
    return Resolved(
        commit,
        row.session,
        row.step,
        tuple(sorted(tag for tag, named in state.tags.items() if named == commit)),
    )


def _resolve(state: State, ref: Ref, run: str | None) -> CommitId | None:
    match ref:
        case Step():
            rows = _by_age(state, run if ref.run is None else ref.run)
            return _first(commit for commit, row in rows if row.step == ref.step) or _beginning(
                state, ref.prefix
            )
        case Latest():
            return _first(
                commit for commit, _ in _by_age(state, run if ref.run is None else ref.run)
            )
        case Best():
            return best(_by_age(state, run if ref.run is None else ref.run), ref.metric, ref.order)
        case Name():
            return state.tags.get(ref.name) or _beginning(state, ref.prefix)
    commit = _resolve(state, ref.base, run)
    for _ in range(min(ref.generations, len(state.commits))):
        if commit is None:
            break
        row = state.commits.get(commit)
        commit = row.parents[0] if row and row.parents else None
    if ref.generations > len(state.commits) and commit is not None and commit in state.commits:
        raise circular(commit)
    return commit


def circular(commit: CommitId) -> Corrupt:
    """Honest ids are hashes, which cannot form a circle of parents."""
    return Corrupt(
        f"the first parents of commit {commit[:12]} lead back to it, so the log was forged or "
        "damaged; run `ckptstore fsck`"
    )


def _by_age(state: State, run: str | None) -> list[tuple[CommitId, CommitRow]]:
    """Newest first."""
    rows = [
        (commit, row)
        for commit, row in state.commits.items()
        if not row.soft and run in (None, row.run)
    ]
    return sorted(rows, key=lambda item: item[1].n, reverse=True)


def _beginning(state: State, prefix: str | None) -> CommitId | None:
    found = [commit for commit in state.commits if commit.startswith(prefix)] if prefix else []
    return found[0] if len(found) == 1 else None


def _first(commits: Iterable[CommitId]) -> CommitId | None:
    return next(iter(commits), None)
