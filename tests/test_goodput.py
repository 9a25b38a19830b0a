"""The simulated year of failures agrees with the formulas of Young and Daly, and adds up."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.goodput import (
    LEAVES_HOST,
    TAKES_HOST,
    YEAR_S,
    Job,
    Way,
    best_interval_s,
    daly_goodput,
    live,
)

JOB = Job()
AT_ONCE = Way(
    "at once", 600.0, 30.0, 0.0, 1, 0.0, dict.fromkeys(("processes", "host", "partners"), 60.0)
)
YEARS_S = 50 * YEAR_S


@pytest.mark.parametrize("every_s", [100.0, 600.0, 3000.0])
def test_a_simulated_year_has_the_goodput_of_dalys_formula(every_s: float, seed: int) -> None:
    way = replace(AT_ONCE, every_s=every_s)
    simulated = live(JOB, way, Random(seed), YEARS_S).goodput
    assert simulated == pytest.approx(daly_goodput(way, JOB), rel=0.005)


def test_nothing_is_better_than_youngs_interval(seed: int) -> None:
    best = best_interval_s(AT_ONCE.held_s, JOB.failure_s)
    there, sooner, later = (
        live(JOB, replace(AT_ONCE, every_s=every_s), Random(seed), YEARS_S).goodput
        for every_s in (best, best / 3, best * 3)
    )
    assert there > sooner and there > later


def test_a_year_adds_up_and_partners_cost_most(seed: int) -> None:
    restores_s = {"processes": 1.0, "host": 10.0, "partners": 100.0}
    way = replace(AT_ONCE, durable_s=20.0, every_nth=5, uploaded_s=500.0, restores_s=restores_s)
    year, worse = (
        live(replace(JOB, partners=share), way, Random(seed), YEARS_S) for share in (0.01, 0.5)
    )
    whole = year.useful_s + year.held_s + year.repeated_s + year.restart_s + year.restore_s
    assert whole == pytest.approx(YEARS_S, rel=0.001)
    assert year.failures.total() == pytest.approx(YEARS_S / JOB.failure_s, rel=0.05)
    assert year.wasted_s < worse.wasted_s


def test_the_published_interruptions_are_all_there() -> None:
    assert sum(LEAVES_HOST.values()) + sum(TAKES_HOST.values()) == 419
