"""Questions about a history: where did two runs part, and which commit was the first bad one?

Metadata decides where it can; tensors are read only of the commits that remain.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptstore import Store
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.handles import AnyRef
from ckptstore.plugin.model import CommitId, CommitInfo
from ckptstore.plugin.reading import Leaf, leaf_of
from ckptstore.plugin.snapshots import Select, Snapshot, contents_of
from ckptstore.plugin.stores import log_with_forgotten, nearest_whole
from ckptstore.plugin.text import selector
from ckptstore.plugin.writing import is_floating
from ckptstore.plugins.reports.difference import Difference

if TYPE_CHECKING:
    import torch

SLICE_BYTES = 64 << 20
"""Tensors are read in slices of about this size."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part.

    They are equal at `equal_steps`; `a` and `b` are their commits of the first step at which they
    are not, and `difference` has the leaves, in the order of the state. Without such a step, `a`
    and `b` are None. `thinned` are leaves that could not be compared at some steps.
    """

    equal_steps: tuple[int, ...]
    a: CommitInfo | None
    b: CommitInfo | None
    difference: Difference
    thinned: tuple["NotCompared", ...] = ()


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Leaves that were thinned away from a run's commits at `steps`. `nearest` is the commit of
    this run with the nearest step, `nearest_step`, that has the first of them; None without one."""

    paths: tuple[str, ...]
    run: str
    steps: tuple[int, ...]
    nearest: CommitId | None
    nearest_step: int | None


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a tensor of floats is from another: the largest absolute difference of two elements,
    and the norm of the difference by that of the first tensor."""

    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class Bisection:
    """The first bad commit, the last good one before it, and how many were looked at."""

    first_bad: CommitId
    last_good: CommitId
    looked_at: int


def parting(store: Store, run_a: str, run_b: str, *, select: Select = "*") -> Parting:
    """Find the first step at which two runs differ that should be equal.

    Compares the content ids of their commits step by step, and reads no tensor. Of several commits
    of a step, the newest counts. A leaf that was thinned away from one of them is no difference.

    Args:
        store: The store that has both runs.
        run_a: One run.
        run_b: The other.
        select: Leaves to compare, a glob or several. What may differ, such as the time, is left out
            so: `"model/**"`.

    Raises:
        NotFound: A run has no commits, or they have no step in common.

    Example:
        >>> parting(store, "before-upgrade", "after-upgrade").a.step
        250
    """
    of_a, of_b = (_by_step(store, run) for run in (run_a, run_b))
    common = sorted(of_a.keys() & of_b.keys())
    if not common:
        raise NotFound(
            f"runs {run_a} and {run_b} have no step in common: {_steps_text(of_a)} and "
            f"{_steps_text(of_b)}; commit both at the same steps"
        )
    runs, parted = {run_a: of_a, run_b: of_b}, None
    thinned: dict[tuple[str, str], list[int]] = {}
    for number, step in enumerate(common):
        a, b = of_a[step], of_b[step]
        if a.content == b.content and not a.thinned:
            continue
        difference = _selected(store.diff(a.id, b.id), select)
        is_gone = selector(a.thinned) if a.thinned else lambda path: False
        for path in difference.thinned:
            thinned.setdefault((run_a if is_gone(path) else run_b, path), []).append(step)
        if difference.changes:
            parted = Parting(tuple(common[:number]), a, b, difference)
            break
    found = parted or Parting(tuple(common), None, None, Difference((), 0))
    return replace(found, thinned=_not_compared(store, runs, thinned))


def _not_compared(
    store: Store,
    runs: Mapping[str, Mapping[int, CommitInfo]],
    thinned: Mapping[tuple[str, str], Sequence[int]],
) -> tuple[NotCompared, ...]:
    """`thinned` has the steps at which a leaf is gone, by its run and path."""
    groups = defaultdict[tuple[str, tuple[int, ...]], list[str]](list)
    for (run, path), steps in thinned.items():
        groups[run, tuple(steps)].append(path)
    found = []
    for (run, steps), paths in groups.items():
        last = runs[run][steps[-1]].id
        nearest = nearest_whole(store, last, paths[0])
        there = (nearest.id, nearest.step) if nearest else (None, None)
        found.append(NotCompared(tuple(paths), run, steps, *there))
    return tuple(found)


def _by_step(store: Store, run: str) -> dict[int, CommitInfo]:
    found = {info.step: info for info in reversed(store.log(run=run)) if info.step is not None}
    if not found:
        runs = ", ".join(store.runs()) or "none"
        raise NotFound(f"run {run} has no commits with a step; the runs are {runs}")
    return found


def _steps_text(found: Mapping[int, CommitInfo]) -> str:
    return f"{min(found)} to {max(found)}" if len(found) > 1 else str(min(found))


def _selected(difference: Difference, select: Select) -> Difference:
    is_selected = selector(select)
    changes = tuple(change for change in difference.changes if is_selected(change.path))
    thinned = tuple(filter(is_selected, difference.thinned))
    return replace(difference, changes=changes, thinned=thinned)


def distance(a: Snapshot, b: Snapshot, path: str) -> Distance | None:
    """How far tensor `path` of `b` is from that of `a`; None unless both are tensors of floats of
    one shape. Reads both, a slice at a time, in double precision. The numbers are NaN if a tensor
    has a NaN."""
    mine, other = (_leaf(snapshot, path) for snapshot in (a, b))
    if mine.shape != other.shape or not (_is_floating(mine) and _is_floating(other)):
        return None
    gaps, squares, norm = [], 0.0, 0.0
    for start, stop in _slices(mine if mine.nbytes > other.nbytes else other):
        x, y = (_read(snapshot, leaf, start, stop) for snapshot, leaf in ((a, mine), (b, other)))
        gap = (y - x).abs()
        gaps.append(gap.max() if gap.numel() else gap.new_zeros(()))
        squares, norm = squares + float(gap.square().sum()), norm + float(x.square().sum())
    largest = max(map(float, gaps), key=lambda gap: (math.isnan(gap), gap), default=0.0)
    relative = math.sqrt(squares / norm) if norm else math.copysign(math.inf, squares)
    return Distance(largest, relative if squares else 0.0)


def bad_number(snapshot: Snapshot, select: Select = "*") -> str | None:
    """The path of the first selected tensor with a NaN or an infinity; None without any."""
    for leaf in _floats(snapshot, select):
        for start, stop in _slices(leaf):
            if not _read(snapshot, leaf, start, stop).isfinite().all():
                return leaf.path
    return None


def norm(snapshot: Snapshot, select: Select) -> float:
    """The Euclidean norm of all selected tensors of floats together."""
    return math.sqrt(
        sum(
            float(_read(snapshot, leaf, start, stop).square().sum())
            for leaf in _floats(snapshot, select)
            for start, stop in _slices(leaf)
        )
    )


def _leaf(snapshot: Snapshot, path: str) -> Leaf:
    return leaf_of(*contents_of(snapshot).find(path))


def _floats(snapshot: Snapshot, select: Select) -> Iterator[Leaf]:
    """The selected tensors of floats that no thinning has taken."""
    return (leaf for leaf in snapshot.leaves(select) if _is_floating(leaf) and not leaf.gone)


def _is_floating(leaf: Leaf) -> bool:
    return leaf.kind == "tensor" and is_floating(leaf.dtype) and "float4" not in leaf.dtype


def _slices(leaf: Leaf) -> Iterator[tuple[int, int]]:
    """Slices of a tensor's first dimension; one of nothing for a tensor without dimensions."""
    if not leaf.shape:
        yield 0, 0
        return
    count = leaf.shape[0]
    rows = max(1, count * SLICE_BYTES // max(leaf.nbytes, 1))
    yield from ((start, min(start + rows, count)) for start in range(0, count, rows))


def _read(snapshot: Snapshot, leaf: Leaf, start: int, stop: int) -> "torch.Tensor":
    region = slice(start, stop) if leaf.shape else None
    tensor: torch.Tensor = snapshot.read(leaf.path, region)
    return tensor.double()


def bisect(
    store: Store,
    good: AnyRef,
    bad: AnyRef,
    is_bad: Callable[[Snapshot], bool],
    *,
    known: MutableMapping[CommitId, bool] | None = None,
) -> Bisection:
    """Find the first bad commit among the descendants of `good` that lead to `bad`.

    Looks at as few commits as possible: about log2 of those between. They follow first parents,
    without forgotten and purged ones. Assumes that every commit behind a bad one is bad.

    Args:
        store: The store.
        good: A commit that is good.
        bad: A later one that is bad.
        is_bad: Says of a commit whether it is bad.
        known: Verdicts, which are used and added to, so that a bisection can be taken up again.

    Raises:
        InvalidInput: `good` is no ancestor of `bad`.

    Example:
        >>> bisect(store, 100, "latest", lambda snap: bad_number(snap) is not None).first_bad
        '3f0c…'
    """
    line = _line(store, *(store.checkout(ref).id for ref in (good, bad)))
    known = {} if known is None else known
    low, high, looked_at = 0, len(line) - 1, 0
    while high - low > 1:
        middle = (low + high) // 2
        commit = line[middle]
        if commit not in known:
            known[commit] = is_bad(store.checkout(commit))
            looked_at += 1
        low, high = (low, middle) if known[commit] else (middle, high)
    return Bisection(line[high], line[low], looked_at)


def _line(store: Store, first: CommitId, last: CommitId) -> list[CommitId]:
    """The commits from `first` to `last`, both included, by first parents.

    Forgotten commits between them are left out. A commit whose parent was purged follows the one
    before it in its run.
    """
    history = log_with_forgotten(store)
    numbers = {info.id: number for number, info in enumerate(history)}
    at, line = numbers[last], [last]
    while history[at].id != first:
        before = _before(history, numbers, at)
        if before is None:
            raise InvalidInput(
                f"commit {first[:12]} is no ancestor of {last[:12]}, whose line begins with "
                f"{history[at].id[:12]}; give a good commit of that line (`ckptstore log --graph`)"
            )
        at = before
        if not history[at].forgotten or history[at].id == first:
            line.append(history[at].id)
    if len(line) < 2:
        raise InvalidInput(f"{first[:12]} was named as good and as bad; name two commits")
    return line[::-1]


def _before(history: Sequence[CommitInfo], numbers: Mapping[CommitId, int], at: int) -> int | None:
    """Where the commit is that `history[at]` follows; `history` begins with the newest."""
    info = history[at]
    if not info.parents:
        return None
    if (parent := numbers.get(info.parents[0])) is not None:
        return parent
    return next((i for i in range(at + 1, len(history)) if history[i].run == info.run), None)
