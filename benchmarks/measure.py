"""How a comparison is measured: contestants take turns within each round, and what counts is the
median of the rounds' own ratios.

Absolute figures move by a factor of two with the neighbours' load; a ratio within one round hardly
does.
"""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from benchmarks.progress import note


def nothing() -> None:
    """An entrant that needs no preparation or no cleaning up."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """`act` is timed; `before` and `after` are not. With `value`, what that gives once all is done
    counts instead of the time; with `cpu_seconds`, the processor time of those that it counts, so
    far, instead of this process'."""

    name: str
    act: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    value: Callable[[], float] | None = None
    cpu_seconds: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One entrant's values, one per round: seconds or bytes. `cpu_seconds` counts all threads and
    children, user and system."""

    values: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class Result:
    """One case. `unit` is `s` or `B`; `nbytes` is the logical size of what one act moves, 0 where
    speed is not the point."""

    case: str
    title: str
    unit: str
    nbytes: int
    series: dict[str, Series]


def ratio(result: Result, over: str, under: str) -> float:
    """The median of the rounds' own quotients of two entrants' values."""
    return median(
        a / b for a, b in zip(result.series[over].values, result.series[under].values, strict=True)
    )


def alternate(
    case: str,
    entrants: Sequence[Entrant],
    rounds: int,
    each_round: Callable[[int], object] | None = None,
) -> dict[str, Series]:
    """Every entrant acts once in every round, the order rotating; the first round warms up and is
    not counted."""
    series = {entrant.name: Series() for entrant in entrants}
    for number in range(rounds + 1):
        if each_round is not None:
            each_round(number)
        shift = number % len(entrants)
        for entrant in [*entrants[shift:], *entrants[:shift]]:
            seconds, cpu_seconds = _time(entrant)
            note(f"{case}: round {number}/{rounds}: {entrant.name} {seconds:.3f} s")
            if number > 0:
                series[entrant.name].values.append(seconds)
                series[entrant.name].cpu_seconds.append(cpu_seconds)
    return series


def _time(entrant: Entrant) -> tuple[float, float]:
    entrant.before()
    # What others left to write is theirs, not part of this measurement.
    os.sync()
    spent = entrant.cpu_seconds or _cpu_seconds
    cpu, start = spent(), perf_counter()
    entrant.act()
    seconds, cpu_seconds = perf_counter() - start, spent() - cpu
    entrant.after()
    return entrant.value() if entrant.value else seconds, cpu_seconds


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
