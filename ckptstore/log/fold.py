"""The state of the store is a fold over its log: what each entry demands of the state (`check`) and
does to it (`apply`).

Pure and total. The invariant that both keep, whatever writers, readers and gc do between each
other: every chunk of a commit that is not forgotten lies in a pack that the state lists as live.
`check` guards it, so it is asked right before an entry is appended at the head of the log; `apply`
trusts what the log holds. `tests/log/model` explores all interleavings of these two functions.

A pack is *live* (a target for dedup), or *condemned* (still readable, and live again once an entry
refers to it), or gone from the state, after which its object may be deleted. Its *stamp* is the
number of the last entry that referred to it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypedDict, TypeVar

from rpds import HashTrieMap

from ckptstore.core.ids import CommitId, SessionId, pack_session
from ckptstore.core.model import PackRecord
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

FOLD_VERSION = 2
"""Goes up whenever the same log would fold to another state; checkpoints of other versions are
ignored."""


class Code(StrEnum):
    """Why an entry is refused, by what its author does next."""

    MOVED = "moved"
    SESSION_OVER = "session-over"
    SESSION_ENDED = "session-ended"
    PACKS_FOREIGN = "packs-foreign"
    PACKS_KNOWN = "packs-known"
    PACKS_MISNUMBERED = "packs-misnumbered"
    PACKS_GONE = "packs-gone"
    PACKS_LIVE = "packs-live"
    PACKS_CONDEMNED = "packs-condemned"
    PACKS_STAMPED = "packs-stamped"
    FENCED = "fenced"
    MARK_AHEAD = "mark-ahead"
    COMMIT_KNOWN = "commit-known"
    NO_SUCH_COMMIT = "no-such-commit"
    NO_SUCH_TAG = "no-such-tag"
    FORGOTTEN = "forgotten"
    NOT_FORGOTTEN = "not-forgotten"
    TAGGED = "tagged"
    NEWEST = "newest"
    BEST = "best"


_AGAIN = frozenset(
    {
        Code.SESSION_OVER,
        Code.PACKS_GONE,
        Code.PACKS_LIVE,
        Code.PACKS_CONDEMNED,
        Code.PACKS_STAMPED,
        Code.FENCED,
        Code.NOT_FORGOTTEN,
    }
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry may not be appended to this state; `packs` (numbers), `commits` and `sessions` are
    those that are in its way."""

    code: Code
    why: str
    packs: frozenset[int] = frozenset()
    commits: tuple[CommitId, ...] = ()
    sessions: tuple[SessionId, ...] = ()

    @property
    def again(self) -> bool:
        """Whether others did it: the same change may be admitted after another look at the store,
        planned anew under a new session."""
        return self.code in _AGAIN


def number(state: State, body: Body) -> Body:
    """`body` with its new packs numbered on from the highest number ever used."""
    if isinstance(body, Commit | Register) and body.packs:
        return replace(
            body,
            packs=tuple(replace(p, number=i) for i, p in enumerate(body.packs, state.next_pack)),
        )
    return body


# -- what an entry demands
# ----------------------------------------------------------------------------------------------------------


def check(state: State, body: Body) -> Refusal | None:
    """Why `body`, numbered, may not become the entry after `state`; None if it may."""
    if state.moved and state.moved[0] > state.generation:
        return Refusal(
            Code.MOVED,
            f"the log moved to {state.moved[1]} (generation {state.moved[0]}); open the store "
            "again",
        )
    match body:
        case Commit():
            return (
                _session_closed(state, body.session)
                or _packs_refused(state, body.session, body.packs)
                or _reused_gone(state, body.reused)
                or _commit_known(state, body.commit)
            )
        case Tag():
            if body.commit is None:
                return _tag_unknown(state, body.name)
            commits = (body.commit,)
            return (
                _commits_unknown(state, commits)
                or _forgotten(state, commits)
                or _reused_gone(state, body.reused)
            )
        case Forget():
            return (
                _commits_unknown(state, body.commits)
                or _forgotten(state, body.commits)
                or _pinned(state, body.commits)
            )
        case Undelete():
            return (
                _commits_unknown(state, body.commits)
                or _not_forgotten(state, body.commits, state.n)
                or _reused_gone(state, body.reused)
            )
        case Condemn():
            return (
                _fenced(state, body.mark, body.fence)
                or _not_condemnable(state, body.packs, body.mark)
                or _commits_unknown(state, body.purge)
                or _not_forgotten(state, body.purge, body.mark)
            )
        case Register():
            return (
                _session_closed(state, body.session)
                or _packs_refused(state, body.session, body.packs)
                or (_fenced(state, body.mark, body.fence) if body.condemn else None)
                or _not_condemnable(state, body.condemn, body.mark)
            )
        case Delete():
            return _unlisted(state, body.packs) or _still_live(state, body.packs)
        case Over():
            return next(
                (refusal for s in body.sessions if (refusal := _session_closed(state, s))), None
            )
        case Settings() | Moved():
            return None


