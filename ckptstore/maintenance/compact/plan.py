"""Which commits are compacted, and which chunks of them share a base? Pure.

A *group* is some consecutive commits of one run, all older than the newest few, which stay as they
are. Chunks at one place of one leaf in the commits of a group are a *place*: one of them is the
base, the others are stored as differences from it.

The settings of the store say up to which commit the groups of each run are finished. That is an
economy: a compaction that does not know it looks at pages of commits that have nothing to code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId
from ckptstore.core.numbers import check_number
from ckptstore.log.state import State
from ckptstore.restore.reader import Tree


@dataclass(frozen=True, slots=True)
class CompactPolicy:
    """What `compact` codes: all but the `newest` commits of each run, `every` so many with one base
    in their middle, or at a commit that has a tag. The last group of a run may have fewer.
    """

    newest: int = 1
    every: int = 8

    def __post_init__(self) -> None:
        check_number("newest", self.newest, "a number of commits, 0 or more", whole=True)
        check_number("every", self.every, "a number of commits, 1 or more", least=1, whole=True)

    @property
    def setting(self) -> tuple[str, ...]:
        """The policy as a setting of the store."""
        return f"newest={self.newest}", f"every={self.every}"


SETTING = "compact"
"""The setting with the policy by which every gc compacts."""


def policy_of(state: State) -> CompactPolicy | None:
    """The policy that the store's settings name; None without one that this version knows."""
    found = state.settings.get(SETTING)
    if not isinstance(found, tuple):
        return None
    numbers = dict(part.partition("=")[::2] for part in found)
    try:
        return CompactPolicy(**{name: int(number) for name, number in numbers.items()})
    except (TypeError, ValueError):
        return None


FINISHED_SETTING = "compacted"
"""The setting that says up to which place of each run the groups are finished."""

Finished: TypeAlias = Mapping[str, int]
"""By run, the place of the last commit of its finished groups."""


def finished_in(state: State) -> dict[str, int]:
    """What the store's settings say is finished, of runs that have commits."""
    found = state.settings.get(FINISHED_SETTING)
    parts = [part.partition(":") for part in found] if isinstance(found, tuple) else []
    runs = {row.run for row in state.commits.values()} if parts else set()
    return {run: int(at) for at, _, run in parts if run in runs and at.isdecimal()}


def finished_setting(finished: Finished) -> tuple[str, ...]:
    """The same as a setting of the store."""
    return tuple(f"{place}:{run}" for run, place in sorted(finished.items()))


@dataclass(frozen=True, slots=True)
class Group:
    """Commits of a run, oldest first; the chunks of number `key` are bases if they can be. The last
    commit has the place `end` in the history. A group that is not `full` will have more commits."""

    run: str
    commits: tuple[CommitId, ...]
    key: int
    end: int
    full: bool


class ChunkSlot(NamedTuple):
    """One place of the leaf of number `leaf`: the chunks that the commits of a group have there, by
    number."""

    leaf: int
    chunks: tuple[tuple[int, ChunkId], ...]


def plan_groups(state: State, policy: CompactPolicy, *, full_only: bool = False) -> list[Group]:
    """The groups of every run that are not finished, oldest first; with `full_only`, without those
    that will have more commits."""
    pinned, finished = frozenset(state.tags.values()), finished_in(state)
    groups: list[Group] = []
    for run, commits in _runs(state).items():
        old = commits[: _old(commits, policy)]
        old = [commit for commit in old if state.commits[commit].place > finished.get(run, 0)]
        for start in range(0, len(old), policy.every):
            some = tuple(old[start : start + policy.every])
            full = len(some) == policy.every
            if full or not full_only:
                end = state.commits[some[-1]].place
                groups.append(Group(run, some, _key(some, pinned), end, full))
    return groups


def newest_commits(state: State, policy: CompactPolicy) -> list[CommitId]:
    """The commits that stay as they are."""
    runs = _runs(state).values()
    return [commit for commits in runs for commit in commits[_old(commits, policy) :]]


def _old(commits: Sequence[CommitId], policy: CompactPolicy) -> int:
    """How many commits of a run are older than those that stay as they are."""
    return max(len(commits) - policy.newest, 0)


def _runs(state: State) -> dict[str, list[CommitId]]:
    """The commits of each run that are not forgotten, oldest first."""
    runs: dict[str, list[CommitId]] = {}
    for commit, row in sorted(state.commits.items(), key=lambda item: item[1].place):
        if not row.soft:
            runs.setdefault(row.run, []).append(commit)
    return runs


def _key(commits: Sequence[CommitId], pinned: frozenset[CommitId]) -> int:
    """The commit with a tag that is nearest to the middle, or else the middle: differences grow
    with the distance."""
    middle = len(commits) // 2
    named = [i for i, commit in enumerate(commits) if commit in pinned] or [middle]
    return min(named, key=lambda i: (abs(i - middle), i))


def places(trees: Sequence[Mapping[str, Tree]]) -> Iterator[ChunkSlot]:
    """The places of a group whose commits have `trees`, leaf by leaf. Leaves correspond if they
    have one path, type, shape and division."""
    leaves: dict[object, list[tuple[int, bytes]]] = {}
    for number, of in enumerate(trees):
        for tree in of.values():
            for i, content in enumerate(tree.contents):
                if content.ids:
                    path, dtype = tree.schema.paths[i], tree.schema.dtypes[i]
                    like = path, dtype, tree.schema.shapes[i], content.boxes, len(content.ids)
                    leaves.setdefault(like, []).append((number, content.ids))
    for leaf, held in enumerate(leaves.values()):
        for at in range(0, len(held[0][1]), CHUNK_ID_BYTES):
            chunks = ((n, ChunkId(ids[at : at + CHUNK_ID_BYTES])) for n, ids in held)
            yield ChunkSlot(leaf, tuple(chunks))


def strips(
    found: Iterable[ChunkSlot], chunk_bytes: int, limit_bytes: int
) -> Iterator[list[ChunkSlot]]:
    """Consecutive places whose chunks are at most `limit_bytes` in one commit, if none is larger
    than `chunk_bytes`."""
    some: list[ChunkSlot] = []
    for place in found:
        some.append(place)
        if len(some) * chunk_bytes >= limit_bytes:
            yield some
            some = []
    if some:
        yield some


def choose_base(candidates: Sequence[tuple[int, ChunkId]], key: int) -> ChunkId:
    """The base of a place's different chunks that are to be coded: that of the key commit, or else
    the nearest."""
    return min(candidates, key=lambda each: (abs(each[0] - key), each[0]))[1]
