"""A rank's part of the plan, as the coordinator sends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.core.model import Box
from ckptstore.engine.ranks.plan import CellJob, Place, RanksPlan
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical


class Spot(NamedTuple):
    """A box on the rank itself: the number of the key among its keys, the leaf's number, the box's number."""

    tree: int
    leaf: int
    part: int


class JobTask(NamedTuple):
    """Hash and write cells `first:stop` of a box."""

    spot: Spot
    first: int
    stop: int


class SendTask(NamedTuple):
    """Send cell `cell` of a box to rank `to`."""

    window: int
    to: int
    spot: Spot
    cell: int


class FragmentTask(NamedTuple):
    """`box` of the leaf comes from `rank`, from cell `cell` of box `part` there."""

    rank: int
    part: int
    cell: int
    box: Box


class CellTask(NamedTuple):
    """Complete chunk `chunk` of a leaf from fragments, hash and write it."""

    window: int
    spot: Spot
    chunk: int
    fragments: tuple[FragmentTask, ...]


@dataclass(frozen=True, slots=True)
class RankTask:
    """All that a rank does before anything is decided by content. `shared` are boxes that others have as well, and how many cells."""

    jobs: tuple[JobTask, ...]
    sends: tuple[SendTask, ...]
    cells: tuple[CellTask, ...]
    reports: tuple[Spot, ...]
    shared: tuple[tuple[Spot, int], ...]
    trust_replicated: bool


def encode_tasks(plan: RanksPlan, keys: Sequence[Sequence[str]], *, trust_replicated: bool) -> list[bytes]:
    """The task of every rank; `keys` are each rank's keys in order."""
    numbers = [{key: i for i, key in enumerate(names)} for names in keys]
    tasks: list[dict[str, Any]] = [{"jobs": [], "sends": [], "cells": [], "reports": [], "shared": []} for _ in keys]

    def spot(place: Place) -> list[int]:
        return [numbers[place.rank][place.key], place.leaf, place.part]

    for job in plan.jobs:
        tasks[job.place.rank]["jobs"].append([*spot(job.place), job.first, job.stop])
    for cell in plan.cells:
        _add_cell(tasks, cell, spot)
    for places in plan.reported.values():
        for place in places:
            tasks[place.rank]["reports"].append(spot(place))
    for place, cells in plan.shared:
        tasks[place.rank]["shared"].append([*spot(place), cells])
    return [canonical.encode({**task, "trust": trust_replicated}) for task in tasks]


def _add_cell(tasks: list[dict[str, Any]], job: CellJob, spot: Any) -> None:
    owner = job.owner.rank
    fragments = []
    for place, cell, box in job.fragments:
        if place.rank != owner:
            tasks[place.rank]["sends"].append([job.window, owner, *spot(place), cell])
        fragments.append([place.rank, place.part, cell, *box.offsets, *box.lengths])
    tasks[owner]["cells"].append([job.window, *spot(job.owner), job.chunk, fragments])


def decode_task(data: bytes) -> RankTask:
    """The inverse of `encode_tasks` for one rank; raises `Corrupt`."""
    try:
        task = canonical.decode(data)
        return RankTask(
            tuple(JobTask(Spot(*job[:3]), job[3], job[4]) for job in task["jobs"]),
            tuple(SendTask(send[0], send[1], Spot(*send[2:5]), send[5]) for send in task["sends"]),
            tuple(_cell(cell) for cell in task["cells"]),
            tuple(Spot(*report) for report in task["reports"]),
            tuple((Spot(*shared[:3]), shared[3]) for shared in task["shared"]),
            bool(task["trust"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupt(f"the coordinator's plan is damaged: {error!r}; do all ranks run one version of ckptstore?") from error


def _cell(cell: Sequence[Any]) -> CellTask:
    window, tree, leaf, part, chunk, fragments = cell
    return CellTask(window, Spot(tree, leaf, part), chunk, tuple(_fragment(each) for each in fragments))


def _fragment(numbers: Sequence[int]) -> FragmentTask:
    rank, part, cell, *box = numbers
    half = len(box) // 2
    return FragmentTask(rank, part, cell, Box(tuple(box[:half]), tuple(box[half:])))
