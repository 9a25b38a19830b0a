"""The coordinator refuses chunk ids of another plan than its own, and replicas that differ."""

import pytest

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, digest
from ckptstore.core.model import Box, Node, Schema
from ckptstore.core.tiling import tile
from ckptstore.distributed.assemble import Assembler, Decided, Written
from ckptstore.distributed.framing import numbered
from ckptstore.distributed.merge import RankTree, Ways, merge
from ckptstore.distributed.plan import (
    HeldBox,
    RankBox,
    RanksPlan,
    Share,
    Target,
    Tiled,
    plan_ranks,
)
from ckptstore.errors import Conflict, Corrupt
from ckptstore.state.leaf_sources import Holding, Mesh

LEAF = Target(0, 0)


def two_ranks() -> RanksPlan:
    """A leaf of two chunks, of which two ranks write one each."""
    boxes = (Box((0,), (8,)), Box((8,), (8,)))
    held = tuple(HeldBox(box, (RankBox(rank, 0, rank),)) for rank, box in enumerate(boxes))
    plan = RanksPlan([])
    alike = plan.tile(LEAF, Tiled(held, tile((16,), 4, 32, boxes), 64))
    alike.own += [Share(RankBox(rank, 0, rank), 0, 1, rank) for rank in (0, 1)]
    assert plan.chunks == 2
    return plan


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({0: bytes(2 * CHUNK_ID_BYTES)}, {}, id="too many, their sum is right"),
        pytest.param({1: bytes(CHUNK_ID_BYTES)}, {0: bytes(CHUNK_ID_BYTES)}, id="exchanged"),
        pytest.param({0: bytes(CHUNK_ID_BYTES)}, {}, id="one too few"),
        pytest.param({7: bytes(CHUNK_ID_BYTES)}, {1: bytes(CHUNK_ID_BYTES)}, id="of another plan"),
    ],
)
def test_ids_of_chunks_that_were_not_asked_for_are_refused(
    first: dict[int, bytes], second: dict[int, bytes]
) -> None:
    written = [Written(numbered(found), b"") for found in (first, second)]
    with pytest.raises(Corrupt, match=r"rank [01] sends \d ids of chunks, wanted 1"):
        Assembler(two_ranks()).assemble(Decided(checksums=[[], []]), written, [])


def test_a_chunk_that_a_rank_was_not_told_to_write_is_refused() -> None:
    written = [
        Written(numbered({rank: bytes(CHUNK_ID_BYTES)}), bytes(CHECKSUM_BYTES + CHUNK_ID_BYTES))
        for rank in (0, 1)
    ]
    decided = Decided(checksums=[[bytes(CHECKSUM_BYTES)], []])
    with pytest.raises(Corrupt, match="rank 1 sends 1 ids of checksums, wanted 0"):
        Assembler(two_ranks()).assemble(decided, written, [])


def tree_of(rank: int) -> RankTree:
    """Ranks 0 and 1 have a half of the leaf each on one mesh, ranks 2 and 3 on another."""
    skeleton = Node("dict", (0,), ("w",), ())
    schema = Schema(skeleton, ("w",), ("tensor",), ("float32",), ((64, 64),), (-1,))
    first = rank - rank % 2
    holding = Holding(
        Mesh((2,), (first, first + 1)), ("Shard(0)",), (Box((rank % 2 * 32, 0), (32, 64)),)
    )
    return RankTree("m", schema, b"", Ways([0], {}, [rank]), (holding,))


def test_replicas_on_another_mesh_are_compared_chunk_by_chunk() -> None:
    plan = plan_ranks(merge([[tree_of(rank)] for rank in range(4)]), 4, 4096, canonical=True)
    (alike,) = plan.alike.values()
    assert [share.place.rank for share in alike.own] == [0, 1]
    assert not alike.shared
    assert {share.place.rank: (share.chunk, *share[1:3]) for share in alike.replicas} == {
        2: (0, 0, 2),
        3: (2, 0, 2),
    }
    chunks = [digest(bytes([number])) for number in range(4)]
    found = {0: b"".join(chunks[:2])}, {2: b"".join(chunks[2:])}, {}, {}
    written = [Written(numbered(each), b"") for each in found]

    def assembled(*observed: bytes) -> bytes | None:
        by_rank = {}, {}, {0: b"".join(observed[:2])}, {2: b"".join(observed[2:])}
        decided = Decided(checksums=[[]] * 4)
        trees = Assembler(plan).assemble(decided, written, list(map(numbered, by_rank)))
        return trees[0].contents[0].ids

    assert assembled(*chunks) == b"".join(chunks)
    with pytest.raises(Conflict, match=r"w is one tensor on ranks \[0, 1, 2, 3\], but rank 3 has"):
        assembled(*chunks[:3], chunks[0])
