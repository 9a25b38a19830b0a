"""Which parameter of a commit is each parameter of a target optimizer, and does that hold without
names?

Names decide. Where they are not known on both sides, order does, and only if shapes prove it: two
parameters of one shape could have changed places. Pure: what comes in are names, shapes and groups.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckptstore.core.model import Shape


class Parameter(NamedTuple):
    """A parameter on one side. `group` is the number of its group, or None if that is not known.
    Of a committed one, `has_state` says whether the optimizer had any for it."""

    name: str
    group: int | None = None
    shape: Shape | None = None
    has_state: bool = True


class Pairing(NamedTuple):
    """`committed` has, by the target's number of a parameter, that of the commit. `left` and `free`
    are numbers of those without a counterpart, in the commit and in the target. `unproven` are two
    committed parameters that nothing tells apart, if order had to decide."""

    committed: Mapping[int, int]
    left: tuple[int, ...]
    free: tuple[int, ...]
    unproven: tuple[Parameter, Parameter] | None = None


def by_name(
    committed: Sequence[Parameter],
    target: Sequence[Parameter],
    *,
    in_order: bool,
    have_equal_options: Callable[[int | None, int | None], bool],
) -> Pairing:
    """Pair parameters of one name; target parameters without one have the name "".

    With `in_order`, the others are taken in order where both sides have as many of them.
    `have_equal_options` compares two groups of the commit.
    """
    numbers = {each.name: n for n, each in enumerate(target) if each.name}
    found = {numbers[each.name]: n for n, each in enumerate(committed) if each.name in numbers}
    taken = set(found.values())
    left = [n for n in range(len(committed)) if n not in taken]
    free = [n for n in range(len(target)) if n not in found]
    if not in_order or len(left) != len(free):
        return Pairing(found, tuple(left), tuple(free))
    unproven = _unproven(
        [committed[n] for n in left], [target[n] for n in free], have_equal_options
    )
    return Pairing({**found, **dict(zip(free, left, strict=True))}, (), (), unproven)


def _unproven(
    committed: Sequence[Parameter],
    target: Sequence[Parameter],
    have_equal_options: Callable[[int | None, int | None], bool],
) -> tuple[Parameter, Parameter] | None:
    """The first two of `committed` that could stand for each other, judged by shapes, although it
    matters which is which. It does not where both have no state and equal options."""
    alike: dict[object, Parameter] = {}
    for one, there in zip(committed, target, strict=True):
        places: list[object] = [there.shape]
        if one.shape is None or there.shape is None:
            places.append("unknown")
        for place in places:
            first = alike.setdefault(place, one)
            if first is one:
                continue
            if first.has_state or one.has_state or not have_equal_options(first.group, one.group):
                return first, one
    return None


class Sources(NamedTuple):
    """Where the options of each target group come from: the number of a group of the commit, or
    None where it keeps its own. `conflicts` are target groups whose parameters had different
    options; `is_same` says whether both sides divide the parameters alike."""

    of_group: tuple[int | None, ...]
    conflicts: tuple[int, ...]
    is_same: bool


def sources_of(
    committed: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
    pairs: Mapping[int, int],
    have_equal_options: Callable[[int | None, int | None], bool],
) -> Sources:
    """The source of each target group's options. Groups are the numbers of their parameters;
    `pairs` has the committed parameter of a target's. Groups without parameters are taken in
    order."""
    group_of = {n: number for number, group in enumerate(committed) for n in group}
    empty = [number for number, group in enumerate(committed) if not group]
    is_same = len(empty) == sum(not group for group in target)
    found: list[int | None] = []
    conflicts: list[int] = []
    for number, group in enumerate(target):
        there = list(dict.fromkeys(group_of[pairs[n]] for n in group if n in pairs))
        if not group and empty:
            there = [empty.pop(0)]
        is_same = is_same and len(there) <= 1
        if not all(have_equal_options(there[0], other) for other in there[1:]):
            conflicts.append(number)
            there = []
        found.append(there[0] if there else None)
    used = [number for number in found if number is not None]
    return Sources(tuple(found), tuple(conflicts), is_same and len(used) == len(set(used)))
