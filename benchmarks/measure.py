"""How a comparison is measured: contestants take turns in random order within each round, and what
counts is the median of the rounds' own ratios.

Absolute figures move by a factor of two with the neighbours' load; a ratio within one round hardly
does.
"""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple

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
    """One entrant's values, one per round: seconds or bytes.

    `cpu_seconds` counts all threads and children, user and system; `system_seconds` is the kernel's
    part and `faults` the page faults, where this process knows them. `fresh_bytes` is the memory
    that the kernel handed out of its free pages.
    """

    values: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    system_seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    fresh_bytes: list[int] = field(default_factory=list)

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
    """Every entrant acts once in every round, in random order; the first round warms up and is not
    counted."""
    series = {entrant.name: Series() for entrant in entrants}
    for number in range(rounds + 1):
        if each_round is not None:
            each_round(number)
        for entrant in Random(f"{case} {number}").sample(entrants, len(entrants)):
            seconds, spent = _time(entrant)
            note(f"{case}: round {number}/{rounds}: {entrant.name} {seconds:.3f} s")
            if number > 0:
                its = series[entrant.name]
                its.values.append(seconds)
                its.cpu_seconds.append(spent.cpu_seconds)
                its.fresh_bytes.append(spent.fresh_bytes)
                if entrant.cpu_seconds is None:
                    its.system_seconds.append(spent.system_seconds)
                    its.faults.append(spent.faults)
    return series


class _Spent(NamedTuple):
    """What was spent so far: by this process and its children, and of the kernel's free memory."""

    cpu_seconds: float
    system_seconds: float
    faults: int
    fresh_bytes: int

    def since(self, before: "_Spent") -> "_Spent":
        cpu, system, faults, fresh = (
            after - earlier for after, earlier in zip(self, before, strict=True)
        )
        return _Spent(cpu, system, int(faults), max(int(fresh), 0))


def _spent(cpu_seconds: Callable[[], float] | None) -> _Spent:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    system = sum(usage.ru_stime for usage in usages)
    return _Spent(
        cpu_seconds() if cpu_seconds else system + sum(usage.ru_utime for usage in usages),
        system,
        sum(usage.ru_minflt + usage.ru_majflt for usage in usages),
        -_free_bytes(),
    )


def _free_bytes() -> int:
    """Memory that is neither used nor a cache."""
    with Path("/proc/meminfo").open() as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemFree"].split()[0]) << 10


def _time(entrant: Entrant) -> tuple[float, _Spent]:
    entrant.before()
    # What others left to write is theirs, not part of this measurement.
    os.sync()
    before, start = _spent(entrant.cpu_seconds), perf_counter()
    entrant.act()
    seconds, spent = perf_counter() - start, _spent(entrant.cpu_seconds).since(before)
    entrant.after()
    return entrant.value() if entrant.value else seconds, spent
