"""Folding the log into the state of the store: `apply` gives the state after an entry.

The fold is pure and total. `log.admission.check` decides what may be appended to a state; `apply`
trusts what the log holds. `tests/log/model` explores all interleavings of these two functions.

A pack is *live* (a target for dedup), or *condemned* (still readable, and live again once an entry
refers to it), or gone from the state, after which its object may be deleted. Its *stamp* is the
number of the last entry that referred to it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypedDict, TypeVar

from rpds import HashTrieMap

from ckptstore.core.ids import CommitId
from ckptstore.core.model import PackRecord
from ckptstore.log.admission import Code, Refusal, best_commits, check
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Moved,
    Over,
    Register,
    Settings,
    Tag,
    Undelete,
)
from ckptstore.log.state import (
    NEWEST_KEPT,
    CommitRow,
    Commits,
    Pack,
    Packs,
    Runs,
    Sessions,
    SettingValues,
    State,
    Tags,
    genesis,
)

__all__ = [
    "FOLD_VERSION",
    "Code",
    "CommitRow",
    "Pack",
    "Refusal",
    "State",
    "apply",
    "best_commits",
    "check",
    "genesis",
    "number",
]

K = TypeVar("K")
V = TypeVar("V")

FOLD_VERSION = 3
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
            return _with_soft(state, body.commits, n)
        case Undelete():
            return {
                **_with_soft(state, body.commits, 0),
                "packs": _stamp(state.packs, body.reused, n),
            }
        case Condemn():
            return {
                "commits": _without(state.commits, body.purge),
                "packs": _condemn(state.packs, body.packs),
                "fence": n,
            }
        case Register():
            packs, next_pack = _list(state, body.packs, n)
            ended = state.ended.insert(body.session)
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
            return {"over": state.over.update(body.sessions)}
        case Settings():
            removed = [name for name, value in body.values if value is None]
            return {"settings": _without(state.settings.update(body.values), removed)}
        case Moved():
            return {"moved": (body.next_generation, body.place)}


def _committed(state: State, body: Commit, entry: Entry) -> _Changes:
    row = CommitRow(
        entry.n,
        body.session,
        body.content,
        body.run,
        body.step,
        entry.time_ns,
        body.parents,
        body.metrics,
        soft=0,
    )
    packs, next_pack = _list(state, body.packs, entry.n)
    commits = state.commits.insert(body.commit, row)
    return {
        "packs": _stamp(packs, body.reused, entry.n),
        "next_pack": next_pack,
        "commits": commits,
        "tags": state.tags.update((tag, body.commit) for tag in body.tags),
        "ended": state.ended.insert(body.session),
        "runs": _with_newest(state.runs, commits, body.run, body.commit),
    }


def _with_soft(state: State, commits: tuple[CommitId, ...], soft: int) -> _Changes:
    rows, runs = state.commits, state.runs
    for commit in commits:
        if (row := rows.get(commit)) is None:
            continue
        rows = rows.insert(commit, row._replace(soft=soft))
        if not soft:
            runs = _with_newest(runs, rows, row.run, commit)
        elif commit in runs.get(row.run, ()):
            runs = runs.insert(row.run, tuple(c for c in runs[row.run] if c != commit))
    return {"commits": rows, "runs": runs}


def _with_newest(runs: Runs, commits: Commits, run: str, commit: CommitId) -> Runs:
    newest = sorted({*runs.get(run, ()), commit}, key=lambda c: commits[c].n)
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


def _without(rows: "HashTrieMap[K, V]", keys: Iterable[K]) -> "HashTrieMap[K, V]":
    for key in keys:
        rows = rows.discard(key)
    return rows
