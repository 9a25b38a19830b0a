"""Salvaging records from a chunk index in any state: found by their checksums, without liblmdb.

Only the index knows the content of a pack whose footer is lost, and a damaged index is recreated
when it is opened. Before that, `repair` reads the remaining records here. Some may be stale, so a
record counts only if the bytes at its location match the chunk's id.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.core.config import MIB
from ckptstore.core.ids import CHUNK_ID_BYTES, StoreId
from ckptstore.index.chunks.lmdb_env import NUMBER_BYTES
from ckptstore.index.chunks.records import (
    LOCATION_DTYPE,
    RECORD_BYTES,
    Locations,
    checks,
    ids_of,
    seed_of,
)

_DISTANCES = (CHUNK_ID_BYTES, CHUNK_ID_BYTES + NUMBER_BYTES)
"""Distance from a chunk id to its record in either database. LMDB puts a value right after its key.
"""
_OVERLAP = _DISTANCES[-1] + RECORD_BYTES
_FIELDS: Mapping[str, tuple[Any, ...]] = LOCATION_DTYPE.fields or {}
_FOUND: int = _FIELDS["found"][1]


def remains(folder: Path, store: StoreId) -> Iterator[tuple[npt.NDArray[np.void], Locations]]:
    """Chunk ids and records of `store` in the index at `folder`, in blocks; none without a readable
    file."""
    seed = seed_of(store)
    try:
        with open(folder / "data.mdb", "rb") as file:
            tail = b""
            while block := file.read(MIB):
                data = np.frombuffer(tail + block, np.uint8)
                for distance in _DISTANCES:
                    yield _in_block(data, distance, seed)
                tail = data[-(_OVERLAP + _OVERLAP % 2) :].tobytes()
    except OSError:
        return


def _in_block(
    data: npt.NDArray[np.uint8], distance: int, seed: int
) -> tuple[npt.NDArray[np.void], Locations]:
    count = max(0, len(data) - distance - RECORD_BYTES + 1)
    # Keys begin at even offsets.
    marks = data[distance + _FOUND : distance + _FOUND + count : 2]
    starts = 2 * np.flatnonzero(marks == 1)
    ids = ids_of(data[starts[:, None] + np.arange(CHUNK_ID_BYTES)].tobytes())
    rows = np.frombuffer(
        data[starts[:, None] + distance + np.arange(RECORD_BYTES)].tobytes(), LOCATION_DTYPE
    )
    sound = checks(seed, ids, rows) == rows["check"]
    return ids[sound], rows[sound]
