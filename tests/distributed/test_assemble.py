"""The coordinator refuses chunk ids of another plan than its own, and replicas that differ."""

import pytest

from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import Box, Node, Schema
from ckptstore.distributed.assemble import Assembler, Decided, Observation
from ckptstore.distributed.merge import RankTree, merge
from ckptstore.distributed.plan import Job, Place, RanksPlan, Target, Tiled, plan_ranks
from ckptstore.distributed.tiling import tile
from ckptstore.errors import Conflict, Corrupt
from ckptstore.state.leaf_sources import Holding, Mesh

LEAF = Target(0, 0)


def test_ids_of_a_wrong_number_are_refused_also_if_their_sum_is_right() -> None:
    boxes = (Box((0,), (8,)), Box((8,), (8,)))
    tiled = Tiled(boxes, tile((16,), 4, 32, boxes), ((Place(0, 0, 0),), (Place(1, 0, 1),)))
    assert tiled.tiling.chunks == 2
    jobs = [Job(Place(rank, 0, rank), 0, 1, LEAF, rank) for rank in (0, 1)]
    plan = RanksPlan([], {LEAF: tiled}, jobs=jobs)
    two = bytes(2 * CHUNK_ID_BYTES)
    with pytest.raises(Corrupt, match=f"rank 0 hands in {len(two)} bytes of ids; wanted 1 ids"):
        Assembler(plan).assemble(Decided(), [two, b""], [], [])


def tree_of(rank: int) -> RankTree:
    """Ranks 0 and 1 have a half of the leaf each on one mesh, ranks 2 and 3 on another."""
    skeleton = Node("dict", (0,), ("w",), ())
    schema = Schema(skeleton, ("w",), ("tensor",), ("float32",), ((64, 64),), (-1,))
    first = rank - rank % 2
    holding = Holding(
        Mesh((2,), (first, first + 1)), ("Shard(0)",), (Box((rank % 2 * 32, 0), (32, 64)),)
    )
    return RankTree("m", schema, b"", {0: holding}, {})


def test_replicas_on_another_mesh_are_compared_chunk_by_chunk() -> None:
    plan = plan_ranks(merge([[tree_of(rank)] for rank in range(4)]), 4, 4096, canonical=True)
    assert [job.place.rank for job in plan.jobs] == [0, 1]
    assert {(shared.place.rank, shared.box, shared.cells) for shared in plan.shared} == {
        (2, 0, 2),
        (3, 1, 2),
    }
    assert all(shared.all for shared in plan.shared)
    chunks = [digest(bytes([number])) for number in range(4)]
    written = [b"".join(found) for found in (chunks[:2], chunks[2:], (), ())]

    def assembled(*observed: bytes) -> bytes | None:
        observations = [
            Observation(shared, cell, observed[2 * shared.box + cell])
            for shared in plan.shared
            for cell in range(shared.cells)
        ]
        trees = Assembler(plan).assemble(Decided(), written, [], observations)
        return trees[0].contents[0].ids

    assert assembled(*chunks) == b"".join(chunks)
    with pytest.raises(Conflict, match=r"w is one tensor on ranks \[0, 1, 2, 3\], but rank 3 has"):
        assembled(*chunks[:3], chunks[0])
