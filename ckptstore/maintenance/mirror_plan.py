"""Planning a mirror run: the other store, opened or created, the selected commits, and from both
folded logs the commits and tags that the target lacks.

A commit is the same in every store: its document is copied byte for byte, so id, parents and time
stay. Retention is separate for each store: commits forgotten in the target are not sent again.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.log.admission import check
from ckptstore.log.entries import Forget
from ckptstore.log.state import CommitRow, State
from ckptstore.repository.init_store import init_store
from ckptstore.repository.resolve_ref import AnyRef, find_commit
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """A commit to send; `session` names its document in the source, `tags` appear with it. In the
    target it takes the place of `replaces`, which was thinned more."""

    commit: CommitId
    session: SessionId
    run: str
    step: int | None
    tags: tuple[str, ...]
    replaces: CommitId | None = None


@dataclass(frozen=True, slots=True)
class TagMove:
    """A tag that is to name `commit` in the target, where it names `previous` now, or nothing.
    Where the target has more or fewer leaves of the tagged commit, `commit` is its own."""

    tag: str
    commit: CommitId
    previous: CommitId | None

    def __str__(self) -> str:
        there = f"{self.previous[:12]} there" if self.previous else "absent there"
        return f"{self.tag} is {there} and {self.commit[:12]} here"


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        return f"<mirror plan: {len(self.commits)} commits, {len(self.tags)} tags>"


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
        (row.age, commit, row) for commit, row in source.commits.items() if commit in wanted
    )
    there = counterparts(source, target, [commit for _, commit, _ in rows])
    missing = [
        (commit, row)
        for _, commit, row in rows
        if (other := there.get(commit)) is None or _is_fuller(commit, row, other, target)
    ]
    forgotten = tuple(
        commit for _, commit, _ in rows if commit in there and target.commits[there[commit]].soft
    )
    named = there | {commit: commit for commit, _ in missing}
    for commit in forgotten:
        del named[commit]
    moves = _tag_moves(source, target, named) if tags else []
    rejected = tuple(move for move in moves if move.previous is not None and not force)
    allowed = [move for move in moves if move not in rejected]
    by_commit: dict[CommitId, list[str]] = {}
    for move in allowed:
        by_commit.setdefault(move.commit, []).append(move.tag)
    return MirrorPlan(
        tuple(
            CommitTransfer(
                commit,
                row.session,
                row.run,
                row.step,
                tuple(by_commit.get(commit, ())),
                there.get(commit),
            )
            for commit, row in missing
        ),
        tuple(move for move in allowed if move.commit in target.commits),
        rejected,
        forgotten,
        len(rows) - len(missing) - len(forgotten),
    )


def counterparts(
    source: State, target: State, commits: Sequence[CommitId]
) -> dict[CommitId, CommitId]:
    """For each of `commits` the one that the target has in its place: itself, or what a thinning
    made of it, or made it of. One that is not forgotten there comes before one that is."""
    places = defaultdict(set)
    for commit in source.replaced:
        places[source.in_place_of(commit)].add(commit)
    found = {}
    for commit in commits:
        last = source.in_place_of(commit)
        kin = {target.in_place_of(each) for each in (commit, last, *places.get(last, ()))}
        there = sorted(
            {commit, *kin} & set(target.commits),
            key=lambda c: (target.commits[c].soft > 0, c != commit),
        )
        if there:
            found[commit] = there[0]
    return found


def _is_fuller(commit: CommitId, row: CommitRow, other: CommitId, target: State) -> bool:
    """Whether `commit` has leaves that `other`, which has its place in the target, lost elsewhere,
    and may take that place."""
    lost = target.commits[other].thinned
    return (
        commit not in target.commits
        and commit not in target.replaced
        and not set(lost) <= set(row.thinned)
        and check(target, Forget((other,), "")) is None
    )


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
            waiting.extend(row.parents)
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


def _tag_moves(source: State, target: State, named: Mapping[CommitId, CommitId]) -> list[TagMove]:
    """The moves after which each tag of the source names what `named` has for its commit."""
    return [
        TagMove(name, named[commit], target.tags.get(name))
        for name, commit in sorted(source.tags.items())
        if commit in named and target.tags.get(name) != named[commit]
    ]
