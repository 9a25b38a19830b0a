"""How the lineage of commits is drawn beside a log, newest first: one line per commit. Pure.

A lane is a column in which a line runs down to a commit that is still to come. A commit sits in the
leftmost lane that leads to it; the other lanes that lead to it end there (`╯`), and parents beyond
the first open lanes (`╮`) or join those that lead to them (`├`, `┤`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptstore.core.ids import CommitId

ASCII = str.maketrans("●○│─╯╮├┤┼┴┬", "*o|-'.+++'.")
"""For terminals that cannot show the lines."""


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

    def ancestors(start: CommitId) -> tuple[CommitId, ...]:
        pending = [start]
        while pending:
            commit = pending[-1]
            above = parents.get(commit, ())
            if unknown := [p for p in above if p not in drawn and p not in nearest]:
                pending.extend(unknown)
                continue
            found = (
                p for parent in above for p in ([parent] if parent in drawn else nearest[parent])
            )
            nearest[commit] = tuple(dict.fromkeys(found))
            pending.pop()
        return nearest[start]

    return [
        Node(commit, ancestors(commit), bool(parents.get(commit)) and not ancestors(commit))
        for commit in order
    ]


def draw(nodes: Sequence[Node]) -> list[str]:
    """One line per node: `●` a commit, `○` one whose parents are not drawn."""
    lanes: list[CommitId | None] = []
    return [_line(node, lanes) for node in nodes]


def branches(nodes: Sequence[Node]) -> bool:
    """Whether the nodes are more than one linear history."""
    return any(len(line) > 1 for line in draw(nodes))


def _line(node: Node, lanes: list[CommitId | None]) -> str:
    """Draw `node` and move `lanes` on below it."""
    arriving = [i for i, wanted in enumerate(lanes) if wanted == node.id]
    here = arriving[0] if arriving else _free(lanes)
    ending = frozenset(arriving[1:])
    cells = ["│" if wanted is not None else " " for wanted in lanes]
    for i in ending:
        lanes[i] = None
    lanes[here] = node.parents[0] if node.parents else None
    joined = {here}
    for parent in node.parents[1:]:
        joined.add(lanes.index(parent) if parent in lanes else _open(lanes, parent, here))
    cells += [" "] * (len(lanes) - len(cells))
    for i in ending | joined:
        cells[i] = _corner(i in ending, i in joined, cells[i] == "│", i < here)
    cells[here] = "○" if node.cut else "●"
    line = _across(cells, min(joined | ending), max(joined | ending))
    while lanes and lanes[-1] is None:
        lanes.pop()
    return line


def _corner(ends: bool, opens: bool, passes: bool, left: bool) -> str:
    if ends and not opens:
        return "╯"
    if passes:
        return "├" if left else "┤"
    return "╮"


def _across(cells: Sequence[str], first: int, last: int) -> str:
    """The cells, two columns each, with a horizontal line from `first` to `last`."""
    out = []
    for i, cell in enumerate(cells):
        inside = first < i < last
        crossing = (
            {"│": "┼", " ": "─", "╯": "┴", "╮": "┬", "├": "┼", "┤": "┼"}.get(cell, cell)
            if inside
            else cell
        )
        out.append(crossing + ("─" if first <= i < last else " "))
    return "".join(out).rstrip()


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
