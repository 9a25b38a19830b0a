"""The coordinator refuses chunk ids of another plan than its own."""

import pytest

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import Box
from ckptstore.distributed.assemble import Assembler, Decided, WrittenIds
from ckptstore.distributed.plan import Job, Place, RanksPlan, Target, Tiled
from ckptstore.distributed.tiling import tile
from ckptstore.errors import Corrupt

LEAF = Target(0, 0)


def test_ids_of_a_wrong_number_are_refused_also_if_their_sum_is_right() -> None:
    boxes = (Box((0,), (8,)), Box((8,), (8,)))
    tiled = Tiled(boxes, tile((16,), 4, 32, boxes), ((Place(0, 0, 0),), (Place(1, 0, 1),)))
    assert tiled.tiling.chunks == 2
    jobs = [Job(Place(rank, 0, rank), 0, 1, LEAF, rank) for rank in (0, 1)]
    plan = RanksPlan([], {LEAF: tiled}, jobs=jobs)
    two = bytes(2 * CHUNK_ID_BYTES)
    with pytest.raises(Corrupt, match=f"rank 0 hands in {len(two)} bytes of ids; wanted 1 ids"):
        Assembler(plan).assemble(
            Decided(wanted=[[], []]), [WrittenIds(two, b"", b""), WrittenIds(b"", b"", b"")], []
        )
