"""Records that are left in the file of a chunk index, in whatever state it is: found by their
checks, without liblmdb.

A pack whose footer is lost is known by the index alone, and an index that is damaged is made anew
as soon as it is opened. Before that, `repair` reads here what is left. Old records may be among it:
what they say counts only if the bytes there match the chunk's id.
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
"""From a chunk id to its record, in either of the databases that have some. LMDB puts a value right
behind its key."""
_OVERLAP = _DISTANCES[-1] + RECORD_BYTES
_FIELDS: Mapping[str, tuple[Any, ...]] = LOCATION_DTYPE.fields or {}
_FOUND: int = _FIELDS["found"][1]


def remains(folder: Path, store: StoreId) -> Iterator[tuple[npt.NDArray[np.void], Locations]]:
    """Chunk ids and records of `store` in the index at `folder`, by the block; nothing where there
    is no file that can be read."""
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
    marks = data[distance + _FOUND : distance + _FOUND + count : 2]  # keys begin at even places
    starts = 2 * np.flatnonzero(marks == 1)
    ids = ids_of(data[starts[:, None] + np.arange(CHUNK_ID_BYTES)].tobytes())
    rows = np.frombuffer(
        data[starts[:, None] + distance + np.arange(RECORD_BYTES)].tobytes(), LOCATION_DTYPE
    )
    sound = checks(seed, ids, rows) == rows["check"]
    return ids[sound], rows[sound]
