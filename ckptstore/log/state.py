"""The state of the store after a log entry, and what refs name in it. Pure.

States are persistent maps: a new state shares what did not change with the old one. The catalog
answers queries from its tables faster. Restores and changes are resolved here, because the log's
entries are verified by hashes, while one flipped bit in a table could make another commit the best.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rpds import HashTrieMap, HashTrieSet

from ckptstore.core.ids import Best, CommitId, Latest, Name, PackId, Ref, SessionId, Step, StoreId
from ckptstore.errors import Corrupt
from ckptstore.log.entries import Position, origin
from ckptstore.objects.fields import Setting

NEWEST_KEPT = 2
"""This many of the newest commits of each run cannot be forgotten."""


class Pack(NamedTuple):
    """A pack that the log lists; `stamp` is the last entry that referred to it."""

    id: PackId
    bytes: int
    chunks: int
    metadata: bool
    live: bool
    stamp: int

    @property
    def stored_bytes(self) -> int:
        """Its size in the store, twin included."""
        return self.bytes * (2 if self.metadata else 1)


class CommitRow(NamedTuple):
    """A commit that has not been purged; `soft` is 0, or the number of the entry that forgot it."""

    n: int
    session: SessionId
    content: str
    run: str
    step: int | None
    time_ns: int
    parents: tuple[CommitId, ...]
    metrics: tuple[tuple[str, float], ...]
    soft: int


# Quoted: rpds has its type parameters in its stubs only.
Packs: TypeAlias = "HashTrieMap[int, Pack]"
Commits: TypeAlias = "HashTrieMap[CommitId, CommitRow]"
Tags: TypeAlias = "HashTrieMap[str, CommitId]"
Sessions: TypeAlias = "HashTrieSet[SessionId]"
SettingValues: TypeAlias = "HashTrieMap[str, Setting]"
Runs: TypeAlias = "HashTrieMap[str, tuple[CommitId, ...]]"


@dataclass(frozen=True, slots=True)
class State:
    """The store after entry `n`; `hash` and `bytes` are that entry's, as `n + 1` must name them.

    `generation` is the one that this log was opened as, `moved` the generation and place that the
    last `moved` entry names. `over` holds sessions declared over, `ended` those whose entry is in
    the log. `fence` is the last entry that condemned packs. `runs` has the newest commits of each
    run that are not forgotten, oldest first, at most `NEWEST_KEPT`.
    """

    n: int
    hash: str
    bytes: int
    store: StoreId
    generation: int
    moved: tuple[int, str] | None
    packs: Packs
    next_pack: int
    commits: Commits
    tags: Tags
    over: Sessions
    ended: Sessions
    fence: int
    settings: SettingValues
    runs: Runs

    @property
    def position(self) -> Position:
        return Position(self.n, self.hash, self.bytes)

    def closed(self, session: SessionId) -> bool:
        """Whether `session` can no longer append: what it wrote and the log does not list is
        garbage."""
        return session in self.over or session in self.ended


def genesis(store: StoreId, generation: int) -> State:
    """The state before entry 1."""
    return State(
        *origin(store),
        store,
        generation,
        moved=None,
        packs=HashTrieMap(),
        next_pack=1,
        commits=HashTrieMap(),
        tags=HashTrieMap(),
        over=HashTrieSet(),
        ended=HashTrieSet(),
        fence=0,
        settings=HashTrieMap(),
        runs=HashTrieMap(),
    )


def best(rows: Iterable[tuple[CommitId, CommitRow]], metric: str, order: str) -> CommitId | None:
    """The commit with the smallest value of `metric`, or by `max` the largest; the newest among
    equals."""
    sign = -1 if order == "max" else 1
    ranked = (
        (sign * value, -row.n, commit)
        for commit, row in rows
        for name, value in row.metrics
        if name == metric and not math.isnan(value)
    )
    found = min(ranked, default=None)
    return found and found[2]


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