def _session_closed(state: State, session: SessionId) -> Refusal | None:
    """A session serves one entry: orphans of closed sessions may be deleted at any time, so none
    may be listed afterwards."""
    if session in state.over:
        return Refusal(
            Code.SESSION_OVER,
            f"session {session} was declared over; write again under a new one",
            sessions=(session,),
        )
    if session in state.ended:
        return Refusal(
            Code.SESSION_ENDED,
            f"session {session} has its entry in the log already; open a new one",
            sessions=(session,),
        )
    return None


def _packs_refused(
    state: State, session: SessionId, packs: tuple[PackRecord, ...]
) -> Refusal | None:
    return _foreign(session, packs) or _known(state, packs) or _misnumbered(state, packs)


def _foreign(session: SessionId, packs: tuple[PackRecord, ...]) -> Refusal | None:
    """A retry under a new session must not list what the old one wrote: gc may be deleting it as an
    orphan."""
    if foreign := [p.id for p in packs if pack_session(p.id) != session]:
        return Refusal(
            Code.PACKS_FOREIGN,
            f"session {session} did not write {_few(foreign)}; write their chunks again under this "
            "session",
        )
    return None


def _known(state: State, packs: tuple[PackRecord, ...]) -> Refusal | None:
    """Names of packs are never used twice. A listed one's session has ended, so only repeats within
    the entry are left to find."""
    if len({p.id for p in packs}) < len(packs):
        return Refusal(
            Code.PACKS_KNOWN, f"a pack is named twice among {_few([p.id for p in packs])}"
        )
    return None


def _misnumbered(state: State, packs: tuple[PackRecord, ...]) -> Refusal | None:
    numbers = [p.number for p in packs]
    if numbers != list(range(state.next_pack, state.next_pack + len(packs))):
        return Refusal(
            Code.PACKS_MISNUMBERED,
            f"new packs are numbered {_few(numbers)}; wanted them from {state.next_pack}",
        )
    return None


def _reused_gone(state: State, reused: frozenset[int]) -> Refusal | None:
    if gone := _gone(state, reused):
        return Refusal(
            Code.PACKS_GONE,
            f"packs {_few(gone)} are not listed any more; look their chunks up again",
            packs=gone,
        )
    return None


def _unlisted(state: State, numbers: frozenset[int]) -> Refusal | None:
    if gone := _gone(state, numbers):
        return Refusal(
            Code.PACKS_GONE,
            f"packs {_few(gone)} are not listed any more; leave them out",
            packs=gone,
        )
    return None


def _gone(state: State, numbers: frozenset[int]) -> frozenset[int]:
    return frozenset(number for number in numbers if number not in state.packs)


def _still_live(state: State, numbers: Iterable[int]) -> Refusal | None:
    if live := frozenset(number for number in numbers if state.packs[number].live):
        return Refusal(
            Code.PACKS_LIVE,
            f"packs {_few(live)} are live; only condemned ones can be deleted",
            packs=live,
        )
    return None


def _not_condemnable(state: State, numbers: frozenset[int], mark: int) -> Refusal | None:
    if refusal := _unlisted(state, numbers):
        return refusal
    if condemned := frozenset(number for number in numbers if not state.packs[number].live):
        return Refusal(
            Code.PACKS_CONDEMNED,
            f"packs {_few(condemned)} are condemned already; leave them out",
            packs=condemned,
        )
    return _stamped(state, numbers, mark)


