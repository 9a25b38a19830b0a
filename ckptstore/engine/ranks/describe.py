"""What a rank tells the coordinator of its state before any byte moves: schemas, and which boxes of which leaves it holds.

It changes only when the state's structure does, so that a commit like the last one names its digest instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptstore.core.model import Box, Schema
from ckptstore.engine.ranks import frames
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.state.flat import Flat, Mark, Mesh


class Holding(NamedTuple):
    """A leaf of which a rank holds `boxes`."""

    mesh: Mesh | None
    placements: tuple[str, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class RankTree:
    """One key as a rank has it. What is in neither `held` nor `marks` it holds whole."""

    key: str
    schema: Schema
    schema_bytes: bytes
    held: Mapping[int, Holding]
    marks: Mapping[int, Mark]


def encode_description(flats: Mapping[str, Flat]) -> bytes:
    meshes: dict[Mesh | None, int] = {}
    placements: dict[tuple[str, ...], int] = {}
    holdings: dict[Holding, int] = {}
    trees, schemas = [], []
    for key, flat in flats.items():
        held = [
            [leaf, holdings.setdefault(Holding(each.mesh, each.placements, tuple([box for box, _ in each.parts])), len(holdings))]
            for leaf, each in flat.held.items()
        ]
        trees.append([key, held, list(flat.marks.items())])
        schemas.append(encode_schema(flat.schema))
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
    return frames.join([canonical.encode(head), frames.join(schemas)])


def decode_description(data: bytes, schemas: dict[bytes, Schema]) -> list[RankTree]:
    """The inverse of `encode_description`. `schemas` has those that are known, by their bytes, and gets what is not. Raises `Corrupt`."""
    head_bytes, joined = frames.split(data, 2)
    try:
        head = canonical.decode(head_bytes)
        meshes = [None if mesh is None else Mesh(tuple(mesh[0]), tuple(mesh[1])) for mesh in head["meshes"]]
        placements = [tuple(names) for names in head["placements"]]
        holdings = [Holding(meshes[mesh], placements[names], _boxes(boxes)) for mesh, names, boxes in head["holdings"]]
        encoded = frames.split(joined, len(head["trees"]))
        return [
            RankTree(key, _schema(schema, schemas), schema, {leaf: holdings[number] for leaf, number in held}, dict(marks))
            for (key, held, marks), schema in zip(head["trees"], encoded, strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupt(f"a rank's description of its state is damaged: {error!r}; do all ranks run one version of ckptstore?") from error


def _schema(data: bytes, known: dict[bytes, Schema]) -> Schema:
    if data not in known:
        known[data] = decode_schema(data)
    return known[data]


def _boxes(boxes: Sequence[Any]) -> tuple[Box, ...]:
    return tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)
