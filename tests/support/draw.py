"""Which cases of dear tests does `make test` run?

A test whose cases cost more than `MOST_S` together runs with some of them, or now and then, so
that it costs about `MOST_S` a run. The seed draws: other cases with each seed, all of them over
some runs. `make test DRAW=` leaves out none, and CI runs it so.

`costs.txt` says what tests cost. `python -m tests.support.draw REPORT.xml CPU_S` writes it, where
`make test DRAW= REPORT=REPORT.xml` took so many seconds of CPU (user and system). Files that the
report does not name keep what they had.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from xml.etree import ElementTree

COSTS = Path(__file__).with_name("costs.txt")
MOST_S = 0.3
RAREST = 0.15
"""A case comes in one of seven runs, or in more, however dear its test is."""

WHOLE = (
    "tests/golden/",
    "tests/net/",
    "tests/stateful/",
    "tests/test_docs.py",
    "tests/test_entered.py",
    "tests/test_layers.py",
    "tests/test_public_names.py",
)
"""These draw by themselves, or hold a ceiling that each change must keep."""


@cache
def costs() -> dict[str, float]:
    """The seconds of CPU that all cases of a test take, by the test's id."""
    lines = (line.split(" ", 1) for line in COSTS.read_text(encoding="utf-8").splitlines())
    return {test: float(seconds) for seconds, test in lines}


def left_out(cases: Iterable[str], seed: str) -> set[str]:
    """The ids of the cases that a run with this seed does without."""
    left = set()
    dear, by_test = costs(), defaultdict[str, list[str]](list)
    for case in cases:
        by_test[test_of(case)].append(case)
    for test in by_test.keys() & dear.keys():
        random, of_it = Random(f"{seed} {test}"), by_test[test]
        share = min(1.0, max(MOST_S / dear[test], RAREST))
        taken = random.sample(of_it, int(len(of_it) * share + random.random()))
        left |= set(of_it).difference(taken)
    return left


def other_places(cases: Iterable[str], seed: str, kinds: Iterable[str]) -> set[str]:
    """The ids of the cases at other places than the one that the seed draws for each test: of those
    that differ in the kind of place alone, one is not among them."""
    left, alike = set(), defaultdict[tuple[str, ...], list[str]](list)
    known = set(kinds)
    for case in cases:
        parameters = case[len(test_of(case)) + 1 : -1].split("-")
        if known.intersection(parameters):
            others = [each for each in parameters if each not in known]
            alike[(test_of(case), *others)].append(case)
    for key, at_places in alike.items():
        left |= {*at_places} - {Random(f"{seed} {key}").choice(at_places)}
    return left


def test_of(case: str) -> str:
    """The id of the test that a case belongs to."""
    return case.partition("[")[0]


test_of.__test__ = False  # type: ignore[attr-defined]  # its name is no test's


def _measured(report: Path) -> Iterator[tuple[str, float]]:
    """The cases of a JUnit report, with their seconds."""
    for case in ElementTree.parse(report).iter("testcase"):
        folders, module, inside = case.attrib["classname"].partition("test_")
        if not module:
            continue  # a file that was skipped
        name, *classes = (module + inside).split(".")
        path = f"{folders.replace('.', '/')}{name}.py"
        yield "::".join([path, *classes, case.attrib["name"]]), float(case.attrib["time"])


def main(report: str, cpu_s: str) -> None:
    total = defaultdict[str, float](float)
    for case, seconds in _measured(Path(report)):
        total[test_of(case)] += seconds
    of_cpu = float(cpu_s) / sum(total.values())  # the report has time by the clock
    files = {test.partition("::")[0] for test in total}
    found = {test: s for test, s in costs().items() if test.partition("::")[0] not in files}
    found |= {test: s * of_cpu for test, s in total.items() if not test.startswith(WHOLE)}
    lines = [f"{s:.1f} {test}\n" for test, s in sorted(found.items()) if s >= MOST_S]
    COSTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