def _stamped(state: State, numbers: Iterable[int], mark: int) -> Refusal | None:
    """What an entry after the mark refers to holds chunks that the mark did not count."""
    if stamped := frozenset(number for number in numbers if state.packs[number].stamp > mark):
        return Refusal(
            Code.PACKS_STAMPED,
            f"packs {_few(stamped)} are referred to since the mark at {mark}; leave them out",
            packs=stamped,
        )
    return None


def _fenced(state: State, mark: int, fence: int) -> Refusal | None:
    """Two gcs that do not know of each other could each rely on the duplicate that the other one
    condemns."""
    if fence != state.fence:
        return Refusal(
            Code.FENCED,
            f"entry {state.fence} condemned since this gc looked (it knows of {fence}); mark again",
        )
    if mark > state.n:
        return Refusal(
            Code.MARK_AHEAD, f"the mark at {mark} is ahead of the log, which ends at {state.n}"
        )
    return None


def _commit_known(state: State, commit: CommitId) -> Refusal | None:
    if commit in state.commits:
        return Refusal(
            Code.COMMIT_KNOWN, f"commit {commit} is in the log already", commits=(commit,)
        )
    return None


def _commits_unknown(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    if unknown := tuple(c for c in commits if c not in state.commits):
        return Refusal(
            Code.NO_SUCH_COMMIT,
            f"there is no commit {_few(unknown)}: never made, or purged by gc",
            commits=unknown,
        )
    return None


def _forgotten(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    if soft := tuple(c for c in commits if state.commits[c].soft):
        return Refusal(
            Code.FORGOTTEN,
            f"commit {_few(soft)} is forgotten; undelete it first, or leave it out",
            commits=soft,
        )
    return None


def _not_forgotten(state: State, commits: Iterable[CommitId], mark: int) -> Refusal | None:
    if other := tuple(c for c in commits if not 0 < state.commits[c].soft <= mark):
        return Refusal(
            Code.NOT_FORGOTTEN,
            f"commit {_few(other)} was not forgotten by entry {mark} or before; leave it out",
            commits=other,
        )
    return None


def _tag_unknown(state: State, name: str) -> Refusal | None:
    if name not in state.tags:
        return Refusal(Code.NO_SUCH_TAG, f"there is no tag {name!r}")
    return None


def _pinned(state: State, commits: tuple[CommitId, ...]) -> Refusal | None:
    tagged = set(state.tags.values())
    newest = {c for run in {state.commits[c].run for c in commits} for c in state.runs.get(run, ())}
    for code, pins, why in (
        (Code.TAGGED, tagged, "has a tag"),
        (Code.NEWEST, newest, f"is one of the {NEWEST_KEPT} newest of its run"),
        (Code.BEST, best_commits(state), "is the best by a metric that the settings name"),
    ):
        if pinned := tuple(c for c in commits if c in pins):
            return Refusal(
                code,
                f"commit {_few(pinned)} {why} and cannot be forgotten; leave it out",
                commits=pinned,
            )
    return None


def best_commits(state: State) -> frozenset[CommitId]:
    """The best commit by each metric of the setting `best`: the smallest value, the largest after
    `:max`, the newest among equals."""
    named = state.settings.get("best")
    metrics = named if isinstance(named, tuple) else ()
    return frozenset(c for metric in metrics if (c := _best(state, metric)) is not None)


def _best(state: State, metric: str) -> CommitId | None:
    name, _, direction = metric.partition(":")
    sign = -1 if direction == "max" else 1
    ranked = (
        (sign * value, -row.n, commit)
        for commit, row in state.commits.items()
        if not row.soft
        for key, value in row.metrics
        if key == name and not math.isnan(value)
    )
    best = min(ranked, default=None)
    return best and best[2]


def _few(names: Collection[object], limit: int = 4) -> str:
    shown = ", ".join(sorted(map(str, names))[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


# -- what an entry does
# -------------------------------------------------------------------------------------------------------------


def apply(state: State, entry: Entry) -> State:
    """The state after `entry`, in time proportional to the entry. Refers to nothing that is not
    listed, whatever the entry says."""
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
            fence = (
                n if body.condemn else state.fence
            )  # what is only added takes no duplicate away that a gc relies on
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
