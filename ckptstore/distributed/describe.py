"""What a rank tells the coordinator of its state before any byte moves: schemas, and which boxes of
which leaves it holds.

It changes only when the state's structure does, so that a commit like the last one names its digest
instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.core.model import Box, Schema
from ckptstore.distributed import framing
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical
from ckptstore.objects.schema import LastSchemas, decode_schema
from ckptstore.state.leaf_sources import FlatState, Holding, Mark, Mesh


@dataclass(frozen=True, slots=True)
class RankTree:
    """One key as a rank has it. What is in neither `held` nor `marks` it holds whole."""

    key: str
    schema: Schema
    schema_bytes: bytes
    held: Mapping[int, Holding]
    marks: Mapping[int, Mark]


def encode_description(flats: Mapping[str, FlatState], schemas: LastSchemas) -> bytes:
    meshes: dict[Mesh | None, int] = {}
    placements: dict[tuple[str, ...], int] = {}
    holdings: dict[Holding, int] = {}
    known: dict[
        int, int
    ] = {}  # numbers of holdings by their identity, which costs no hash of a mesh of many ranks
    trees = []
    for key, flat in flats.items():
        held = [-1] * len(flat.schema)
        for leaf, (holding, _, _) in flat.held.items():
            number = known.get(id(holding))
            if number is None:
                number = known[id(holding)] = holdings.setdefault(holding, len(holdings))
            held[leaf] = number
        trees.append([key, held, list(flat.marks.items())])
    # Layers repeat: most leaves are held as many others are.
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
    return framing.join(
        [
            canonical.encode(head),
            framing.join([schemas.encode(key, flat.schema) for key, flat in flats.items()]),
        ]
    )


def decode_description(data: bytes, schemas: dict[bytes, Schema]) -> list[RankTree]:
    """The inverse of `encode_description`. `schemas` has those that are known, by their bytes, and
    gets what is not. Raises `Corrupt`."""
    head_bytes, joined = framing.split(data, 2)
    try:
        head = canonical.decode(head_bytes)
        meshes = [
            None if mesh is None else Mesh(tuple(mesh[0]), tuple(mesh[1]))
            for mesh in head["meshes"]
        ]
        placements = [tuple(names) for names in head["placements"]]
        holdings = [
            Holding(meshes[mesh], placements[names], _boxes(boxes))
            for mesh, names, boxes in head["holdings"]
        ]
        encoded = framing.split(joined, len(head["trees"]))
        return [
            RankTree(
                key,
                _schema(schema, schemas),
                schema,
                {i: holdings[n] for i, n in enumerate(held) if n >= 0},
                dict(marks),
            )
            for (key, held, marks), schema in zip(head["trees"], encoded, strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupt(
            f"a rank's description of its state is damaged: {error!r}; do all ranks run one "
            "version of ckptstore?"
        ) from error


def _schema(data: bytes, known: dict[bytes, Schema]) -> Schema:
    if data not in known:
        known[data] = decode_schema(data)
    return known[data]


def _boxes(boxes: Sequence[Any]) -> tuple[Box, ...]:
    return tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)
