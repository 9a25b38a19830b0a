"""Admission of log entries: what each entry demands of the state at the head of the log.

`check` keeps one invariant, whatever writers, readers and gc do concurrently: every chunk of a
commit that is not forgotten lies in a pack that the state lists as live. It is called right before
an entry is appended.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ckptstore.core.ids import CommitId, SessionId, pack_session
from ckptstore.core.model import PackRecord
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Forget,
    Moved,
    Over,
    Reduced,
    Register,
    Settings,
    Tag,
    Undelete,
)
from ckptstore.log.state import NEWEST_KEPT, State


class Code(StrEnum):
    """The reason for a refusal; each code tells the author what to do next."""

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
    LAST = "last"
    SAME_PLACE = "same-place"
    TAG_TAKEN = "tag-taken"


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
    """An entry may not be appended to this state. `packs` (numbers), `commits` and `sessions` are
    the ones in conflict."""

    code: Code
    why: str
    packs: frozenset[int] = frozenset()
    commits: tuple[CommitId, ...] = ()
    sessions: tuple[SessionId, ...] = ()

    @property
    def again(self) -> bool:
        """Whether other writers caused it: the same change, planned again under a new session, may
        be admitted."""
        return self.code in _AGAIN


Demand: TypeAlias = Callable[[State], Refusal | None]
"""What the author of one entry demands of the state at the head, beside `check`."""


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
                or _place_held(state, body)
                or (_irreplaceable(state, body) if isinstance(body, Reduced) else None)
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
            return _unforgettable(state, body.commits)
        case Undelete():
            return (
                _commits_unknown(state, body.commits)
                or _never_forgotten(state, body.commits)
                or _places_taken(state, body.commits)
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
    """A session appends one entry. Orphans of closed sessions may be deleted at any time, so none
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
    """Pack names are never reused: a listed pack's session has ended, so only repeats within the
    entry are looked for."""
    if refusal := _foreign(session, packs):
        return refusal
    if len({p.id for p in packs}) < len(packs):
        return Refusal(
            Code.PACKS_KNOWN, f"a pack is listed twice among {_few([p.id for p in packs])}"
        )
    numbers = [p.number for p in packs]
    if numbers != list(range(state.next_pack, state.next_pack + len(packs))):
        return Refusal(
            Code.PACKS_MISNUMBERED,
            f"new packs are numbered {_few(numbers)}; wanted them from {state.next_pack}",
        )
    return None


def _foreign(session: SessionId, packs: tuple[PackRecord, ...]) -> Refusal | None:
    """A retry under a new session must not list packs of the old one: gc may be deleting them as
    orphans."""
    if foreign := [p.id for p in packs if pack_session(p.id) != session]:
        return Refusal(
            Code.PACKS_FOREIGN,
            f"session {session} did not write {_few(foreign)}; write their chunks again under this "
            "session",
        )
    return None


def _reused_gone(state: State, reused: frozenset[int]) -> Refusal | None:
    return _packs(
        Code.PACKS_GONE,
        _gone(state, reused),
        "are not listed any more; look their chunks up again",
    )


def _unlisted(state: State, numbers: frozenset[int]) -> Refusal | None:
    return _packs(Code.PACKS_GONE, _gone(state, numbers), "are not listed any more; leave them out")


def _gone(state: State, numbers: frozenset[int]) -> Iterable[int]:
    return (number for number in numbers if number not in state.packs)


def _still_live(state: State, numbers: Iterable[int]) -> Refusal | None:
    live = (number for number in numbers if state.packs[number].live)
    return _packs(Code.PACKS_LIVE, live, "are live; only condemned ones can be deleted")


def _not_condemnable(state: State, numbers: frozenset[int], mark: int) -> Refusal | None:
    condemned = (n for n in numbers if n in state.packs and not state.packs[n].live)
    return (
        _unlisted(state, numbers)
        or _packs(Code.PACKS_CONDEMNED, condemned, "are condemned already; leave them out")
        or _stamped(state, numbers, mark)
    )


def _stamped(state: State, numbers: Iterable[int], mark: int) -> Refusal | None:
    """A pack that an entry after the mark refers to holds chunks that the mark did not count."""
    stamped = (number for number in numbers if state.packs[number].stamp > mark)
    return _packs(
        Code.PACKS_STAMPED, stamped, f"are referred to since the mark at {mark}; leave them out"
    )


