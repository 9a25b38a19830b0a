"""What a rank tells the coordinator of its state before any byte moves: schemas, and which boxes of which leaves it holds.

It changes only when the state's structure does, so that a commit like the last one names its digest instead.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    trees, schemas = [], []
    for key, flat in flats.items():
        held = [
            [
                leaf,
                meshes.setdefault(each.mesh, len(meshes)),
                placements.setdefault(each.placements, len(placements)),
                *(n for box, _ in each.parts for numbers in box for n in numbers),
            ]
            for leaf, each in flat.held.items()
        ]
        trees.append([key, held, list(flat.marks.items())])
        schemas.append(encode_schema(flat.schema))
    head = {
        "meshes": [mesh and [list(mesh.shape), list(mesh.ranks)] for mesh in meshes],
        "placements": [list(names) for names in placements],
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
        encoded = frames.split(joined, len(head["trees"]))
        return [
            RankTree(key, _schema(schema, schemas), schema, dict(_holdings(held, schemas[schema], meshes, placements)), dict(marks))
            for (key, held, marks), schema in zip(head["trees"], encoded, strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupt(f"a rank's description of its state is damaged: {error!r}; do all ranks run one version of ckptstore?") from error


def _schema(data: bytes, known: dict[bytes, Schema]) -> Schema:
    if data not in known:
        known[data] = decode_schema(data)
    return known[data]


def _holdings(
    held: Sequence[Any], schema: Schema, meshes: Sequence[Mesh | None], placements: Sequence[tuple[str, ...]]
) -> Iterator[tuple[int, Holding]]:
    for leaf, mesh, placement, *numbers in held:
        yield leaf, Holding(meshes[mesh], placements[placement], _boxes(numbers, len(schema.shapes[leaf])))


def _boxes(numbers: list[int], n: int) -> tuple[Box, ...]:
    if not n:
        return (Box((), ()),)
    return tuple(Box(tuple(numbers[i : i + n]), tuple(numbers[i + n : i + 2 * n])) for i in range(0, len(numbers), 2 * n))
