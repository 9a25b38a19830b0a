"""Planning a mirror run: the other store, opened or created, the selected commits, and from both
folded logs the commits and tags that the target lacks.

A commit is the same in every store: its document is copied byte for byte, so id, parents and time
stay. Retention is separate for each store: commits forgotten in the target are not sent again, and
of a commit and what a thinning made of it each store has one.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from ckptstore.core.ids import CommitId, SessionId, is_hold
from ckptstore.core.model import CommitDocument, TreeRef
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.log.admission import irreplaceable
from ckptstore.log.state import CommitRow, State
from ckptstore.maintenance.check.trees import read_document
from ckptstore.maintenance.mirror_match import Leaves, compare_leaves
from ckptstore.objects.documents import encode_document
from ckptstore.repository.init_store import init_store
from ckptstore.repository.resolve_ref import AnyRef, find_commit
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """A commit to send; `session` names its document in the source, `tags` appear with it.
    `parents` have the places of its parents in the target. There it takes the place of `replaces`,
    of which it has all leaves, and more. What it has in common with `like`, the commit of the
    source next to it that the target has by then, need not travel."""

    commit: CommitId
    session: SessionId
    run: str
    step: int | None
    parents: tuple[CommitId, ...]
    tags: tuple[str, ...]
    replaces: CommitId | None = None
    like: CommitId | None = None


@dataclass(frozen=True, slots=True)
class TagMove:
    """A tag that is to name `commit` in the target, where it names `previous` now, or nothing.
    Where the target has more or fewer leaves of the tagged commit, `commit` is its own."""

    tag: str
    commit: CommitId
    previous: CommitId | None

    def __str__(self) -> str:
        if self.previous is None:
            return f"{self.tag} is new there: {self.commit[:12]}"
        return f"{self.tag} is {self.previous[:12]} there and {self.commit[:12]} here"


@dataclass(frozen=True, slots=True, repr=False)
class MirrorPlan:
    """The commits to send, oldest first; `tags` are those of commits that the target has already.

    `rejected` tags name another commit in the target and may not be moved; `forgotten` commits are
    forgotten in the target and stay so; `pinned` ones were thinned there and stay so, although they
    lack leaves that are here, or nobody can tell what is there, with the reason.
    """

    commits: tuple[CommitTransfer, ...]
    tags: tuple[TagMove, ...]
    rejected: tuple[TagMove, ...]
    forgotten: tuple[CommitId, ...]
    pinned: tuple[tuple[CommitId, str], ...]
    present: int

    @property
    def empty(self) -> bool:
        return not self.commits and not self.tags

    def __repr__(self) -> str:
        return f"<mirror plan: {len(self.commits)} commits, {len(self.tags)} tags>"


@dataclass(frozen=True, slots=True)
class Akin:
    """Commits that were thinned from one and the same, where no log says so.

    `found` has for a commit of the source the one of the target, `unread` one of the target that
    may be it, but has a document that cannot be read.
    """

    found: Mapping[CommitId, CommitId]
    unread: Mapping[CommitId, CommitId]


NONE_AKIN = Akin(MappingProxyType({}), MappingProxyType({}))
NOT_COMPARED: Mapping[CommitId, Leaves] = MappingProxyType({})


def plan_mirror(
    source: State,
    target: State,
    wanted: Collection[CommitId],
    akin: Akin = NONE_AKIN,
    compared: Mapping[CommitId, Leaves] = NOT_COMPARED,
    *,
    tags: bool = True,
    force: bool = False,
    holds: bool = False,
) -> MirrorPlan:
    """Plan to send those of `wanted` that the target lacks, with the tags that name them, and no
    others; with `force`, tags move, and with `holds`, those of hollow directories are sent too.
    `akin` is what `find_akin` found, `compared` what `compare_leaves` did.

    A commit takes the place of one that has some of its leaves only if it has them all.
    """
    rows = sorted(
        (row.age, commit, row) for commit, row in source.commits.items() if commit in wanted
    )
    parents = [source.in_place_of(parent) for _, _, row in rows for parent in row.parents]
    each_of = [*(commit for _, commit, _ in rows), *parents]
    there = counterparts(source, target, each_of, akin.found)
    missing, pinned = [], []
    for _, commit, row in rows:
        other = there.get(commit)
        if unread := akin.unread.get(commit):
            pinned.append((commit, _cannot_be_read(unread)))
        elif other is None:
            missing.append((commit, row))
        elif not _is_settled(commit, other, target, compared):
            if why := _why_it_stays(commit, row, other, target, compared):
                pinned.append((commit, why))
            else:
                missing.append((commit, row))
    forgotten = tuple(
        commit for _, commit, _ in rows if commit in there and target.commits[there[commit]].soft
    )
    named = there | {commit: commit for commit, _ in missing}
    for commit in forgotten:
        del named[commit]
    sent = {
        name: each for name, each in source.tags.items() if tags and (holds or not is_hold(name))
    }
    moves = _tag_moves(sent, target, {commit: named[commit] for commit in named.keys() & wanted})
    rejected = tuple(move for move in moves if move.previous is not None and not force)
    allowed = [move for move in moves if move not in rejected]
    by_commit: dict[CommitId, list[str]] = {}
    for move in allowed:
        by_commit.setdefault(move.commit, []).append(move.tag)
    likes = _likes(source, target, [commit for commit, _ in missing])
    return MirrorPlan(
        tuple(
            CommitTransfer(
                commit,
                row.session,
                row.run,
                row.step,
                tuple(named.get(source.in_place_of(each), each) for each in row.parents),
                tuple(by_commit.get(commit, ())),
                there.get(commit),
                likes[commit],
            )
            for commit, row in missing
        ),
        tuple(move for move in allowed if move.commit in target.commits),
        rejected,
        forgotten,
        tuple(pinned),
        len(rows) - len(missing) - len(forgotten),
    )


def _likes(
    source: State, target: State, missing: Sequence[CommitId]
) -> dict[CommitId, CommitId | None]:
    """For each commit that is sent, the one that has most in common with it of those that the
    target has before: a parent, or the nearest of its run."""
    if not missing:
        return {}
    commits, runs = source.commits, defaultdict[str, list[CommitId]](list)
    sent = {commits[commit].run for commit in missing}
    for _, commit in sorted((row.age, c) for c, row in commits.items() if row.run in sent):
        runs[commits[commit].run].append(commit)
    has = {commit for commit, row in target.commits.items() if not row.soft and commit in commits}
    places = {commit: i for run in runs.values() for i, commit in enumerate(run)}
    found = dict[CommitId, CommitId | None]()
    for commit in missing:
        row = commits[commit]
        run, i = runs[row.run], places[commit]
        near = (at for d in range(1, len(run)) for at in (i - d, i + d))
        beside = (run[at] for at in near if 0 <= at < len(run))
        found[commit] = next((each for each in chain(row.parents, beside) if each in has), None)
        has.add(commit)
    return found


def plan_between(
    source: StoreHandle, target: StoreHandle, wanted: Collection[CommitId], **options: bool
) -> MirrorPlan:
    """`plan_mirror` of two stores as their logs are now. Reads documents and pages of commits that
    the stores have thinned differently."""
    ours, theirs = source.log.replay(), target.log.replay()
    akin = find_akin(source, target, wanted)
    there = counterparts(ours, theirs, wanted, akin.found)
    compared = compare_leaves(source, target, ours, theirs, there)
    return plan_mirror(ours, theirs, wanted, akin, compared, **options)


def counterparts(
    source: State,
    target: State,
    commits: Collection[CommitId],
    akin: Mapping[CommitId, CommitId] = NONE_AKIN.found,
) -> dict[CommitId, CommitId]:
    """For each of `commits` the one that the target has in its place: itself, or what a thinning
    made of it, or made it of. One that is not forgotten there comes before one that is; where all
    that the place ever had is forgotten, it is one of those that wait for a gc."""
    ours, theirs = _by_place(source, source.replaced), _by_place(target, target.commits)
    found = {}
    for commit in commits:
        last = source.in_place_of(commit)
        here = {commit, last, *ours.get(last, ())}
        kin = {target.in_place_of(akin.get(each, each)) for each in here}
        there = sorted(
            {commit}.union(*(theirs.get(each, ()) for each in kin)) & set(target.commits),
            key=lambda c: (target.commits[c].soft > 0, c != commit, c not in kin, c),
        )
        if there:
            found[commit] = there[0]
    return found


def _by_place(state: State, commits: Iterable[CommitId]) -> dict[CommitId, set[CommitId]]:
    """Those of `commits` that have, or had, one place, by the commit that had it last."""
    places = defaultdict[CommitId, set[CommitId]](set)
    for commit in commits:
        places[state.in_place_of(commit)].add(commit)
    return places


def find_akin(source: StoreHandle, target: StoreHandle, wanted: Collection[CommitId]) -> Akin:
    """The commits of the target that were thinned from one of `wanted`, or from the same commit, or
    of which one of `wanted` was, where no log says so: a thinned commit may come to a store that
    never had the whole one. Reads the documents of commits of equal run and step."""
    ours, theirs = source.log.state, target.log.state
    if not any(row.thinned for state in (ours, theirs) for row in state.commits.values()):
        return NONE_AKIN
    known = counterparts(ours, theirs, ours.commits)
    told = set(known.values())
    strangers = defaultdict(list)
    for commit, row in theirs.commits.items():
        if commit not in told:
            strangers[row.run, row.step].append((commit, row))
    found, unread = dict[CommitId, CommitId](), dict[CommitId, CommitId]()
    for commit in (each for each in wanted if each in ours.commits and each not in known):
        row = ours.commits[commit]
        others = strangers.get((row.run, row.step), ())
        others = [(other, its) for other, its in others if row.thinned or its.thinned]
        origin = _origin(source, commit, row) if others else None
        if origin is None:
            continue  # alone there, or damaged here: then it is not sent, and named
        for other, its in others:
            theirs_origin = _origin(target, other, its)
            if theirs_origin is None:
                unread[commit] = other
            elif theirs_origin == origin:
                found[commit] = other
    return Akin(found, {commit: unread[commit] for commit in unread.keys() - found.keys()})


_origins: dict[CommitId, CommitId] = {}
"""What `_origin` found: a commit's id is the hash of its document, so it holds in every store."""


