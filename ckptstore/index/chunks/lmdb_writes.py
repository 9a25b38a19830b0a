"""Adding and removing packs in the databases of the chunk index, each in one transaction."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.index.chunks.lmdb_check import Damaged
from ckptstore.index.chunks.lmdb_env import LmdbEnvironment, Transaction
from ckptstore.index.chunks.records import (
    LOCATION_DTYPE,
    NOTHING,
    NUMBER_BYTES,
    RECORD_BYTES,
    Locations,
    as_values,
)

_BATCH = 65536


def insert(
    env: LmdbEnvironment,
    txn: Transaction,
    number: int,
    row: bytes,
    ids: npt.NDArray[np.void],
    rows: Locations,
) -> int:
    """Add a pack, replacing another one of the same number; returns the transaction's number, or 0
    if the pack was present: LMDB gives the number of an empty transaction to the next one again."""
    key = number.to_bytes(NUMBER_BYTES)
    if (there := txn.get(key, db=env.packs)) == row:
        return 0
    if there is not None:
        remove(env, txn, {number})
    for start in range(0, len(ids), _BATCH):
        _insert_batch(
            env,
            txn,
            number,
            ids[start : start + _BATCH].tolist(),
            as_values(rows[start : start + _BATCH]),
        )
    txn.put(key, row, db=env.packs)
    return txn.id()


def _insert_batch(
    env: LmdbEnvironment, txn: Transaction, number: int, keys: list[bytes], values: list[bytes]
) -> None:
    cursor = txn.cursor(env.chunks)
    _, added = cursor.putmulti(list(zip(keys, values, strict=True)), overwrite=False)
    if added < len(keys):
        held = (
            (key, int.from_bytes(value[:NUMBER_BYTES], "little"), value)
            for key, value in cursor.getmulti(keys)
        )
        others = [
            (key + pack.to_bytes(NUMBER_BYTES), value)
            for key, pack, value in held
            if pack != number
        ]
        txn.cursor(env.others).putmulti(others)
        cursor.putmulti(list(zip(keys, values, strict=True)))


def remove(env: LmdbEnvironment, txn: Transaction, gone: set[int]) -> int:
    """Remove packs; returns the transaction's number."""
    keys = {number.to_bytes(NUMBER_BYTES) for number in gone}
    deleted = [txn.delete(key, db=env.packs) for key in keys]
    if any(deleted):
        others: dict[bytes, bytes] = {}
        for key in [key for key, _ in txn.cursor(env.others) if key[CHUNK_ID_BYTES:] in keys]:
            txn.delete(key, db=env.others)
        for key, _ in txn.cursor(env.others):
            others[key[:CHUNK_ID_BYTES]] = key
        for chunk in _chunks_of(env, txn, gone):
            if other := others.get(chunk):
                txn.put(chunk, txn.pop(other, db=env.others) or NOTHING)
            else:
                txn.delete(chunk)
    return txn.id()


def _chunks_of(env: LmdbEnvironment, txn: Transaction, packs: set[int]) -> list[bytes]:
    """The chunks that the index finds in one of `packs`."""
    chunks: list[bytes] = []
    cursor, wanted = iter(txn.cursor(env.chunks)), np.array(sorted(packs), np.uint32)
    while batch := list(islice(cursor, _BATCH)):
        values = b"".join(value for _, value in batch)
        if len(values) != len(batch) * RECORD_BYTES:
            raise Damaged("a record does not have the size that all have")
        rows = np.frombuffer(values, LOCATION_DTYPE)
        chunks.extend(batch[i][0] for i in np.flatnonzero(np.isin(rows["pack"], wanted)).tolist())
    return chunks
