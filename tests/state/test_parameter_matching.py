"""An order that is accepted without names is the only one that shapes allow, as far as it matters:
compared with all orders, one by one."""

from collections.abc import Callable
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.state.parameter_matching import Pair, Parameter, by_name, sources_of

SHAPES = st.sampled_from([(2,), (2, 2), (3,), None])


@st.composite
def parameters(draw: st.DrawFn) -> tuple[list[Parameter], list[Parameter]]:
    count = draw(st.integers(1, 4))
    committed = [
        Parameter(n, n, f"p{n}", draw(st.integers(0, 2)), draw(SHAPES), draw(st.booleans()))
        for n in range(count)
    ]
    shapes = [draw(SHAPES) if draw(st.booleans()) else each.shape for each in committed]
    return committed, [Parameter(n, n, shape=shape) for n, shape in enumerate(shapes)]


def fits(one: Parameter, there: Parameter) -> bool:
    return None in (one.shape, there.shape) or one.shape == there.shape


@given(parameters(), st.sampled_from([{}, {1: 0}, {1: 0, 2: 0}]))
def test_an_order_that_is_accepted_is_the_only_one(
    both: tuple[list[Parameter], list[Parameter]], like: dict[int, int]
) -> None:
    """`like` has groups with the options of another."""
    committed, target = both

    def options(group: int) -> int:
        return like.get(group, group)

    found = by_name(
        committed,
        target,
        in_order=True,
        have_equal_options=lambda one, other: options(one) == options(other),
    )
    assert [(one.number, there.number) for one, there in found.pairs] == [
        (n, n) for n in range(len(committed))
    ]
    if found.unproven or found.contradicted:
        return
    for order in permutations(committed):
        if all(map(fits, order, target)):
            for one, there in zip(committed, order, strict=True):
                is_harmless = not one.has_state and not there.has_state
                assert one is there or (is_harmless and options(one.group) == options(there.group))


def test_names_decide_in_any_order_and_strangers_stay_without_a_counterpart() -> None:
    committed = [Parameter(n, n, name, 0, (2,)) for n, name in enumerate("abc")]
    target = [Parameter(n, n, name, shape=(2,)) for n, name in enumerate("cxa")]
    found = by_name(committed, target, in_order=False, have_equal_options=lambda one, other: True)
    a, b, c = committed
    own_c, x, own_a = target
    assert {*found.pairs} == {(c, own_c), (a, own_a)}
    assert found[1:] == ((b,), (x,), None, None)


def grouped(groups: list[list[int]]) -> dict[int, list[Parameter]]:
    return {
        number: [Parameter(n, n, group=number) for n in numbers]
        for number, numbers in enumerate(groups)
    }


def sources(
    committed: list[list[int]],
    target: list[list[int]],
    pairs: dict[int, int],
    have_equal_options: Callable[[int, int], bool],
) -> tuple[tuple[int | None, ...], tuple[int, ...], bool]:
    """`sources_of`, of groups as numbers of parameters, and the committed number of a target's."""
    there, here = grouped(committed), grouped(target)
    ones = {each.number: each for group in there.values() for each in group}
    found = sources_of(
        [number for number, group in there.items() if not group],
        here,
        [
            Pair(ones[pairs[each.number]], each)
            for group in here.values()
            for each in group
            if each.number in pairs
        ],
        have_equal_options,
    )
    assert list(found.of_group) == list(here)
    return tuple(found.of_group.values()), found.conflicts, found.is_same


def test_groups_are_known_by_their_parameters() -> None:
    pairs = {0: 2, 1: 3, 2: 0, 3: 1}

    def never(one: int, other: int) -> bool:
        return one == other

    swapped = sources([[0, 1], [2, 3]], [[0, 1], [2, 3]], pairs, never)
    assert swapped == ((1, 0), (), True)
    split = sources([[0, 1, 2, 3]], [[0], [1, 2, 3]], pairs, never)
    assert split == ((0, 0), (), False)
    joined = sources([[0, 1], [2, 3]], [[0, 1, 2, 3]], pairs, never)
    assert joined == ((None,), (0,), False)
    alike = sources([[0, 1], [2, 3]], [[0, 1, 2, 3]], pairs, lambda one, other: True)
    assert alike == ((1,), (), False)
    empty = sources([[], [0, 1, 2, 3]], [[0, 1, 2, 3], []], pairs, never)
    assert empty == ((1, 0), (), True)
    new = sources([[0, 1]], [[2, 3], [0]], {2: 0, 3: 1}, never)
    assert new == ((0, None), (), True)
