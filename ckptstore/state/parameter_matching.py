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
    committed parameters that nothing tells apart, if order had to decide; `contradicted` are a
    committed one and the target's in its place, of another shape."""

    committed: Mapping[int, int]
    left: tuple[int, ...]
    free: tuple[int, ...]
    unproven: tuple[Parameter, Parameter] | None = None
    contradicted: tuple[Parameter, Parameter] | None = None


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
    rest = [committed[n] for n in left], [target[n] for n in free]
    contradicted = next(filter(_is_contradicted, zip(*rest, strict=True)), None)
    unproven = _unproven(*rest, have_equal_options)
    in_place = dict(zip(free, left, strict=True))
    return Pairing({**found, **in_place}, (), (), unproven, contradicted)


def _is_contradicted(places: tuple[Parameter, Parameter]) -> bool:
    one, there = places
    return None not in (one.shape, there.shape) and one.shape != there.shape


def _unproven(
    committed: Sequence[Parameter],
    target: Sequence[Parameter],
    have_equal_options: Callable[[int | None, int | None], bool],
) -> tuple[Parameter, Parameter] | None:
    """The first two of `committed` that could stand for each other, judged by shapes, although it
    matters which is which. It does not where both have no state and equal options. If one shape is
    not known, none proves anything."""
    are_known = all(each.shape is not None for each in (*committed, *target))
    alike: dict[Shape | None, Parameter] = {}
    for one, there in zip(committed, target, strict=True):
        first = alike.setdefault(there.shape if are_known else None, one)
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