def _origin(handle: StoreHandle, commit: CommitId, row: CommitRow) -> CommitId | None:
    """The same for all commits that thinnings made of one, and for that one; None if its document
    cannot be read."""
    if commit not in _origins:
        try:
            document = read_document(handle.storage, row.session, commit)
        except (Corrupt, NotFound):
            return None
        _origins[commit], _ = encode_document(_as_if_empty(document))
    return _origins[commit]


def _as_if_empty(document: CommitDocument) -> CommitDocument:
    """The document without all that a thinning changes."""
    return replace(
        document,
        session=SessionId(""),
        tags=(),
        trees=tuple((key, TreeRef(ref.schema, ())) for key, ref in document.trees),
        content="",
        logical_bytes=0,
        new_bytes=0,
        thinned=None,
    )


def _is_settled(
    commit: CommitId, other: CommitId, target: State, compared: Mapping[CommitId, Leaves]
) -> bool:
    """Whether `commit` has nothing to bring to `other`, which has its place in the target: no
    leaves, or none that the target did not take away itself."""
    return (
        commit in target.commits
        or commit in target.replaced
        or target.commits[other].soft > 0
        or compared.get(commit) is Leaves.NO_MORE
    )


def _why_it_stays(
    commit: CommitId,
    row: CommitRow,
    other: CommitId,
    target: State,
    compared: Mapping[CommitId, Leaves],
) -> str:
    """Why `other` does not give way to `commit`, which has leaves that `other` lacks, or nobody
    knows; empty if it does."""
    what = f"its place has {other[:12]}"
    match compared.get(commit):
        case Leaves.MORE:
            refusal = irreplaceable(target, other, row.run, row.metrics, row.thinned)
            why = refusal.why.partition(";")[0] if refusal else ""
            return why and f"its place has what was thinned of it, and {why}"
        case Leaves.OTHERS:
            return f"{what}, and each has leaves that the other lacks, so both stay where they are"
        case _:
            return f"{what}, and which leaves they have cannot be read: run `ckptstore fsck`"


