"""Draw the lineage of commits beside a log, newest first: one line per commit. Pure.

A lane is a column with a line down to a commit that follows. A commit takes the leftmost lane that
leads to it, and the other such lanes end there (`╯`). Its second and later parents open lanes (`╮`)
or join the lanes that lead to them (`├`, `┤`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from ckptstore.core.ids import CommitId

_LANES = " ───│╭╮┬│╰╯┴│├┤┼"
"""A lane by the directions in which lines leave it: up 8, down 4, left 2, right 1."""


@dataclass(frozen=True, slots=True)
class Node:
    """A commit to draw. `parents` are among the commits drawn; `cut` says that it has others, which
    are not."""

    id: CommitId
    parents: tuple[CommitId, ...]
    cut: bool = False


def shown(order: Sequence[CommitId], parents: Mapping[CommitId, Sequence[CommitId]]) -> list[Node]:
    """The commits of `order` as nodes. A parent that is not among them is replaced by its nearest
    ancestors that are.

    `parents` may know more commits than `order` has, in any order.
    """
    drawn = frozenset(order)
    nearest: dict[CommitId, tuple[CommitId, ...]] = {}
    for commit in TopologicalSorter(parents).static_order():
        found = (
            near
            for parent in parents.get(commit, ())
            for near in ((parent,) if parent in drawn else nearest[parent])
        )
        nearest[commit] = tuple(dict.fromkeys(found))
    return [
        Node(commit, nearest[commit], cut=bool(parents.get(commit)) and not nearest[commit])
        for commit in order
    ]


def draw(nodes: Sequence[Node]) -> list[str]:
    """One line per node: `●` a commit, `○` one whose parents are not drawn."""
    lanes: list[CommitId | None] = []
    return [_line(node, lanes) for node in nodes]


def _line(node: Node, lanes: list[CommitId | None]) -> str:
    """Draw `node` and move `lanes` on below it."""
    above = [wanted is not None for wanted in lanes]
    arriving = [i for i, wanted in enumerate(lanes) if wanted == node.id]
    here = arriving[0] if arriving else _free(lanes)
    for i in arriving:
        lanes[i] = None
    lanes[here] = node.parents[0] if node.parents else None
    ends = {here, *arriving}
    for parent in node.parents[1:]:
        ends.add(lanes.index(parent) if parent in lanes else _open(lanes, parent, here))
    above += [False] * (len(lanes) - len(above))
    line = ""
    for i, wanted in enumerate(lanes):
        left, right = min(ends) < i <= max(ends), min(ends) <= i < max(ends)
        lane = _LANES[8 * above[i] + 4 * (wanted is not None) + 2 * left + right]
        line += ("○" if node.cut else "●") if i == here else lane
        line += "─" if right else " "
    while lanes and lanes[-1] is None:
        lanes.pop()
    return line.rstrip()


def _free(lanes: list[CommitId | None]) -> int:
    if None in lanes:
        return lanes.index(None)
    lanes.append(None)
    return len(lanes) - 1


def _open(lanes: list[CommitId | None], parent: CommitId, here: int) -> int:
    """A lane to the right of `here` that leads to `parent`."""
    for i in range(here + 1, len(lanes)):
        if lanes[i] is None:
            lanes[i] = parent
            return i
    lanes.append(parent)
    return len(lanes) - 1
