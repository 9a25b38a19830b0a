"""The state of the store after a log entry, how an entry changes it, and what refs name in it;
pure.

States are persistent maps: a new state shares what did not change with the old one. The catalog
answers queries from its tables faster. Restores and changes are resolved here, because the log's
entries are verified by hashes, while one flipped bit in a table could make another commit the best.

The fold is total. `log.admission.check` decides what may be appended to a state; `apply` trusts
what the log holds. `tests/log/model` explores all interleavings of these two functions.

A pack is *live* (a target for dedup), or *condemned* (still readable, and live again once an entry
refers to it), or gone from the state, after which its object may be deleted. Its *stamp* is the
number of the last entry that referred to it.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, TypeVar

from rpds import HashTrieMap

from ckptstore.core.ids import CommitId, PackId, SessionId, StoreId, random_digits
from ckptstore.core.model import PackRecord
from ckptstore.core.refs import Best
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Moved,
    Over,
    Position,
    Reduced,
    Register,
    Settings,
    Tag,
    Undelete,
    origin,
)
from ckptstore.objects.fields import Setting

if TYPE_CHECKING:
    from ckptstore.log.rows import Rows

NEWEST_KEPT = 2
"""This many of the newest commits of each run are spared by policies, and cannot be thinned."""


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
    """A commit that has not been purged. `soft` is the number of the entry that forgot it and
    `forgotten_ns` the time of that entry, or both are 0.

    `place` is its age: its entry's number `n`, or the place of the commit that it replaced. Of the
    commits of one place at most one is not forgotten. `thinned` are globs of leaves that are gone.
    """

    n: int
    place: int
    session: SessionId
    content: str
    run: str
    step: int | None
    time_ns: int
    parents: tuple[CommitId, ...]
    metrics: tuple[tuple[str, float], ...]
    thinned: tuple[str, ...]
    soft: int
    forgotten_ns: int

    @property
    def age(self) -> tuple[int, int]:
        """Sorts commits from old to new, forgotten ones among them."""
        return self.place, self.n


# Quoted: rpds has its type parameters in its stubs only.
Packs: TypeAlias = "HashTrieMap[int, Pack] | Rows[int, Pack]"
Commits: TypeAlias = "HashTrieMap[CommitId, CommitRow] | Rows[CommitId, CommitRow]"
Tags: TypeAlias = "HashTrieMap[str, CommitId]"
Sessions: TypeAlias = "HashTrieMap[SessionId, bool] | Rows[SessionId, bool]"
SettingValues: TypeAlias = "HashTrieMap[str, Setting]"
Runs: TypeAlias = "HashTrieMap[str, tuple[CommitId, ...]]"
Replaced: TypeAlias = "HashTrieMap[CommitId, CommitId]"


@dataclass(frozen=True, slots=True)
class State:
    """The store after entry `n`; `hash` and `bytes` are that entry's, as `n + 1` must name them.

    `generation` is the one that this log was opened as, `moved` the generation and place that the
    last `moved` entry names. `over` holds sessions declared over, `ended` those whose entry is in
    the log. `fence` is the last entry that condemned packs. `runs` has the newest commits of each
    run that are not forgotten, oldest first, at most `NEWEST_KEPT`. `replaced` has, for a commit
    whose place another took, that other one; it outlives both. A commit that is not forgotten has
    its place: it is never in `replaced`.
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
    replaced: Replaced

    @property
    def position(self) -> Position:
        return Position(self.n, self.hash, self.bytes)

    def closed(self, session: SessionId) -> bool:
        """Whether `session` can no longer append: what it wrote and the log does not list is
        garbage."""
        return session in self.over or session in self.ended

    # -- as `core.refs` asks --

    def newest(self, run: str | None, step: int | None = None) -> CommitId | None:
        if step is None:
            runs = self.runs.values() if run is None else [self.runs.get(run, ())]
            found = (commit for newest in runs for commit in newest[-1:])
            rows = ((commit, self.commits[commit]) for commit in found if commit in self.commits)
        else:
            rows = ((c, row) for c, row in _there(self, run) if row.step == step)
        return max(rows, key=lambda item: item[1].age, default=(None, None))[0]

    def best(self, ref: Best, run: str | None) -> CommitId | None:
        return best(_there(self, run), ref.metric, ref.order)

    def tagged(self, name: str) -> CommitId | None:
        return self.tags.get(name)

    def made_by(self, session: SessionId) -> CommitId | None:
        """The commit that `session` made. Looks through all commits, if `session` has ended."""
        if session not in self.ended:
            return None
        return next((c for c, row in self.commits.items() if row.session == session), None)

    def beginning(self, prefix: str) -> list[CommitId]:
        if prefix in self.commits:  # a whole id
            return [CommitId(prefix)]
        return sorted(commit for commit in self.commits if commit.startswith(prefix))

    def parents_of(self, commit: CommitId) -> tuple[CommitId, ...] | None:
        row = self.commits.get(commit)
        return None if row is None else tuple(map(self.in_place_of, row.parents))

    def in_place_of(self, commit: CommitId) -> CommitId:
        """The latest replacement of `commit`: the commit that has, or had last, its place. If it
        was not replaced, `commit` itself. Ends even in a forged checkpoint, where commits may
        replace each other in a circle."""
        passed = {commit}
        while (by := self.replaced.get(commit)) is not None and by not in passed:
            passed.add(commit := by)
        return commit


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
        over=HashTrieMap(),
        ended=HashTrieMap(),
        fence=0,
        settings=HashTrieMap(),
        runs=HashTrieMap(),
        replaced=HashTrieMap(),
    )