def _cannot_be_read(other: CommitId) -> str:
    what = f"its place may have {other[:12]}, whose document cannot be read"
    return f"{what}: run `ckptstore fsck` there"


def all_commits(state: State, run: str | None = None) -> frozenset[CommitId]:
    """Every commit that is not forgotten, of one run or of all."""
    return frozenset(
        commit for commit, row in state.commits.items() if not row.soft and run in (None, row.run)
    )


def choose(
    source: StoreHandle, refs: Sequence[AnyRef], *, run: str | None, ancestors: bool = False
) -> frozenset[CommitId]:
    """The commits that `refs` name, with `ancestors` also all their ancestors that the store still
    has; without refs all commits of `run`, or of all runs.

    Raises `NotFound` and `InvalidInput` for refs as `checkout` does.
    """
    if not refs:
        if ancestors:
            raise InvalidInput(
                "ancestors needs a commit; name one, or omit it: without a ref every commit is "
                "meant"
            )
        return all_commits(source.log.replay(), run)
    waiting = [find_commit(source, ref, run).id for ref in refs]
    if not ancestors:
        return frozenset(waiting)
    state, found = source.log.replay(), set[CommitId]()
    while waiting:
        commit = waiting.pop()
        row = state.commits.get(commit)
        if row is not None and not row.soft and commit not in found:
            found.add(commit)
            waiting.extend(map(state.in_place_of, row.parents))
    return frozenset(found)


@contextmanager
def other_end(
    place: str | os.PathLike[str],
    *,
    read_only: bool = False,
    like: StoreHandle | None = None,
    storage_options: Mapping[str, Any] | None = None,
    index: str | None = None,
) -> Iterator[StoreHandle]:
    """Open the store at `place`. With `like`, create a missing one with its chunk size and codec,
    and in a directory at least as private. `index` is the database that has, or will have, its log.

    Raises `NotFound` if there is none.
    """
    options = dict(storage_options or {})
    try:
        handle = StoreHandle(place, read_only=read_only, storage_options=options, index=index)
    except NotFound:
        if like is None:
            raise
        # Another process created it at the same time.
        with suppress(Conflict):
            config, root = like.config, like.storage.capabilities.local_root
            init_store(
                place,
                chunk_bytes=config.chunk_bytes,
                codec=config.codec,
                as_private_as=root,
                storage_options=options,
                index=index,
            )
        handle = StoreHandle(place, storage_options=options, index=index)
    try:
        yield handle
    finally:
        handle.close()


def _tag_moves(
    tags: Mapping[str, CommitId], target: State, named: Mapping[CommitId, CommitId]
) -> list[TagMove]:
    """The moves after which each of `tags` names what `named` has for its commit."""
    return [
        TagMove(name, named[commit], target.tags.get(name))
        for name, commit in sorted(tags.items())
        if commit in named and target.tags.get(name) != named[commit]
    ]
