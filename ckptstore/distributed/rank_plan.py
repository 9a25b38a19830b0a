"""What does one rank have to do, and how does the coordinator send it?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.core.model import Box
from ckptstore.distributed.plan import ChunkAssembly, Place, RanksPlan, Target
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical


class LeafRef(NamedTuple):
    """A box on this rank: the numbers of its key, of the leaf and of the box."""

    tree: int
    leaf: int
    part: int


class JobTask(NamedTuple):
    """Hash and write cells `first:stop` of a box."""

    ref: LeafRef
    first: int
    stop: int


class Sending(NamedTuple):
    """Send cell `cell` of box `part` to rank `to`. Shared by leaves with equal holdings."""

    to: int
    part: int
    cell: int


class SendTask(NamedTuple):
    """Do `how` with one leaf."""

    window: int
    tree: int
    leaf: int
    how: Sending


class FragmentTask(NamedTuple):
    """`box` of the leaf comes from `rank`, from cell `cell` of box `part` there."""

    rank: int
    part: int
    cell: int
    box: Box


class Completing(NamedTuple):
    """Complete, hash and write chunk `chunk` of a leaf from fragments, as the holder of box
    `part`.
    """

    part: int
    chunk: int
    fragments: tuple[FragmentTask, ...]


class CellTask(NamedTuple):
    """Do `how` with one leaf."""

    window: int
    tree: int
    leaf: int
    how: Completing


@dataclass(frozen=True, slots=True)
class RankTask:
    """The work of a rank before content is resolved. `shared` are boxes that other ranks hold as
    well, and their number of cells.

    Leaves that the coordinator planned together share one `how` object.
    """

    jobs: tuple[JobTask, ...]
    sends: tuple[SendTask, ...]
    cells: tuple[CellTask, ...]
    reports: tuple[LeafRef, ...]
    shared: tuple[tuple[LeafRef, int], ...]
    trust_replicated: bool


class _Columns:
    """A task as a message: lists of numbers."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.sendings: list[list[int]] = []
        self.sends: list[tuple[int, ...]] = []
        self.completings: list[list[Any]] = []
        self.cells: list[tuple[int, ...]] = []
        self.reports: list[list[int]] = []
        self.shared: list[list[int]] = []


class _Role(NamedTuple):
    """What a rank does in an assembly: entry `how` of its sendings or completings, for the leaves
    in `leaves`.
    """

    rank: int
    holder: int
    how: int
    leaves: list[tuple[int, ...]]


def encode_tasks(
    plan: RanksPlan, keys: Sequence[Sequence[str]], *, trust_replicated: bool
) -> list[bytes]:
    """The task of every rank; `keys` are each rank's keys in order."""
    trees = [
        [names.index(tree.key) if tree.key in names else -1 for tree in plan.trees]
        for names in keys
    ]
    tasks = [_Columns() for _ in keys]

    def ref(target: Target, place: Place) -> list[int]:
        return [
            trees[place.rank][target.tree],
            plan.leaf(target).holders[place.holder].leaf,
            place.part,
        ]

    for job in plan.jobs:
        tasks[job.place.rank].jobs.append([*ref(job.target, job.place), job.first, job.stop])
    roles: dict[int, list[_Role]] = {}  # by identity of the assemblies
    for target, assembly, window in plan.cells:
        if id(assembly) not in roles:
            roles[id(assembly)] = list(_roles(assembly, tasks))
        holders = plan.leaf(target).holders
        for rank, holder, how, leaves in roles[id(assembly)]:
            leaves.append((window, trees[rank][target.tree], holders[holder].leaf, how))
    for target, places in plan.reported.items():
        for place in places:
            tasks[place.rank].reports.append(ref(target, place))
    for shared in plan.shared:
        tasks[shared.place.rank].shared.append([*ref(shared.target, shared.place), shared.cells])
    return [canonical.encode({**vars(task), "trust": trust_replicated}) for task in tasks]


def _roles(assembly: ChunkAssembly, tasks: Sequence[_Columns]) -> Iterator[_Role]:
    owner, fragments = assembly.owner, []
    for place, cell, box in assembly.fragments:
        fragments.append([place.rank, place.part, cell, *box.offsets, *box.lengths])
        if place.rank != owner.rank:
            task = tasks[place.rank]
            task.sendings.append([owner.rank, place.part, cell])
            yield _Role(place.rank, place.holder, len(task.sendings) - 1, task.sends)
    task = tasks[owner.rank]
    task.completings.append([owner.part, assembly.chunk, fragments])
    yield _Role(owner.rank, owner.holder, len(task.completings) - 1, task.cells)


def decode_task(data: bytes) -> RankTask:
    """The inverse of `encode_tasks` for one rank; raises `Corrupt`."""
    try:
        task = canonical.decode(data)
        sendings = [Sending(*each) for each in task["sendings"]]
        completings = [
            Completing(part, chunk, tuple(map(_fragment, fragments)))
            for part, chunk, fragments in task["completings"]
        ]
        return RankTask(
            tuple(JobTask(LeafRef(*job[:3]), job[3], job[4]) for job in task["jobs"]),
            tuple(
                [
                    SendTask(window, tree, leaf, sendings[how])
                    for window, tree, leaf, how in task["sends"]
                ]
            ),
            tuple(
                [
                    CellTask(window, tree, leaf, completings[how])
                    for window, tree, leaf, how in task["cells"]
                ]
            ),
            tuple(LeafRef(*report) for report in task["reports"]),
            tuple((LeafRef(*shared[:3]), shared[3]) for shared in task["shared"]),
            bool(task["trust"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupt(
            f"the coordinator's plan is damaged: {error!r}; do all ranks run one version of "
            "ckptstore?"
        ) from error


def _fragment(numbers: Sequence[int]) -> FragmentTask:
    rank, part, cell, *box = numbers
    half = len(box) // 2
    return FragmentTask(rank, part, cell, Box(tuple(box[:half]), tuple(box[half:])))