def _fenced(state: State, mark: int, fence: int) -> Refusal | None:
    """Two concurrent gcs could each rely on the duplicate that the other one condemns."""
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
    known = (commit,) if commit in state.commits else ()
    return _commits(state, Code.COMMIT_KNOWN, known, "is in the log already")


def _place_held(state: State, body: Commit) -> Refusal | None:
    """A purged commit that is sent again gets its place back, unless a thinned copy of it has that
    place and does not give way."""
    last = state.in_place_of(body.commit)
    row = state.commits.get(last)
    if row is None or row.soft or (isinstance(body, Reduced) and last == body.replaces):
        return None
    return _commits(
        state,
        Code.SAME_PLACE,
        (last,),
        f"has the place of {body.commit[:12]}, and would have to give way",
    )


def _irreplaceable(state: State, body: Reduced) -> Refusal | None:
    if body.replaces is None:
        return None
    return irreplaceable(state, body.replaces, body.run, body.metrics, body.thinned)


def irreplaceable(
    state: State,
    commit: CommitId,
    run: str,
    metrics: tuple[tuple[str, float], ...],
    thinned: tuple[str, ...],
) -> Refusal | None:
    """Why no commit of `run`, with `metrics` and `thinned` leaves, may take the place of `commit`.

    One of the newest commits gives way to one that lacks nothing more: the new one is
    as new.
    """
    if refusal := _commits_unknown(state, (commit,)) or _forgotten(state, (commit,)):
        return refusal
    row = state.commits[commit]
    fuller = set(thinned) < set(row.thinned) and (run, metrics) == (row.run, row.metrics)
    newest = None if fuller else _among_newest(state, (commit,))
    return _tagged(state, (commit,)) or newest


def _unforgettable(state: State, commits: tuple[CommitId, ...]) -> Refusal | None:
    return _commits_unknown(state, commits) or _forgotten(state, commits) or _tagged(state, commits)


def _places_taken(state: State, commits: tuple[CommitId, ...]) -> Refusal | None:
    """The commit that has a place now is forgotten when another takes it back."""
    places = Counter(map(state.in_place_of, commits))
    doubled = (c for c in commits if places[state.in_place_of(c)] > 1)
    tagged = set(state.tags.values())
    taken = (by for c in commits if (by := state.in_place_of(c)) in tagged)
    return _commits(
        state, Code.SAME_PLACE, doubled, "would have one place in the history; name one of them"
    ) or _commits(
        state, Code.TAGGED, taken, "has this place and a tag; remove the tag before the undelete"
    )


