"""What `make test` leaves out comes in other runs."""

from collections import Counter
from functools import cache
from pathlib import Path

from tests.support.draw import MOST_S, RAREST, costs, left_out, other_places

ROOT = Path(__file__).parents[2]


def test_the_costs_are_of_tests_that_are_there() -> None:
    """Nearly all: a line of a test that has gone costs nothing."""
    gone = [test for test in costs() if not is_there(test)]
    assert len(gone) < len(costs()) / 20, f"measure the costs anew: {gone}"


def is_there(test: str) -> bool:
    file, *inside, name = test.split("::")
    text = source(file)
    return f"def {name}(" in text or (bool(inside) and f"class {inside[0]}(" in text)


@cache
def source(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_every_case_of_a_dear_test_comes_and_what_is_cheap_always_does() -> None:
    dear = costs()
    dearest = max(dear, key=dear.__getitem__)
    alone = min(dear, key=lambda test: abs(dear[test] - 2 * MOST_S))
    cases = {alone, "tests/a.py::test_cheap[1]", *(f"{dearest}[{i}]" for i in range(20))}
    runs = 300
    taken = Counter(case for seed in range(runs) for case in cases - left_out(cases, str(seed)))
    assert taken.keys() == cases
    assert taken["tests/a.py::test_cheap[1]"] == runs
    assert runs * 0.3 < taken[alone] < runs * 0.7
    assert all(taken[case] > runs * RAREST / 2 for case in cases if case.startswith(dearest))


def test_one_seed_draws_the_same_whatever_the_order() -> None:
    cases = [f"{test}[{i}]" for test in costs() for i in range(3)]
    assert left_out(cases, "7") == left_out(cases, "7") != left_out(cases, "8")


def test_a_test_runs_at_one_place_and_over_some_runs_at_each() -> None:
    kinds = ("local", "bucket", "bucket and database")
    cases = {f"tests/a.py::test_b[{kind}-{i}]" for kind in kinds for i in range(2)}
    alone = "tests/a.py::test_c[raw]"
    runs = map(str, range(100))
    taken = [{*cases, alone} - other_places({*cases, alone}, seed, kinds) for seed in runs]
    assert all(alone in run and len(run) == 3 for run in taken)
    assert all({case[-2] for case in run} >= {"0", "1"} for run in taken)
    assert set().union(*taken) == {*cases, alone}
