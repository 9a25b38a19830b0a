"""How do the reports and receipts of all ranks become the contents of a state's leaves, and its
layout? Pure.

A reported leaf that is equal on all ranks that have it becomes one leaf. One that differs becomes
private to each rank, unless it was known to be a replica: then the replicas have diverged, which is
a conflict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckptstore.commit.transaction import TreeContent
from ckptstore.core import geometry
from ckptstore.core.geometry import byte_ranges
from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES
from ckptstore.core.model import Box, LeafContent
from ckptstore.distributed.framing import check_keys, damaged, numbers_and_ids
from ckptstore.distributed.merge import Finished, MergedLeaf, MergedTree, finish
from ckptstore.distributed.plan import RankBox, RanksPlan, Target, Tiled
from ckptstore.errors import Conflict
from ckptstore.objects import canonical
from ckptstore.repository.dedup import items_of


class Report(NamedTuple):
    """The content of a leaf on one rank: its bytes if it is small, else the joined checksums of its
    chunks, and its length."""

    inline: bytes | None
    checksums: bytes
    raw_bytes: int


@dataclass(slots=True)
class Decided:
    """`contents` are leaf contents by rank; the rank is None for a leaf that is equal on all ranks.
    `private` are the leaves divided by rank.

    By rank, `writes` lists (number of the report, first chunk, stop), and `checksums` has the
    checksums of these chunks.
    """

    contents: dict[tuple[Target, int | None], Report] = field(default_factory=dict)
    private: set[Target] = field(default_factory=set)
    writes: list[list[tuple[int, int, int]]] = field(default_factory=list)
    checksums: list[list[bytes]] = field(default_factory=list)


def decide(plan: RanksPlan, reports: Sequence[Mapping[int, Report]]) -> Decided:
    """Compare `reports`: by rank, and by the number of the reported leaf in the plan. Raises
    `Conflict` for replicas that differ, naming path and ranks, and `Corrupt` for reports that were
    not asked for.
    """
    decided = Decided(writes=[[] for _ in reports], checksums=[[] for _ in reports])
    asked: list[set[int]] = [set() for _ in reports]
    for number, places in enumerate(plan.reported.values()):
        for place in places:
            asked[place.rank].add(number)
    for rank, found in enumerate(reports):
        check_keys(rank, "contents of leaves", found, asked[rank])
    load = list(plan.load)
    taken: set[bytes] = set()
    for number, (target, places) in enumerate(plan.reported.items()):
        tree = plan.trees[target.tree]
        leaf = plan.leaf(target)
        here = {place: reports[place.rank][number] for place in places}
        if leaf.kind == "tensor" and any(
            tree.trees[holder.rank].holding(holder.leaf) for holder in leaf.holders
        ):
            content = _assembled(
                tree, leaf, {place: report.inline or b"" for place, report in here.items()}
            )
            decided.contents[target, None] = Report(content, b"", len(content))
        else:
            _decide_whole(decided, target, tree, here)
            _spread(decided, number, here, load, taken)
    return decided


def _decide_whole(
    decided: Decided,
    target: Target,
    tree: MergedTree,
    here: Mapping[RankBox, Report],
) -> None:
    leaf = tree.leaves[target.leaf]
    marks = {tree.trees[place.rank].marks.get(leaf.holders[place.holder].leaf) for place in here}
    contents = {place.rank: report for place, report in here.items()}
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
    number: int,
    here: Mapping[RankBox, Report],
    load: list[int],
    taken: set[bytes],
) -> None:
    """Assign each chunk of reported leaf `number` to the least loaded rank of those that have
    it.
    """
    holders: dict[bytes, list[tuple[int, int, int]]] = {}
    for place, report in here.items():
        checksums = items_of(report.checksums, CHECKSUM_BYTES)
        for i, summed in enumerate(checksums):
            if summed not in taken:
                nbytes = report.raw_bytes // len(checksums)
                holders.setdefault(summed, []).append((place.rank, i, nbytes))
    for summed, found in holders.items():
        rank, i, nbytes = min(found, key=lambda each: load[each[0]])
        taken.add(summed)
        load[rank] += nbytes
        decided.checksums[rank].append(summed)
        writes = decided.writes[rank]
        if writes and writes[-1][0] == number and writes[-1][2] == i:
            writes[-1] = (number, writes[-1][1], i + 1)
        else:
            writes.append((number, i, i + 1))


def _assembled(tree: MergedTree, leaf: MergedLeaf, parts: Mapping[RankBox, bytes]) -> bytes:
    """The bytes of a small leaf that ranks hold in boxes."""
    width = geometry.width_of(leaf.dtype)
    data = bytearray(geometry.nbytes_of(leaf.dtype, leaf.shape))
    filled: dict[Box, tuple[int, bytes]] = {}
    for place, joined in parts.items():
        holding = tree.trees[place.rank].holding(leaf.holders[place.holder].leaf)
        at = 0
        for box in holding.boxes if holding else (Box.whole(leaf.shape),):
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


class Written(NamedTuple):
    """The ids that a rank hands in: `planned` (`framing.numbered`) has those of the chunks planned
    for it, `decided` has rows of checksum and id of the chunks that it was told to write later.
    """

    planned: bytes
    decided: bytes


class Assembler:
    """Assembles the commits of one plan. Caches the parts that do not depend on content, for the
    next commit.
    """

    def __init__(self, plan: RanksPlan) -> None:
        self._plan = plan
        self._finished: dict[tuple[int, frozenset[int]], Finished] = {}
        # Sorted once: to search all chunks for those of each rank takes seconds of each commit.
        writers = _writers(plan)
        self._by_writer = np.argsort(writers, kind="stable")
        self._ends = np.cumsum(np.bincount(writers, minlength=len(plan.load)))

    def assemble(
        self, decided: Decided, written: Sequence[Written], observed: Sequence[bytes]
    ) -> list[TreeContent]:
        """All trees of the whole state, of what the ranks have `written`. `observed` are ids of
        chunks that others write, as the ranks computed them, by number.

        Raises `Conflict` if replicas differ, and `Corrupt` for ids that were not asked for.
        """
        ids = np.empty(self._plan.chunks, f"V{CHUNK_ID_BYTES}")
        by_checksum: dict[bytes, bytes] = {}
        for rank, (planned, told) in enumerate(written):
            numbers, found = numbers_and_ids(planned)
            asked = self.asked(rank)
            if not np.array_equal(np.sort(numbers), asked):
                check_keys(rank, "ids of chunks", numbers.tolist(), asked.tolist())
            ids[numbers] = found
            rows = items_of(told, CHECKSUM_BYTES + CHUNK_ID_BYTES)
            own = {row[:CHECKSUM_BYTES]: row[CHECKSUM_BYTES:] for row in rows}
            check_keys(rank, "ids of checksums", own, decided.checksums[rank])
            by_checksum |= own
        for rank, found in enumerate(observed):
            self._compare(rank, ids, *numbers_and_ids(found))
        joined = ids.tobytes()
        return [
            self._tree(number, decided, joined, by_checksum)
            for number in range(len(self._plan.trees))
        ]

    def asked(self, rank: int) -> Any:
        """The numbers of the chunks that a rank writes, in order."""
        start, stop = self._ends[rank - 1] if rank else 0, self._ends[rank]
        return self._by_writer[start:stop]

    def _compare(self, rank: int, ids: Any, numbers: Any, found: Any) -> None:
        """Compare what a rank observed with what was written."""
        if numbers.max(initial=0) >= max(len(ids), 1):
            raise damaged(f"rank {rank} compares a chunk that is not planned")
        for number in numbers[ids[numbers] != found][:1].tolist():
            numbered = self._plan.numbers.items()
            _diverged(self._plan, [of for of, first in numbered if first <= number][-1], rank)

    def _tree(
        self, number: int, decided: Decided, joined: bytes, by_checksum: Mapping[bytes, bytes]
    ) -> TreeContent:
        private = frozenset(target.leaf for target in decided.private if target.tree == number)
        tree, key = self._plan.trees[number], (number, private)
        if key not in self._finished:
            self._finished[key] = finish(tree, private)
        schema, leaves = self._finished[key]
        contents = []
        for leaf, rank in leaves:
            target = Target(number, leaf)
            if tiled := self._plan.tiled.get(target):
                start = self._plan.numbers[target] * CHUNK_ID_BYTES
                ids = joined[start : start + tiled.tiling.chunks * CHUNK_ID_BYTES]
                contents.append(LeafContent(None, ids, tiled.raw_bytes, tiled.parts))
            else:  # an alias, or a tensor without elements, has no content
                inline, checksums, nbytes = decided.contents.get((target, rank), _EMPTY)
                ids = b"".join(map(by_checksum.__getitem__, items_of(checksums, CHECKSUM_BYTES)))
                contents.append(LeafContent(inline, ids, nbytes))
        return TreeContent(tree.key, schema, contents)


def _writers(plan: RanksPlan) -> Any:
    """The rank that writes each chunk of the plan."""
    writers = np.full(plan.chunks, -1, np.int16 if len(plan.load) < 1 << 15 else np.int32)
    for tiled, alike in plan.alike.items():
        chunks = tiled.tiling.chunks
        each = np.full(chunks, -1, writers.dtype)
        for place, first, stop, chunk in alike.own:
            each[chunk : chunk + stop - first] = place.rank
        numbers = np.array([plan.numbers[target] for target in alike.targets])
        for number in numbers.tolist():
            writers[number : number + chunks] = each
        for cut in alike.cut:
            owners = np.array([assembly.owner.rank for assembly in cut.assemblies])
            writers[numbers + cut.chunk] = owners[cut.how]
    for job in plan.jobs:
        writers[job.number : job.number + job.stop - job.first] = job.place.rank
    assert writers.min(initial=0) >= 0, "a chunk of the plan is nobody's"
    return writers


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
    known: dict[Tiled, bytes] = {}
    for i, leaf in enumerate(tree.leaves):
        tiled = plan.tiled.get(Target(number, i))
        if leaf.alias >= 0 or _is_whole_on_one(tree, leaf):
            continue
        if tiled is None:
            yield leaf.path, canonical.encode(_leaf_layout(tree, leaf, None))
        else:
            if tiled not in known:
                known[tiled] = canonical.encode(_leaf_layout(tree, leaf, tiled))
            yield leaf.path, known[tiled]


def _is_whole_on_one(tree: MergedTree, leaf: MergedLeaf) -> bool:
    first = leaf.holders[0]
    return len(leaf.holders) == 1 and tree.trees[first.rank].holding(first.leaf) is None


def _leaf_layout(tree: MergedTree, leaf: MergedLeaf, tiled: Tiled | None) -> dict[str, Any]:
    held = (tree.trees[rank].holding(number) for rank, number in leaf.holders)
    first = next((each for each in held if each is not None), None)
    boxes = tiled.boxes if tiled else ()
    return {
        "mesh": first.mesh if first else None,
        "placements": list(first.placements) if first else [],
        "boxes": [held.box for held in boxes],
        "ranks": [sorted({place.rank for place in held.holders}) for held in boxes]
        or [[rank for rank, _ in leaf.holders]],
    }
