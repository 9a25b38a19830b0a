"""What one process of several measured, by name, and the table of all: time on the clock, and of
the processors."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import ckptstore

T = TypeVar("T")

COPY, HELD = "memcpy of the own part", "step held by a commit"


@dataclass(slots=True)
class Notes:
    """What a process measured: by name, a value for each round."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float | None) -> None:
        self.found.setdefault(name, []).append(value or 0.0)

    def time(self, name: str, act: Callable[[], T]) -> T:
        """Do `act`, and note its seconds on the clock, and of this process's processors."""
        wall, cpu = time.perf_counter(), time.process_time()
        done = act()
        self.add(name, time.perf_counter() - wall)
        self.add(f"{name}, CPU", time.process_time() - cpu)
        return done

    def commit(self, store: ckptstore.Store, state: Any, step: int, durable: str = "") -> None:
        """Commit in the background, and note how long that held the caller; and, under the name
        `durable`, the time until it was."""
        began = time.process_time()
        pending = store.commit_async(state, step=step)
        pending.wait()
        self.add(HELD, pending.timings.held_s)
        if durable:
            self.add(f"{durable}, CPU", time.process_time() - began)
            self.add(durable, pending.timings.durable_s)


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The greatest value of all ranks, by name and round."""
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def show(found: Mapping[str, Sequence[float]], nbytes: int) -> None:
    """Print the medians, and the rate for the `nbytes` of each rank."""
    for name, values in found.items():
        seconds = median(values)
        print(f"{name:40} {seconds * 1e3:8.0f} ms {nbytes / max(seconds, 1e-9) / 1e9:6.2f} GB/s")
