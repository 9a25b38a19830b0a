"""Which reported leaves are equal on all ranks, which are private, and which rank writes them?
Pure.

A leaf that is equal on all ranks that have it becomes one leaf. One that differs becomes private to
each rank, unless it was known to be a replica: then the replicas have diverged, which is a
conflict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.core import geometry
from ckptstore.core.geometry import byte_ranges
from ckptstore.core.model import Box, LeafContent
from ckptstore.distributed.describe import Report, split_ids
from ckptstore.distributed.merge import MergedLeaf, MergedTree
from ckptstore.distributed.plan import Place, RanksPlan, Target
from ckptstore.errors import Conflict


@dataclass(slots=True)
class Decided:
    """`contents` are leaf contents by rank, None for a leaf that is one; `private` are the leaves
    divided by rank.

    By rank, `writes` lists (number of the rank's report, first chunk, stop), and `wanted` the ids
    that these chunks must have.
    """

    contents: dict[tuple[Target, int | None], LeafContent] = field(default_factory=dict)
    private: set[Target] = field(default_factory=set)
    compared: dict[Target, dict[Place, bytes]] = field(default_factory=dict)
    writes: list[list[tuple[int, int, int]]] = field(default_factory=list)
    wanted: list[list[bytes]] = field(default_factory=list)


def decide(plan: RanksPlan, reports: Sequence[Sequence[Report]]) -> Decided:
    """Compare `reports`, by rank in the order of the rank's task. Raises `Conflict` for replicas
    that differ, naming path and ranks.
    """
    decided = Decided(writes=[[] for _ in reports], wanted=[[] for _ in reports])
    load = list(plan.load)
    found = [iter(enumerate(each)) for each in reports]
    taken: set[bytes] = set()
    for target, places in plan.reported.items():
        tree = plan.trees[target.tree]
        leaf = plan.leaf(target)
        here = {place: next(found[place.rank]) for place in places}
        if target in plan.tiled:
            decided.compared[target] = {place: report.ids for place, (_, report) in here.items()}
        elif leaf.kind == "tensor" and any(
            holder.leaf in tree.trees[holder.rank].held for holder in leaf.holders
        ):
            content = _assembled(
                tree, leaf, {place: report.inline or b"" for place, (_, report) in here.items()}
            )
            decided.contents[target, None] = LeafContent(inline=content, raw_bytes=len(content))
        else:
            _decide_whole(decided, target, tree, here)
            _spread(decided, here, load, taken)
    return decided


def _decide_whole(
    decided: Decided, target: Target, tree: MergedTree, here: Mapping[Place, tuple[int, Report]]
) -> None:
    leaf = tree.leaves[target.leaf]
    marks = {tree.trees[place.rank].marks.get(leaf.holders[place.holder].leaf) for place in here}
    contents = {place.rank: _content(report) for place, (_, report) in here.items()}
    if "private" not in marks and len(set(contents.values())) == 1:
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


def _content(report: Report) -> LeafContent:
    if report.inline is not None:
        return LeafContent(inline=report.inline, raw_bytes=report.raw_bytes)
    return LeafContent(ids=report.ids, raw_bytes=report.raw_bytes)


def _groups(contents: Mapping[int, LeafContent]) -> str:
    ranks: dict[LeafContent, list[str]] = {}
    for rank, content in contents.items():
        ranks.setdefault(content, []).append(str(rank))
    return " | ".join(f"ranks {', '.join(group)}" for group in ranks.values())


def _spread(
    decided: Decided, here: Mapping[Place, tuple[int, Report]], load: list[int], taken: set[bytes]
) -> None:
    """Assign each chunk to the least loaded rank of those that have it."""
    holders: dict[bytes, list[tuple[int, int, int, int]]] = {}
    for place, (number, report) in here.items():
        ids = split_ids(report.ids)
        for i, chunk in enumerate(ids):
            if chunk not in taken:
                holders.setdefault(chunk, []).append(
                    (place.rank, number, i, report.raw_bytes // len(ids))
                )
    for chunk, found in holders.items():
        rank, number, i, nbytes = min(found, key=lambda each: load[each[0]])
        taken.add(chunk)
        load[rank] += nbytes
        writes = decided.writes[rank]
        if writes and writes[-1][0] == number and writes[-1][2] == i:
            writes[-1] = (number, writes[-1][1], i + 1)
        else:
            writes.append((number, i, i + 1))
        decided.wanted[rank].append(chunk)


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
