"""The state of the store after a log entry, as persistent maps: a new state shares what did not
change with the old one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rpds import HashTrieMap, HashTrieSet

from ckptstore.core.ids import CommitId, PackId, SessionId, StoreId
from ckptstore.log.entries import Position, origin
from ckptstore.log.fields import Setting

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