def best(rows: Iterable[tuple[CommitId, CommitRow]], metric: str, order: str) -> CommitId | None:
    """The commit with the smallest value of `metric`, or by `max` the largest; the newest among
    equals."""
    sign = -1 if order == "max" else 1
    ranked = (
        (sign * value, -row.place, commit)
        for commit, row in rows
        for name, value in row.metrics
        if name == metric and not math.isnan(value)
    )
    found = min(ranked, default=None)
    return found and found[2]


def by_age(state: State, run: str | None) -> list[tuple[CommitId, CommitRow]]:
    """The commits of `run`, or of all runs, that are not forgotten, newest first."""
    return sorted(_there(state, run), key=lambda item: item[1].age, reverse=True)


def _there(state: State, run: str | None) -> Iterator[tuple[CommitId, CommitRow]]:
    """The commits of `run`, or of all runs, that are not forgotten, in no order."""
    for commit, row in state.commits.items():
        if not row.soft and run in (None, row.run):
            yield commit, row


FOLD_VERSION = 7
"""Incremented whenever the same log would fold to another state, or a checkpoint is written in
another form. Checkpoints of other versions are ignored."""


def number(state: State, body: Body) -> Body:
    """Return `body` with its new packs numbered from the next unused number."""
    if isinstance(body, Commit | Register) and body.packs:
        return replace(
            body,
            packs=tuple(replace(p, number=i) for i, p in enumerate(body.packs, state.next_pack)),
        )
    return body


def next_entry(state: State, body: Body, time_ns: int) -> Entry:
    """The entry that follows `state`, under a name of its own; its hash and size are not known
    before it is encoded."""
    return Entry(
        state.n + 1,
        random_digits(16),
        time_ns,
        state.store,
        state.generation,
        state.hash,
        state.bytes,
        body,
    )


def apply(state: State, entry: Entry) -> State:
    """The state after `entry`, in time proportional to the entry. Ignores references to anything
    that is not listed."""
    return replace(state, n=entry.n, hash=entry.hash, bytes=entry.bytes, **_changes(state, entry))


class _Changes(TypedDict, total=False):
    """The fields of the state that an entry changes."""

    moved: tuple[int, str]
    packs: Packs
    next_pack: int
    commits: Commits
    tags: Tags
    over: Sessions
    ended: Sessions
    fence: int
    settings: SettingValues
    runs: Runs
    replaced: Replaced


def _changes(state: State, entry: Entry) -> _Changes:
    body, n = entry.body, entry.n
    match body:
        case Commit():
            return _committed(state, body, entry)
        case Tag():
            tags = (
                state.tags.discard(body.name)
                if body.commit is None
                else state.tags.insert(body.name, body.commit)
            )
            return {"tags": tags, "packs": _stamp(state.packs, body.reused, n)}
        case Forget():
            return _with_soft(state, body.commits, n, entry.time_ns)
        case Undelete():
            return {**_undeleted(state, body, entry), "packs": _stamp(state.packs, body.reused, n)}
        case Condemn():
            return {
                "commits": _without(state.commits, body.purge),
                "packs": _condemn(state.packs, body.packs),
                "fence": n,
            }
        case Register():
            packs, next_pack = _list(state, body.packs, n)
            ended = state.ended.insert(body.session, True)
            # Copies alone do not fence: they remove no duplicate that another gc relies on.
            fence = n if body.condemn else state.fence
            return {
                "packs": _condemn(packs, body.condemn),
                "next_pack": next_pack,
                "fence": fence,
                "ended": ended,
            }
        case Delete():
            return {"packs": _without(state.packs, body.packs)}
        case Over():
            return {"over": state.over.update((session, True) for session in body.sessions)}
        case Settings():
            removed = [name for name, value in body.values if value is None]
            return {"settings": _without(state.settings.update(body.values), removed)}
        case Moved():
            return {"moved": (body.next_generation, body.place)}


