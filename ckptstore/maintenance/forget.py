"""Forget commits, bring them back, and set, move and remove tags: each is one log entry.

Until a gc has purged a forgotten commit, `undelete` restores it completely. A tagged commit cannot
be forgotten.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckptstore.core.ids import CommitId, is_hold, parse_tag
from ckptstore.core.model import CommitInfo
from ckptstore.core.text import near
from ckptstore.errors import Conflict, NotFound
from ckptstore.log.admission import Code, Demand, check, newest_spared, one_left, tags_free
from ckptstore.log.entries import Forget, Tag, Undelete
from ckptstore.log.log import Refused
from ckptstore.log.resolve import Resolved, check_there, forgotten_alone, resolve, resolved
from ckptstore.log.state import State, by_age
from ckptstore.maintenance.mover import persist
from ckptstore.maintenance.retention import (
    NOTHING_PINNED,
    Decision,
    ForgetPlan,
    Policy,
    Thin,
    check_metrics,
    plan_commits,
    plan_policies,
)
from ckptstore.maintenance.thin import Leaves, thin_commit
from ckptstore.repository.resolve_ref import AnyRef, find_commit, through_pointers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader
from ckptstore.storage.reserve import with_room

logger = logging.getLogger("ckptstore")

ATTEMPTS = 5
_CHANGED_MEANWHILE = frozenset({Code.TAGGED, Code.NEWEST, Code.FORGOTTEN, Code.NO_SUCH_COMMIT})


def forget_by_policy(
    handle: StoreHandle,
    policies: Sequence[Policy],
    reader: Reader,
    *,
    run: str | None = None,
    dry_run: bool = False,
    pinned: Mapping[CommitId, str] = NOTHING_PINNED,
) -> ForgetPlan:
    """Forget what no policy keeps, and thin what they thin, in `run` or in all runs. Returns the
    executed plan, or with `dry_run` the plan alone. Commits in `pinned` stay whole, for the reason
    there.

    Raises `InvalidInput` without any policy, for a metric that no commit of the store has, unless
    there is nothing to forget, and for a glob that matches no leaf. Logs the notes of an executed
    plan.
    """
    done: list[Decision] = []
    for _ in range(ATTEMPTS):
        state = handle.log.replay()
        plan = plan_retention(handle, state, policies, reader, run, pinned)
        if plan.forgotten or plan.thinned:
            check_metrics(state, policies, run)
        by_age = sorted((*plan.decisions, *done), key=lambda each: each.row.age, reverse=True)
        whole = replace(plan, decisions=tuple(by_age))
        if dry_run or not (plan.forgotten or plan.thinned):
            return whole
        try:
            carry_out(handle, plan, reader, done=done)
        except Refused as error:
            if error.refusal.code not in _CHANGED_MEANWHILE:
                raise
            last = error
            continue
        return whole
    raise Conflict(
        f"others changed the store {ATTEMPTS} times while forget looked; repeat it"
    ) from last


def carry_out(
    handle: StoreHandle,
    plan: ForgetPlan,
    reader: Reader,
    *,
    all_commits: bool = False,
    done: list[Decision] | None = None,
) -> None:
    """Forget and thin exactly what a plan says. Raises `Refused` for what others have pinned,
    forgotten or purged meanwhile, and unless `all_commits` for what is now the newest of a run;
    what was `done` before is added there. Logs the notes of the plan."""
    done = [] if done is None else done
    if plan.forgotten:
        spared = newest_spared([each.commit for each in plan.forgotten])
        _append(handle, plan, None if all_commits else spared)
        done += plan.forgotten
    for decision in plan.thinned:
        thin_commit(handle, reader, decision.commit, decision.thin)
        done.append(decision)
    for note in plan.notes:
        logger.warning("%s", note)


def plan_retention(
    handle: StoreHandle,
    state: State,
    policies: Sequence[Policy],
    reader: Reader,
    run: str | None = None,
    pinned: Mapping[CommitId, str] = NOTHING_PINNED,
) -> ForgetPlan:
    """`plan_policies`, with what the commits have to be thinned. Raises `InvalidInput` for a glob
    that matches no leaf."""
    globs = [glob for policy in policies if isinstance(policy, Thin) for glob in policy.globs]
    if not globs:
        return plan_policies(state, policies, run, pinned=pinned)
    leaves = Leaves(handle, reader)
    leaves.check(globs)
    return plan_policies(state, policies, run, leaves.matching, pinned)


def forget_commits(
    handle: StoreHandle,
    commits: Iterable[CommitId],
    *,
    all_commits: bool = False,
    reason: str = "",
    dry_run: bool = False,
) -> ForgetPlan:
    """Forget exactly these commits, or none of them. With `all_commits`, a run may lose its last
    one. Raises `Conflict` if one of them is tagged or forgotten already, or is the last of its run,
    and `NotFound` if it is unknown."""
    state = handle.log.replay()
    wanted = tuple(dict.fromkeys(commits))
    if unknown := [c for c in wanted if c not in state.commits]:
        raise _no_such_commit(unknown)
    plan = plan_commits(state, wanted, reason)
    demand = None if all_commits else one_left(wanted)
    refusal = check(state, _body(plan)) or (demand(state) if demand else None)
    if refusal:
        raise Conflict(f"{refusal.why}; nothing was forgotten")
    if not dry_run and wanted:
        _append(handle, plan, demand)
    return plan


def forget_run(handle: StoreHandle, run: str, *, dry_run: bool = False) -> ForgetPlan:
    """Forget every commit of a run. Raises `NotFound` for a run without commits, `Conflict` if one
    of them has a tag; nothing was forgotten then."""
    state = handle.log.replay()
    check_there(state, run)
    commits = [commit for commit, _ in by_age(state, run)]
    reason = f"all of run {run}"
    return forget_commits(handle, commits, all_commits=True, reason=reason, dry_run=dry_run)


def find_forgotten(handle: StoreHandle, ref: AnyRef, run: str | None) -> CommitId:
    """The forgotten commit that `ref` names; for a ref that names none of them, the commit that it
    names otherwise. Raises as `find_commit`."""
    forgotten = forgotten_alone(handle.log.replay())
    try:
        return through_pointers(ref, lambda plain: resolve(forgotten, plain, run)).id
    except NotFound as error:
        with suppress(NotFound):
            return find_commit(handle, ref, run).id
        if not forgotten.commits:
            raise NotFound(
                "no commit is forgotten: none was, or a gc has purged it; `ckptstore log` lists "
                "the commits of the store"
            ) from error
        raise NotFound(
            f"of the forgotten commits: {error}; `ckptstore log --forgotten` lists them"
        ) from error


def all_forgotten(handle: StoreHandle, run: str | None) -> list[CommitId]:
    """The forgotten commits, newest first; of those that had one place in the history, the first,
    which has the most leaves."""
    rows = handle.log.replay().commits.items()
    soft = [(row.age, commit) for commit, row in rows if row.soft and run in (None, row.run)]
    return list({place: commit for (place, _), commit in sorted(soft, reverse=True)}.values())


def undelete(handle: StoreHandle, reader: Reader, commits: Sequence[CommitId]) -> None:
    """Make forgotten commits roots again, and their packs live.

    Raises `NotFound` for a commit that a gc has purged, `Conflict` for one that is not forgotten.
    """
    if not commits:
        return
    for _ in range(ATTEMPTS):
        state = handle.log.replay()
        if purged := [c for c in commits if c not in state.commits]:
            raise _no_such_commit(purged)
        reused = frozenset().union(
            *(reader.packs_of(reader.document(state.commits[c].session, c)) for c in commits)
        )
        try:
            body = Undelete(tuple(commits), reused)
            with_room(handle.storage, partial(handle.log.append, body))
        except Refused as error:
            if error.refusal.code not in (Code.PACKS_GONE, Code.NO_SUCH_COMMIT):
                raise Conflict(error.refusal.why) from error
            last = error
            handle.objects.sync(handle.log.state, thorough=True)
            continue
        return
    raise Conflict(
        f"gc kept moving the chunks of these commits ({ATTEMPTS} times); repeat undelete"
    ) from last


def _append(handle: StoreHandle, plan: ForgetPlan, demand: Demand | None) -> None:
    with_room(handle.storage, partial(handle.log.append, _body(plan), demand=demand))


def _body(plan: ForgetPlan) -> Forget:
    return Forget(tuple(decision.commit for decision in plan.forgotten), plan.reason)


def _no_such_commit(commits: Sequence[CommitId]) -> NotFound:
    few = ", ".join(commit[:12] for commit in commits[:4])
    return NotFound(
        f"no commit {few}: never made here, or deleted by gc; `ckptstore log` lists "
        "the commits of the store"
    )


def set_tag(
    handle: StoreHandle,
    reader: Reader,
    name: str,
    info: CommitInfo | Resolved,
    *,
    move: bool = True,
) -> None:
    """Set tag `name` to the commit and renew its packs; retries if a gc moved them meanwhile.

    Raises `Conflict` if the commit was forgotten meanwhile, and, without `move`, if the tag names
    another one.
    """
    handle.check_writable()
    parse_tag(name)
    document = reader.document(info.session, info.id)
    demand = None if move else tags_free((name,), info.id)
    append = handle.log.append
    persist(handle, lambda: append(Tag(name, info.id, reader.packs_of(document)), demand=demand))
    handle.follow()


def remove_tags(handle: StoreHandle, *names: str) -> dict[str, CommitId]:
    """Remove tags, and return the commit of each, which stays. Raises `NotFound` for an unknown
    tag, `Conflict` for the hold of a hollow directory; nothing was removed then."""
    handle.check_writable()
    for name in names:
        refuse_hold(name)
    there = handle.log.replay().tags
    for name in names:
        if name not in there:
            raise NotFound(
                f"no tag {name!r}{near(name, there)}; nothing was removed, `ckptstore tag` lists "
                "the tags"
            )
    removed = {name: there[name] for name in names}
    for name in removed:
        handle.log.append(Tag(name, None, frozenset()))
    handle.follow()
    return removed


def refuse_hold(name: str) -> None:
    """Raise `Conflict` for the tag of a hollow directory, which only a release removes."""
    if is_hold(name):
        raise Conflict(
            f"{name} keeps the commit of a hollow directory and of its copies; if none of them is "
            f"left, `ckptstore release {name}` removes it"
        )


def rename_tag(handle: StoreHandle, reader: Reader, old: str, new: str) -> CommitId:
    """Rename a tag, and return its commit. Between the two log entries the commit has both names.

    Raises `NotFound` for an unknown tag, `Conflict` if `new` names another commit, or `old` was
    moved to one meanwhile: then both tags stay.
    """
    refuse_hold(old)
    state = handle.log.replay()
    commit = state.tags.get(old)
    if commit is None:
        raise NotFound(f"no tag {old!r}{near(old, state.tags)}; `ckptstore tag` lists the tags")
    if state.tags.get(new, commit) != commit:
        raise Conflict(
            f"tag {new!r} names another commit, {state.tags[new][:12]}; nothing was renamed, "
            f"`ckptstore tag -d {new}` removes that tag"
        )
    if new != old:
        set_tag(handle, reader, new, resolved(state, commit), move=False)
        # A tag that somebody has moved since then is theirs.
        handle.log.append(Tag(old, None, frozenset()), demand=tags_free((old,), commit))
        handle.follow()
    return commit
