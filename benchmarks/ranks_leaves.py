"""The case of 10,000 sharded leaves on four ranks: what planning and the log entry cost, beside the
bytes that are moved between them.

Three parts make a commit. *Planning*: from the call until the last rank knows what it is to do (the
state is flattened, described, merged, divided). *Bytes*: fragments are exchanged, chunks hashed and
written, packs made durable. *Log entry*: from when the last rank's packs are durable until the last
rank's call has returned (contents put together, pages, schema, layout, document, entry, indexes).
Times are those of one host's monotonic clock, which its processes share.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptstore
from benchmarks.context import Context
from benchmarks.measure import Result, Series
from benchmarks.progress import note
from benchmarks.ranks import SIZE, cpu_of, pool_of
from benchmarks.targets import COUNTED
from ckptstore.distributed.collective import Collective
from tests.distributed.pool import Pool

SHARDED = 10_000
ROWS, COLUMNS = 32, 16
"""Of each of the many leaves: 2 KiB, of which each rank has a part."""

LATER = 4
"""So many commits after the first one of a layout."""

PARTS = ("planning", "bytes", "log entry", COUNTED, "all of it")
_PLANNED, _PUBLISHED = ("commit: plan", "commit: prepare"), "commit: publish"


class Marks(NamedTuple):
    """When a rank's commit was called, knew its plan, had its packs durable, and returned:
    monotonic seconds."""

    called: float
    planned: float
    written: float
    returned: float


_here: dict[str, Any] = {}
"""This rank's state, store and marks, in its own process."""


def leaves(context: Context) -> Result:
    """Fresh processes in each round, so that nothing is known of the layout; then commits of other
    content in the same layout."""
    count = max(int(SHARDED * context.scale), 10)
    series = {f"{when}, {part}": Series() for when in ("first", "later") for part in PARTS}
    for number in range(min(context.rounds, 3)):
        with pool_of(SIZE) as pool:
            pool.run(open_sharded, context.folder(), count)
            found = {"first": [_timed(pool)], "later": [_changed(pool) for _ in range(LATER)]}
            pool.run(close_here)
        for when, commits in found.items():
            for part in PARTS:
                series[f"{when}, {part}"].values.append(
                    statistics.median(seconds[part] for seconds, _ in commits)
                )
            series[f"{when}, all of it"].cpu_seconds.append(
                statistics.median(cpu for _, cpu in commits)
            )
            parts = ", ".join(
                f"{part} {series[f'{when}, {part}'].values[-1] * 1000:.0f} ms" for part in PARTS
            )
            note(f"ranks-leaves: round {number}: {when}: {parts}")
    title = f"commit of {count:,} leaves that {SIZE} ranks of this host divide, each of 2 KiB"
    return Result("ranks-leaves", title, "s", 0, series)


def open_sharded(rank: int, folder: Path, count: int) -> None:
    """`count` leaves that the ranks divide by rows."""
    mesh, whole = DeviceMesh("cpu", list(range(SIZE))), (torch.Size((ROWS, COLUMNS)), (COLUMNS, 1))
    _here["state"] = {
        "model": {f"layers.{i // 8}.{i % 8}.weight": _part(mesh, *whole) for i in range(count)}
    }
    _here["store"] = ckptstore.open(folder)
    _mark_rounds()


def change(rank: int) -> None:
    for tensor in _here["state"]["model"].values():
        tensor.to_local().add_(1)


def commit_here(rank: int) -> Marks:
    called = time.monotonic()
    _here["store"].commit(_here["state"])
    return Marks(called, _here["planned"], _here["written"], time.monotonic())


def close_here(rank: int) -> None:
    _here.pop("store").close()


def _part(mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    return DTensor.from_local(
        torch.rand(ROWS // SIZE, COLUMNS),
        mesh,
        (Shard(0),),
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _mark_rounds() -> None:
    """Note in this process when rounds end, and when there is something to publish."""
    do = Collective.round

    def marking(
        self: Collective, what: str, mine: Callable[[], Any], answer: Any, *then: Any
    ) -> Any:
        def handed_in() -> Any:
            data = mine()
            _here["written"] = time.monotonic()
            return data

        found = do(self, what, handed_in if what == _PUBLISHED else mine, answer, *then)
        if what in _PLANNED:
            _here["planned"] = time.monotonic()
        return found

    # a process that measures, and nothing else
    Collective.round = marking  # type: ignore[method-assign, assignment]


def _changed(pool: Pool) -> tuple[dict[str, float], float]:
    pool.run(change)
    return _timed(pool)


def _timed(pool: Pool) -> tuple[dict[str, float], float]:
    """Seconds of each part of one commit, and processor seconds of all ranks."""
    cpu = cpu_of(pool)
    marks: list[Marks] = pool.run(commit_here)
    cpu = cpu_of(pool) - cpu
    called, planned, written = (
        min(m.called for m in marks),
        max(m.planned for m in marks),
        max(m.written for m in marks),
    )
    returned = max(m.returned for m in marks)
    seconds = {
        "planning": planned - called,
        "bytes": written - planned,
        "log entry": returned - written,
        "all of it": returned - called,
    }
    return seconds | {COUNTED: seconds["planning"] + seconds["log entry"]}, cpu
