"""Which parameter of a commit is each parameter of a target optimizer, and does that hold without
names?

Names decide. Where they are not known on both sides, order does, and only if shapes prove it: two
parameters of one shape could have changed places. Pure: what comes in are names, shapes and groups.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptstore.core.model import Shape


class Parameter(NamedTuple):
    """A parameter on one side: its number there, its key in the state, its name, "" if that is
    not known, and the number of its group.

    Of a committed one, `has_state` says whether the optimizer had any for it, and `has_own_options`
    whether the options of its group were those of this rank. `tensor` is that of a target's.
    """

    number: int
    key: int | str
    name: str = ""
    group: int = 0
    shape: Shape | None = None
    has_state: bool = True
    has_own_options: bool = True
    tensor: Any = None


class Pair(NamedTuple):
    """A parameter of the commit, and the target's that it is."""

    committed: Parameter
    target: Parameter


class Pairing(NamedTuple):
    """Which parameter is which. `left` and `free` are without a counterpart, in the commit and in
    the target. `unproven` are two committed parameters that nothing tells apart, if order had to
    decide; `contradicted` are a committed one and the target's in its place, of another shape."""

    pairs: tuple[Pair, ...]
    left: tuple[Parameter, ...] = ()
    free: tuple[Parameter, ...] = ()
    unproven: tuple[Parameter, Parameter] | None = None
    contradicted: Pair | None = None


def by_name(
    committed: Sequence[Parameter],
    target: Sequence[Parameter],
    *,
    in_order: bool,
    have_equal_options: Callable[[int, int], bool],
) -> Pairing:
    """Pair parameters of one name.

    With `in_order`, the others are taken in order where both sides have as many of them.
    `have_equal_options` compares two groups of the commit.
    """
    named = {each.name: each for each in target if each.name}
    known = [Pair(one, named[one.name]) for one in committed if one.name in named]
    found = {pair.target.number: pair for pair in known}
    taken = {pair.committed.number for pair in found.values()}
    left = tuple(one for one in committed if one.number not in taken)
    free = tuple(each for each in target if each.number not in found)
    pairs = tuple(found.values())
    if not in_order or len(left) != len(free):
        return Pairing(pairs, left, free)
    in_place = tuple(map(Pair, left, free))
    contradicted = next(filter(_is_contradicted, in_place), None)
    unproven = _unproven(in_place, have_equal_options)
    return Pairing((*pairs, *in_place), unproven=unproven, contradicted=contradicted)


def _is_contradicted(pair: Pair) -> bool:
    shapes = {pair.committed.shape, pair.target.shape}
    return None not in shapes and len(shapes) > 1


def _unproven(
    pairs: Sequence[Pair], have_equal_options: Callable[[int, int], bool]
) -> tuple[Parameter, Parameter] | None:
    """The first two committed ones that could stand for each other, judged by shapes, although it
    matters which is which. It does not where both have no state and equal options. If one shape is
    not known, none proves anything."""
    are_known = all(each.shape is not None for pair in pairs for each in pair)
    alike: dict[Shape | None, Parameter] = {}
    for one, there in pairs:
        first = alike.setdefault(there.shape if are_known else None, one)
        if first is one:
            continue
        if first.has_state or one.has_state or not have_equal_options(first.group, one.group):
            return first, one
    return None


class Sources(NamedTuple):
    """Where the options of each target group come from: by its number that of a group of the
    commit, or None where it keeps its own. `conflicts` are target groups whose parameters had
    different options; `is_same` says whether both sides divide the parameters alike."""

    of_group: Mapping[int, int | None]
    conflicts: tuple[int, ...]
    is_same: bool


def by_group(parameters: Iterable[Parameter], groups: int) -> dict[int, list[Parameter]]:
    """The parameters of each of so many groups, by its number."""
    found: dict[int, list[Parameter]] = {number: [] for number in range(groups)}
    for each in parameters:
        found[each.group].append(each)
    return found


def sources_of(
    empty: Iterable[int],
    target: Mapping[int, Sequence[Parameter]],
    pairs: Iterable[Pair],
    have_equal_options: Callable[[int, int], bool],
) -> Sources:
    """The source of each target group's options. `empty` are the groups of the commit without
    parameters, which are taken in order."""
    group_of = {there.number: one.group for one, there in pairs}
    left = list(empty)
    is_same = len(left) == sum(not group for group in target.values())
    found: dict[int, int | None] = {}
    conflicts: list[int] = []
    for number, group in target.items():
        paired = (group_of[each.number] for each in group if each.number in group_of)
        there = list(dict.fromkeys(paired))
        if not group and left:
            there = [left.pop(0)]
        is_same = is_same and len(there) <= 1
        if not all(have_equal_options(there[0], other) for other in there[1:]):
            conflicts.append(number)
            there = []
        found[number] = there[0] if there else None
    used = [number for number in found.values() if number is not None]
    return Sources(found, tuple(conflicts), is_same and len(used) == len(set(used)))