def _committed(state: State, body: Commit, entry: Entry) -> _Changes:
    row = CommitRow(
        entry.n,
        entry.n,
        body.session,
        body.content,
        body.run,
        body.step,
        entry.time_ns,
        body.parents,
        body.metrics,
        body.thinned if isinstance(body, Reduced) else (),
        soft=0,
        forgotten_ns=0,
    )
    packs, next_pack = _list(state, body.packs, entry.n)
    replaced = _in_place(state, body.commit)
    if isinstance(body, Reduced) and body.replaces is not None and body.replaces in state.commits:
        old = state.commits[body.replaces]
        row = row._replace(place=old.place, time_ns=old.time_ns)
        replaced = _in_place(state, body.commit, body.replaces)
        state = replace(state, **_with_soft(state, (body.replaces,), entry.n, entry.time_ns))
    commits = state.commits.insert(body.commit, row)
    return {
        "replaced": replaced,
        "packs": _stamp(packs, body.reused, entry.n),
        "next_pack": next_pack,
        "commits": commits,
        "tags": state.tags.update((tag, body.commit) for tag in body.tags),
        "ended": state.ended.insert(body.session, True),
        "runs": _with_newest(state.runs, commits, body.run, body.commit),
    }


def _undeleted(state: State, body: Undelete, entry: Entry) -> _Changes:
    """Each undeleted commit takes its place back from the commit that holds it now."""
    for commit in body.commits:
        if commit in state.commits and (last := state.in_place_of(commit)) != commit:
            holds = last in state.commits and not state.commits[last].soft
            changes = _with_soft(state, (last,) if holds else (), entry.n, entry.time_ns)
            state = replace(state, **changes)
            state = replace(state, replaced=_in_place(state, commit))
        state = replace(state, **_with_soft(state, (commit,), 0, 0))
    return {"replaced": state.replaced, "commits": state.commits, "runs": state.runs}


def _in_place(state: State, commit: CommitId, *others: CommitId) -> Replaced:
    """Let `commit` have its own place, which another may have taken before it was purged and sent
    again, and those of `others`."""
    lasts = {state.in_place_of(each) for each in (commit, *others)} - {commit}
    replaced = state.replaced.discard(commit)
    for last in lasts:
        replaced = replaced.insert(last, commit)
    return replaced


def _with_soft(state: State, commits: tuple[CommitId, ...], soft: int, time_ns: int) -> _Changes:
    rows, runs, lost = state.commits, state.runs, set[str]()
    for commit in commits:
        if (row := rows.get(commit)) is None:
            continue
        rows = rows.insert(commit, row._replace(soft=soft, forgotten_ns=time_ns))
        if not soft:
            runs = _with_newest(runs, rows, row.run, commit)
        elif commit in runs.get(row.run, ()):
            lost.add(row.run)
    return {"commits": rows, "runs": runs.update(newest_of(rows, lost)) if lost else runs}


def newest_of(commits: Commits, runs: Collection[str]) -> dict[str, tuple[CommitId, ...]]:
    """The newest commits of `runs`, by a scan of all commits: it is rare that one is removed."""
    found: dict[str, list[tuple[tuple[int, int], CommitId]]] = {run: [] for run in runs}
    for commit, row in commits.items():
        if row.run in found and not row.soft:
            found[row.run].append((row.age, commit))
    return {
        run: tuple(commit for _, commit in sorted(places)[-NEWEST_KEPT:])
        for run, places in found.items()
    }


def _with_newest(runs: Runs, commits: Commits, run: str, commit: CommitId) -> Runs:
    # In a forged log, one of them was purged as if it had been forgotten.
    there = (c for c in {*runs.get(run, ()), commit} if c in commits)
    newest = sorted(there, key=lambda c: commits[c].place)
    return runs.insert(run, tuple(newest[-NEWEST_KEPT:]))


def _list(state: State, records: tuple[PackRecord, ...], n: int) -> tuple[Packs, int]:
    packs = state.packs
    for p in records:
        packs = packs.insert(p.number, Pack(p.id, p.bytes, p.chunks, p.metadata, True, n))
    return packs, max([state.next_pack, *(p.number + 1 for p in records)])


def _stamp(packs: Packs, numbers: Iterable[int], n: int) -> Packs:
    for number in numbers:
        if (pack := packs.get(number)) is not None:
            packs = packs.insert(number, pack._replace(live=True, stamp=n))
    return packs


def _condemn(packs: Packs, numbers: Iterable[int]) -> Packs:
    for number in numbers:
        if (pack := packs.get(number)) is not None:
            packs = packs.insert(number, pack._replace(live=False))
    return packs


M = TypeVar("M", "Packs", "Commits", "SettingValues")


def _without(rows: M, keys: Iterable[Any]) -> M:
    for key in keys:
        rows = rows.discard(key)
    return rows
