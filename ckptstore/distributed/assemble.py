"""How do the reports and receipts of all ranks become the contents of a state's leaves, and its
layout? Pure.

A reported leaf that is equal on all ranks that have it becomes one leaf. One that differs becomes
private to each rank, unless it was known to be a replica: then the replicas have diverged, which is
a conflict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.commit.transaction import TreeContent
from ckptstore.core import geometry
from ckptstore.core.geometry import byte_ranges
from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES
from ckptstore.core.model import Box, LeafContent, Schema
from ckptstore.distributed.merge import MergedLeaf, MergedTree, finish, split
from ckptstore.distributed.plan import Place, RanksPlan, Shared, Target, Tiled, nbytes_of
from ckptstore.errors import Conflict, Corrupt
from ckptstore.objects import canonical


class Report(NamedTuple):
    """What a rank has of a leaf: its bytes if it is small, else the checksums of its chunks,
    joined, and its length."""

    inline: bytes | None
    checksums: bytes
    raw_bytes: int


@dataclass(slots=True)
class Decided:
    """`contents` are leaf contents by rank, None for a leaf that is one; `private` are the leaves
    divided by rank.

    By rank, `writes` lists (number of the rank's report, first chunk, stop), and `checksums` has
    the checksums of these chunks.
    """

    contents: dict[tuple[Target, int | None], Report] = field(default_factory=dict)
    private: set[Target] = field(default_factory=set)
    writes: list[list[tuple[int, int, int]]] = field(default_factory=list)
    checksums: list[list[bytes]] = field(default_factory=list)


def decide(plan: RanksPlan, reports: Sequence[Sequence[Report]]) -> Decided:
    """Compare `reports`, by rank in the order of the rank's task. Raises `Conflict` for replicas
    that differ, naming path and ranks.
    """
    decided = Decided(writes=[[] for _ in reports], checksums=[[] for _ in reports])
    load = list(plan.load)
    found = [iter(enumerate(each)) for each in reports]
    taken: set[bytes] = set()
    for target, places in plan.reported.items():
        tree = plan.trees[target.tree]
        leaf = plan.leaf(target)
        here = {place: next(found[place.rank]) for place in places}
        if leaf.kind == "tensor" and any(
            holder.leaf in tree.trees[holder.rank].held for holder in leaf.holders
        ):
            content = _assembled(
                tree, leaf, {place: report.inline or b"" for place, (_, report) in here.items()}
            )
            decided.contents[target, None] = Report(content, b"", len(content))
        else:
            _decide_whole(decided, target, tree, here)
            _spread(decided, here, load, taken)
    return decided


def _decide_whole(
    decided: Decided,
    target: Target,
    tree: MergedTree,
    here: Mapping[Place, tuple[int, Report]],
) -> None:
    leaf = tree.leaves[target.leaf]
    marks = {tree.trees[place.rank].marks.get(leaf.holders[place.holder].leaf) for place in here}
    contents = {place.rank: report for place, (_, report) in here.items()}
    if leaf.owned or ("private" not in marks and len(set(contents.values())) == 1):
        decided.contents[target, None] = next(iter(contents.values()))
        return
    if "replica" in marks:
        raise Conflict(
            f"{leaf.path} should be the same on all ranks, and is not: {_groups(contents)}; "
            f"{_WAY_OUT}"
        )
    decided.private.add(target)
    decided.contents.update(((target, rank), content) for rank, content in contents.items())


_WAY_OUT = "find out where the replicas went apart, or pass private=[…] if they are meant to"


def _groups(contents: Mapping[int, Report]) -> str:
    ranks: dict[Report, list[str]] = {}
    for rank, content in contents.items():
        ranks.setdefault(content, []).append(str(rank))
    return " | ".join(f"ranks {', '.join(group)}" for group in ranks.values())


def _spread(
    decided: Decided,
    here: Mapping[Place, tuple[int, Report]],
    load: list[int],
    taken: set[bytes],
) -> None:
    """Assign each chunk to the least loaded rank of those that have it."""
    holders: dict[bytes, list[tuple[int, int, int, int]]] = {}
    for place, (number, report) in here.items():
        checksums = split(report.checksums, CHECKSUM_BYTES)
        for i, summed in enumerate(checksums):
            if summed not in taken:
                holders.setdefault(summed, []).append(
                    (place.rank, number, i, report.raw_bytes // len(checksums))
                )
    for summed, found in holders.items():
        rank, number, i, nbytes = min(found, key=lambda each: load[each[0]])
        taken.add(summed)
        load[rank] += nbytes
        decided.checksums[rank].append(summed)
        writes = decided.writes[rank]
        if writes and writes[-1][0] == number and writes[-1][2] == i:
            writes[-1] = (number, writes[-1][1], i + 1)
        else:
            writes.append((number, i, i + 1))


def _assembled(tree: MergedTree, leaf: MergedLeaf, parts: Mapping[Place, bytes]) -> bytes:
    """The bytes of a small leaf that ranks hold in boxes."""
    width = geometry.width_of(leaf.dtype)
    data = bytearray(geometry.nbytes_of(leaf.dtype, leaf.shape))
    filled: dict[Box, tuple[int, bytes]] = {}
    for place, joined in parts.items():
        holding = tree.trees[place.rank].held.get(leaf.holders[place.holder].leaf)
        at = 0
        for box in holding.boxes if holding else (Box((0,) * len(leaf.shape), leaf.shape),):
            ranges = list(byte_ranges(leaf.shape, box, width))
            nbytes = sum(stop - start for start, stop in ranges)
            mine, at = joined[at : at + nbytes], at + nbytes
            other, theirs = filled.setdefault(box, (place.rank, mine))
            if theirs != mine:
                raise Conflict(
                    f"{leaf.path} differs between its replicas on rank {other} and rank "
                    f"{place.rank}; {_WAY_OUT}"
                )
            done = 0
            for start, stop in ranges:
                data[start:stop] = mine[done : done + stop - start]
                done += stop - start
    return bytes(data)


_EMPTY = Report(b"", b"", 0)
_NOWHERE = (Target(-1, -1), None)
"""Stands for leaves without content of their own: no content is ever resolved for it."""


class Observation(NamedTuple):
    """The id of cell `cell` of a shared box, as computed by a rank that does not write it."""

    shared: Shared
    cell: int
    id: bytes


class Assembler:
    """Assembles the commits of one plan. Caches the parts that do not depend on content, for the
    next commit.
    """

    def __init__(self, plan: RanksPlan) -> None:
        self._plan = plan
        self._gathering: _Gathering | None = None
        self._resolved: dict[tuple[int, frozenset[int]], _ResolvedTree] = {}

    def assemble(
        self,
        decided: Decided,
        written: Sequence[bytes],
        decided_ids: Sequence[bytes],
        observations: Sequence[Observation],
    ) -> list[TreeContent]:
        """All trees of the whole state. `written` are the ids of the chunks that each rank wrote:
        for its jobs, then for the cells that it completed. `decided_ids` are those of the chunks
        that it was told to write.

        Raises `Conflict` if replicas differ, and `Corrupt` if ids do not match the plan.
        """
        if self._gathering is None:
            self._gathering = _gathering_of(self._plan, len(written))
        ids = _Ids(self._gathering.where, _gathered(self._gathering, written))
        _compare(self._plan, ids, observations)
        by_checksum = _by_checksum(decided.checksums, decided_ids)
        return [
            self._tree(number, decided, ids, by_checksum) for number in range(len(self._plan.trees))
        ]

    def _tree(
        self, number: int, decided: Decided, ids: "_Ids", by_checksum: Mapping[bytes, bytes]
    ) -> TreeContent:
        private = frozenset(target.leaf for target in decided.private if target.tree == number)
        whole = self._resolved.get((number, private))
        if whole is None:
            whole = self._resolved[number, private] = _resolve(
                self._plan, number, private, ids.where
            )
        contents, joined = [], ids.joined
        for start, stop, raw_bytes, boxes, elsewhere in whole.leaves:
            if elsewhere is None:
                contents.append(LeafContent(None, joined[start:stop], raw_bytes, boxes))
            else:
                inline, checksums, raw_bytes = decided.contents.get(elsewhere, _EMPTY)
                found = b"".join(map(by_checksum.__getitem__, split(checksums, CHECKSUM_BYTES)))
                contents.append(LeafContent(inline, found, raw_bytes))
        return TreeContent(self._plan.trees[number].key, whole.schema, contents)


def logical_bytes(trees: Sequence[TreeContent]) -> int:
    """Raw bytes of the whole state, without aliases."""
    total = 0
    for _, schema, contents in trees:
        for kind, dtype, shape, alias, content in zip(
            schema.kinds, schema.dtypes, schema.shapes, schema.aliases, contents, strict=True
        ):
            if alias < 0:
                total += geometry.nbytes_of(dtype, shape) if kind == "tensor" else content.raw_bytes
    return total


def layout_of(plan: RanksPlan, size: int) -> bytes:
    """The layout chunk (docs/format.md §7): mesh, placements, boxes and their ranks, for every leaf
    that several ranks hold.
    """
    trees = {
        tree.key: canonical.encode_joined(dict(_tree_layout(plan, t, tree)))
        for t, tree in enumerate(plan.trees)
    }
    return canonical.encode_joined(
        {"world": canonical.encode(size), "trees": canonical.encode_joined(trees)}
    )


class _Gathering(NamedTuple):
    """How the ids that the ranks hand in are reordered into the plan's order.

    `counts` are the number of ids of each rank, `order` is the permutation, and `where` gives each
    target's byte range after it.
    """

    counts: list[int]
    order: "npt.NDArray[np.int64]"
    where: dict[Target, tuple[int, int]]


class _Ids(NamedTuple):
    """The chunk ids of all planned leaves."""

    where: dict[Target, tuple[int, int]]
    joined: bytes

    def of(self, target: Target) -> bytes:
        start, stop = self.where[target]
        return self.joined[start:stop]


class _LeafSource(NamedTuple):
    """The source of a leaf's content: ids `start:stop` of the planned ones, or the content resolved
    for (target, rank) `elsewhere`.
    """

    start: int
    stop: int
    raw_bytes: int
    boxes: tuple[Box, ...] | None
    elsewhere: tuple[Target, int | None] | None


class _ResolvedTree(NamedTuple):
    """A tree, given the set of leaves that turned out to be private."""

    schema: Schema
    leaves: list[_LeafSource]


def _gathering_of(plan: RanksPlan, size: int) -> _Gathering:
    """A rank hands in the ids of its jobs, then the ids of its cells, each in the plan's order."""
    where: dict[Target, tuple[int, int]] = {}
    end = 0
    for target, tiled in plan.tiled.items():
        where[target] = (end, end := end + CHUNK_ID_BYTES * tiled.tiling.chunks)
    counts = [0] * size
    for job in plan.jobs:
        counts[job.place.rank] += job.stop - job.first
    for _, assembly, _ in plan.cells:
        counts[assembly.owner.rank] += 1
    at = [0, *accumulate(counts)]
    order = np.full(end // CHUNK_ID_BYTES, -1, np.int64)
    for job in plan.jobs:
        first, rank = where[job.target][0] // CHUNK_ID_BYTES + job.chunk, job.place.rank
        count = job.stop - job.first
        order[first : first + count] = range(at[rank], at[rank] + count)
        at[rank] += count
    for target, assembly, _ in plan.cells:
        rank = assembly.owner.rank
        order[where[target][0] // CHUNK_ID_BYTES + assembly.chunk] = at[rank]
        at[rank] += 1
    assert order.min(initial=0) >= 0, "a chunk of the plan is nobody's"
    return _Gathering(counts, order, where)


def _by_checksum(checksums: Sequence[list[bytes]], ids: Sequence[bytes]) -> dict[bytes, bytes]:
    """The ids of the chunks that ranks were told to write, by their checksums."""
    found: dict[bytes, bytes] = {}
    for rank, (wanted, got) in enumerate(zip(checksums, ids, strict=True)):
        if len(got) != CHUNK_ID_BYTES * len(wanted):
            raise _wrong_count(rank, len(got), len(wanted))
        found.update(zip(wanted, split(got, CHUNK_ID_BYTES), strict=True))
    return found


def _wrong_count(rank: int, nbytes: int, count: int) -> Corrupt:
    return Corrupt(
        f"rank {rank} hands in {nbytes} bytes of ids; wanted {count} ids; is ckptstore of one "
        "version on all ranks?"
    )


def _gathered(gathering: _Gathering, written: Sequence[bytes]) -> bytes:
    for rank, (ids, count) in enumerate(zip(written, gathering.counts, strict=True)):
        if len(ids) != CHUNK_ID_BYTES * count:
            raise _wrong_count(rank, len(ids), count)
    return np.frombuffer(b"".join(written), f"V{CHUNK_ID_BYTES}")[gathering.order].tobytes()


def _resolve(
    plan: RanksPlan, number: int, private: frozenset[int], where: Mapping[Target, tuple[int, int]]
) -> _ResolvedTree:
    tree = plan.trees[number]
    schema, leaves = finish(tree, private)
    found = []
    for (i, rank), alias in zip(leaves, schema.aliases, strict=True):
        target = Target(number, i)
        tiled = plan.tiled.get(target) if alias < 0 else None
        if tiled is None:
            found.append(_LeafSource(0, 0, 0, None, (target, rank) if alias < 0 else _NOWHERE))
        else:
            boxes = None if tiled.tiling.whole else tiled.boxes
            found.append(_LeafSource(*where[target], nbytes_of(tree.leaves[i]), boxes, None))
    return _ResolvedTree(schema, found)


def _compare(plan: RanksPlan, ids: _Ids, observations: Sequence[Observation]) -> None:
    """Compare the observations of replicas with what was written for them."""
    for (target, box, place, _, _), cell, chunk in observations:
        number = _chunk_of(plan.tiled[target], box, cell)
        if (
            number is not None
            and ids.of(target)[number * CHUNK_ID_BYTES : (number + 1) * CHUNK_ID_BYTES] != chunk
        ):
            _diverged(plan, target, place.rank)


def _chunk_of(tiled: Tiled, box: int, cell: int) -> int | None:
    """The chunk of a box's cell; None for a cell that box edges cut."""
    return next(
        (
            s.chunk + cell - s.first
            for s in tiled.tiling.spans
            if s.box == box and s.first <= cell < s.stop
        ),
        None,
    )


def _diverged(plan: RanksPlan, target: Target, rank: int) -> None:
    leaf = plan.leaf(target)
    ranks = [holder.rank for holder in leaf.holders]
    raise Conflict(
        f"{leaf.path} is one tensor on ranks {ranks}, but rank {rank} has other bytes than the "
        "rank that writes them. Replicas that have "
        "diverged must be made equal first; different tensors need different paths (key optimizer "
        "state by parameter name), or private=[…]"
    )


def _tree_layout(plan: RanksPlan, number: int, tree: MergedTree) -> Iterator[tuple[str, bytes]]:
    known: dict[int, bytes] = {}  # by identity: leaves with equal holdings share one object
    for i, leaf in enumerate(tree.leaves):
        tiled = plan.tiled.get(Target(number, i))
        if leaf.alias >= 0 or _is_whole_on_one(tree, leaf):
            continue
        if tiled is None:
            yield leaf.path, canonical.encode(_leaf_layout(tree, leaf, None))
        else:
            if id(tiled) not in known:
                known[id(tiled)] = canonical.encode(_leaf_layout(tree, leaf, tiled))
            yield leaf.path, known[id(tiled)]


def _is_whole_on_one(tree: MergedTree, leaf: MergedLeaf) -> bool:
    return (
        len(leaf.holders) == 1 and leaf.holders[0].leaf not in tree.trees[leaf.holders[0].rank].held
    )


def _leaf_layout(tree: MergedTree, leaf: MergedLeaf, tiled: Tiled | None) -> dict[str, Any]:
    held = (tree.trees[rank].held.get(number) for rank, number in leaf.holders)
    first = next((each for each in held if each is not None), None)
    return {
        "mesh": first.mesh and [list(first.mesh.shape), list(first.mesh.ranks)] if first else None,
        "placements": list(first.placements) if first else [],
        "boxes": [[list(box.offsets), list(box.lengths)] for box in tiled.boxes] if tiled else [],
        "ranks": [sorted({place.rank for place in places}) for places in tiled.holders]
        if tiled
        else [[rank for rank, _ in leaf.holders]],
    }