def _commits_unknown(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    if unknown := tuple(c for c in commits if c not in state.commits):
        return Refusal(
            Code.NO_SUCH_COMMIT,
            f"there is no commit {_few(unknown)}: never made, or purged by gc",
            commits=unknown,
        )
    return None


def _forgotten(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    soft = (c for c in commits if state.commits[c].soft)
    why = "is forgotten: leave it out, or `ckptstore undelete` brings it back until a gc purges it"
    return _commits(state, Code.FORGOTTEN, soft, why)


def _never_forgotten(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    there = (c for c in commits if not state.commits[c].soft)
    why = "is not forgotten: `ckptstore log` lists it, and there is nothing to bring back"
    return _commits(state, Code.NOT_FORGOTTEN, there, why)


def _not_forgotten(state: State, commits: Iterable[CommitId], mark: int) -> Refusal | None:
    other = (c for c in commits if not 0 < state.commits[c].soft <= mark)
    why = f"is not forgotten, or was after entry {mark}; leave it out"
    return _commits(state, Code.NOT_FORGOTTEN, other, why)


def _tag_unknown(state: State, name: str) -> Refusal | None:
    if name not in state.tags:
        return Refusal(Code.NO_SUCH_TAG, f"there is no tag {name!r}")
    return None


def _tagged(state: State, commits: tuple[CommitId, ...]) -> Refusal | None:
    asked = frozenset(commits)
    tags = {tag: commit for tag, commit in sorted(state.tags.items()) if commit in asked}
    named = frozenset(tags.values())
    held = [commit for commit in commits if commit in named]
    why = f"has a tag and stays: `ckptstore tag -d {' '.join(tags)}` removes it, or leave it out"
    return _commits(state, Code.TAGGED, held, why)


def _among_newest(state: State, commits: Iterable[CommitId]) -> Refusal | None:
    pinned = [c for c in commits if c in state.runs.get(state.commits[c].run, ())]
    return _commits(
        state, Code.NEWEST, pinned, f"is one of the {NEWEST_KEPT} newest of its run; leave it out"
    )


def newest_spared(commits: Collection[CommitId]) -> Demand:
    """Demand that none of `commits` is one of the newest of its run, which are kept under every
    policy."""
    return lambda state: _among_newest(state, commits)


def not_made(sessions: Collection[SessionId], more: Demand | None) -> Demand:
    """Demand that none of `sessions` has made a commit, and `more`. If the answer to an append was
    lost, the next one tells: its entry gets the number that the lost one asked for, or a later one.
    """

    def demand(state: State) -> Refusal | None:
        for session in sessions:
            if commit := state.made_by(session):
                why = f"session {session} made commit {commit[:12]} already"
                return Refusal(Code.COMMIT_KNOWN, why, commits=(commit,), sessions=(session,))
        return more(state) if more else None

    return demand


def one_left(commits: Collection[CommitId]) -> Demand:
    """Demand that each run of `commits` keeps a commit that is not one of them."""
    going = frozenset(commits)

    def demand(state: State) -> Refusal | None:
        runs = {state.commits[commit].run for commit in commits}
        left = {
            row.run
            for commit, row in state.commits.items()
            if row.run in runs and not row.soft and commit not in going
        }
        last = tuple(commit for commit in commits if state.commits[commit].run in runs - left)
        if not last:
            return None
        run = state.commits[last[0]].run
        return Refusal(
            Code.LAST,
            f"nothing else is in run {run} than {_told(state, last)}: `ckptstore forget --run "
            f"{run} --all` (run={run!r}, all_commits=True) forgets a whole run",
            commits=last,
        )

    return demand


def tags_free(tags: Collection[str], commit: CommitId) -> Demand:
    """Demand that none of `tags` names a commit other than `commit`."""

    def demand(state: State) -> Refusal | None:
        taken = (tag for tag in tags if state.tags.get(tag, commit) != commit)
        if (tag := next(taken, None)) is None:
            return None
        return Refusal(
            Code.TAG_TAKEN,
            f"tag {tag!r} was set to commit {state.tags[tag][:12]} meanwhile and stays there: it "
            "moves by --force (force=True), or once it was removed",
            commits=(state.tags[tag],),
        )

    return demand


def _packs(code: Code, numbers: Iterable[int], why: str) -> Refusal | None:
    """Refuse because of `numbers`, if there are any."""
    packs = frozenset(numbers)
    return Refusal(code, f"packs {_few(packs)} {why}", packs=packs) if packs else None


def _commits(state: State, code: Code, commits: Iterable[CommitId], why: str) -> Refusal | None:
    """Refuse because of `commits`, if there are any, and name all of them."""
    if not (found := tuple(commits)):
        return None
    is_one = len(found) == 1
    told = f"{_told(state, found)} {why}" if is_one else f"{_told(state, found)}: each {why}"
    return Refusal(code, told, commits=found)


def _told(state: State, commits: Collection[CommitId]) -> str:
    """`commit 91bc8f3a1c77 (step 5 of run main, tag good)`, for each of them."""
    tags: dict[CommitId, list[str]] = defaultdict(list)
    for tag, commit in sorted(state.tags.items()):
        tags[commit].append(f"tag {tag}")
    told = []
    for commit in commits:
        row = state.commits[commit]
        step = "" if row.step is None else f"step {row.step} of "
        told.append(f"{commit[:12]} ({', '.join([f'{step}run {row.run}', *tags[commit]])})")
    return f"{'commit' if len(told) == 1 else 'commits'} {', '.join(told)}"


def _few(names: Collection[object], limit: int = 4) -> str:
    shown = ", ".join(sorted(map(str, names))[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
