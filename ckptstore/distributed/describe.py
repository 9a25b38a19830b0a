"""What does a rank tell the coordinator about its state? Pure.

The description (schemas, and the boxes of each leaf) is sent before any byte moves. It changes only
with the state's structure, so later commits send its digest. Reports give the content of leaves
whose replication is unknown, before a writer is assigned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import Box, Schema
from ckptstore.distributed.framing import damaged, pack, unpack
from ckptstore.objects.schema import LastSchemas, decode_schema
from ckptstore.state.leaf_sources import FlatState, Holding, Mark, Mesh


@dataclass(frozen=True, slots=True)
class RankTree:
    """One key of the state on one rank. A leaf in neither `held` nor `marks` is held whole."""

    key: str
    schema: Schema
    schema_bytes: bytes
    held: Mapping[int, Holding]
    marks: Mapping[int, Mark]


def encode_description(flats: Mapping[str, FlatState], schemas: LastSchemas) -> bytes:
    meshes: dict[Mesh | None, int] = {}
    placements: dict[tuple[str, ...], int] = {}
    holdings: dict[Holding, int] = {}
    known: dict[int, int] = {}  # by identity, which avoids hashing a mesh of many ranks
    trees = []
    for key, flat in flats.items():
        held = [-1] * len(flat.schema)
        for leaf, (holding, _, _) in flat.held.items():
            number = known.get(id(holding))
            if number is None:
                number = known[id(holding)] = holdings.setdefault(holding, len(holdings))
            held[leaf] = number
        trees.append([key, held, list(flat.marks.items()), schemas.encode(key, flat.schema)])
    # Layers repeat, so most leaves share their holding with others.
    distinct = [
        [
            meshes.setdefault(mesh, len(meshes)),
            placements.setdefault(names, len(placements)),
            [[list(numbers) for numbers in box] for box in boxes],
        ]
        for mesh, names, boxes in holdings
    ]
    head = {
        "meshes": [mesh and [list(mesh.shape), list(mesh.ranks)] for mesh in meshes],
        "placements": [list(names) for names in placements],
        "holdings": distinct,
        "trees": trees,
    }
    return pack(head)


def decode_description(data: bytes, schemas: dict[bytes, Schema]) -> list[RankTree]:
    """The inverse of `encode_description`. `schemas` caches schemas by their bytes. Raises
    `Corrupt`.
    """
    head = unpack(data)
    try:
        meshes = [
            None if mesh is None else Mesh(tuple(mesh[0]), tuple(mesh[1]))
            for mesh in head["meshes"]
        ]
        placements = [tuple(names) for names in head["placements"]]
        holdings = [
            Holding(meshes[mesh], placements[names], _boxes(boxes))
            for mesh, names, boxes in head["holdings"]
        ]
        return [
            RankTree(
                key,
                _schema(schema, schemas),
                schema,
                {i: holdings[n] for i, n in enumerate(held) if n >= 0},
                dict(marks),
            )
            for key, held, marks, schema in head["trees"]
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"the description of its state: {error!r}") from error


def _schema(data: bytes, known: dict[bytes, Schema]) -> Schema:
    if data not in known:
        known[data] = decode_schema(data)
    return known[data]


def _boxes(boxes: Sequence[Any]) -> tuple[Box, ...]:
    return tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)


class Report(NamedTuple):
    """A rank's content of a leaf: its bytes or the ids of its chunks. `raw_bytes` is the length."""

    inline: bytes | None
    ids: bytes
    raw_bytes: int


def split_ids(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_ID_BYTES] for i in range(0, len(data), CHUNK_ID_BYTES)]
