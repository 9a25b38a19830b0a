"""Which commit does a ref name in the state of a log, and what does an error suggest if there is
none? Pure."""

from dataclasses import replace
from typing import NamedTuple

from rpds import HashTrieMap

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.core.refs import Ancestor, Best, Latest, Name, Step, find, parse_ref
from ckptstore.core.text import near, selector
from ckptstore.errors import NotFound
from ckptstore.log.state import CommitRow, State, by_age, newest_of


class Resolved(NamedTuple):
    """A commit of the log, with the tags that name it."""

    id: CommitId
    session: SessionId
    step: int | None
    tags: tuple[str, ...]


def resolve(state: State, text: str | int, run: str | None) -> Resolved:
    """The commit that a ref names, in `run` if it names none.

    Raises `NotFound` with the nearest names, and as `core.refs.parse_ref` and `find`.
    """
    ref = parse_ref(text)
    commit = find(state, ref, run)
    if commit is None or commit not in state.commits:
        named = ref.base if isinstance(ref, Ancestor) else ref
        raise NotFound(_unknown(state, named, getattr(named, "run", None) or run))
    return resolved(state, commit)


def check_there(state: State, run: str) -> None:
    """Raise `NotFound` for a run of which no commit is there, with similar names."""
    rows = state.commits.values()
    if any(row.run == run and not row.soft for row in rows):
        return
    if any(row.run == run for row in rows):
        raise NotFound(
            f"every commit of run {run!r} is forgotten; `ckptstore undelete --run {run} --all` "
            "brings back what no gc has purged"
        )
    runs = list(dict.fromkeys(row.run for _, row in by_age(state, None)))
    there = f"runs with commits: {', '.join(runs[:10])}" if runs else "the store has no commits"
    raise NotFound(f"no run {run!r}{near(run, runs)}; {there}")


def newest_first(state: State, run: str) -> list[Resolved]:
    """The commits of `run` that are not forgotten, newest first."""
    return [resolved(state, commit) for commit, _ in by_age(state, run)]


def nearest_first(state: State, commit: CommitId, path: str) -> list[Resolved]:
    """The commits in the run of `commit` from which no thinning removed the leaf `path`, those of
    the nearest steps first."""
    if (to := state.commits.get(commit)) is None:
        return []

    def distance(item: tuple[CommitId, CommitRow]) -> tuple[int, int]:
        row = item[1]
        return abs((row.step or 0) - (to.step or 0)), abs(row.place - to.place)

    rows = [
        (commit, row)
        for commit, row in by_age(state, to.run)
        if not (row.thinned and selector(row.thinned)(path))
    ]
    return [resolved(state, commit) for commit, _ in sorted(rows, key=distance)]


def forgotten_alone(state: State) -> State:
    """`state` with its forgotten commits alone, as if they were not forgotten: for refs that name
    them."""
    soft = [(commit, row._replace(soft=0)) for commit, row in state.commits.items() if row.soft]
    rows = HashTrieMap(soft)
    runs = HashTrieMap(newest_of(rows, {row.run for _, row in soft}))
    return replace(state, commits=rows, tags=HashTrieMap(), runs=runs)


def resolved(state: State, commit: CommitId) -> Resolved:
    """The log's record of a commit. Raises `NotFound` if a gc has purged it."""
    if (row := state.commits.get(commit)) is None:
        raise NotFound(f"there is no commit {commit[:12]} any more: a gc has purged it; repeat it")
    return Resolved(
        commit,
        row.session,
        row.step,
        tuple(sorted(tag for tag, named in state.tags.items() if named == commit)),
    )


def _unknown(state: State, ref: Step | Latest | Best | Name, run: str | None) -> str:
    """Error text: the missing commit, and similar names that exist."""
    rows, where = by_age(state, None), "" if run is None else f" in run {run!r}"
    runs = ", ".join(list(dict.fromkeys(row.run for _, row in rows))[:10])
    there = f"runs with commits: {runs}" if runs else "the store has no commits"
    match ref:
        case Step():
            steps = {row.step for _, row in by_age(state, run) if row.step is not None}
            nearest = sorted(steps, key=lambda step: abs(step - ref.step))[:6]
            if nearest:
                there = f"the nearest steps are {', '.join(map(str, sorted(nearest)))}"
            forgotten = {
                row.run for row in state.commits.values() if row.soft and row.step == ref.step
            }
            if forgotten and (run is None or run in forgotten):
                name = f"{run or min(forgotten)}@{ref.step}"
                return (
                    f"the commit of step {ref.step}{where} is forgotten: `ckptstore undelete "
                    f"{name}` brings it back until a gc purges it; {there}"
                )
            return f"no commit of step {ref.step}{where}; {there}"
        case Best():
            runs_with = {name: row.run for _, row in reversed(rows) for name, _ in row.metrics}
            metrics = {name for _, row in by_age(state, run) for name, _ in row.metrics}
            if ref.metric in metrics:
                return f"every commit{where} that has the metric {ref.metric!r} has NaN for it"
            if other := runs_with.get(ref.metric):
                there = f"run {other!r} has it: '{other}@best:{ref.metric}'"
            else:
                names = sorted(metrics or runs_with)[:20]
                are = "are" if len(names) > 1 else "is"
                there = f"there {are} {', '.join(names)}" if names else "none has metrics"
            return f"no commit{where} has a metric {ref.metric!r}; {there}"
        case Name():
            # Imported here, because refs that are found need not wait for it.
            from difflib import get_close_matches

            tags = sorted(state.tags)
            near = get_close_matches(ref.name, tags, n=5, cutoff=0.5) or tags[:5]
            tagged = f"there are the tags {', '.join(near)}" if near else "there are no tags"
            there = tagged if near else f"{tagged}; {there}"
            if any(row.run == ref.name for _, row in rows):
                there = f"it is a run, and '{ref.name}@latest' names its newest commit; {tagged}"
            if get_close_matches(ref.name, ["latest"], cutoff=0.7):
                there = f"did you mean 'latest'?; {there}"
            return f"no tag {'or commit ' if ref.prefix else ''}{ref.name!r}; {there}"
    return f"no commit{where} yet; {there}"
