"""The chunk index of one store on one host: chunk id to location.

It is a cache that can be rebuilt from the packs, so damage, a full disk or an unwritable directory
never raise. Records that cannot be written stay in memory. A damaged file is discarded, `indexed()`
says so, and the caller adds the packs again. Nothing is synced, so a file from before the last boot
counts as damaged. A file is checked before it is mapped, and its size before each use: a missing
page below a mapping would kill the process.

No link is followed: not the folder, not the one that it lies in, and no file in it. A link is
deleted like damage, and what it leads to stays as it is.

A lock on `<path>.lock` serializes the writers of all processes. Threads may share an index; a child
process opens its own.
"""

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
import numpy.typing as npt

from ckptstore.core.forks import survives_forks
from ckptstore.core.ids import CHUNK_ID_BYTES, PackId, StoreId, random_digits
from ckptstore.core.paths import (
    index_file,
    is_plain,
    make_index_directory,
    read_plain,
    rights,
    write_file,
)
from ckptstore.core.process import file_lock
from ckptstore.index.chunks import lmdb_check
from ckptstore.index.chunks.lmdb_check import Damaged
from ckptstore.index.chunks.lmdb_env import (
    DATABASES,
    LOCK_BYTES,
    MAP_BYTES,
    UNSOUND,
    LmdbEnvironment,
    Transaction,
    Work,
    is_open,
    release,
    share,
)
from ckptstore.index.chunks.records import (
    LOCATED_DTYPE,
    LOCATION_DTYPE,
    NOTHING,
    NUMBER_BYTES,
    RECORD_BYTES,
    Locations,
    MemoryRecords,
    decode,
    decode_pack,
    depth_of,
    encode,
    encode_pack,
    ids_of,
    items_of,
    seed_of,
    sorted_order,
    with_ids,
)

_FORMAT = 2
_BATCH = 65536
_FEW = 64
"""Up to this many ids are looked up unsorted: sorting them would cost more than it saves."""
_LOCK_TIMEOUT_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
_T = TypeVar("_T")


class ChunkIndex:
    """Locations of chunks by id. Use `open` to get one."""

    def __init__(self, path: Path, store: StoreId, map_bytes: int, lock_timeout_s: float) -> None:
        self._path, self._store, self._seed = path, store, seed_of(store)
        self._map_bytes, self._lock_timeout_s = map_bytes, lock_timeout_s
        self._env: LmdbEnvironment | None = None
        self._memory = MemoryRecords()
        self._packs_at: tuple[int, dict[int, PackId]] = -1, {}
        survives_forks(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        store: StoreId,
        *,
        map_bytes: int = MAP_BYTES,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> "ChunkIndex":
        """Open the index of `store` in the folder `path`; create it if it is absent, damaged, of
        another store or from before the last boot.

        `map_bytes` is address space, not disk; it grows.
        """
        index = cls(index_file(path), store, map_bytes, lock_timeout_s)
        index._current()
        return index

    @property
    def on_disk(self) -> bool:
        """Whether there is a file; otherwise the index is in memory and lost when the process
        ends."""
        return self._current() is not None

    @property
    def whole_on_disk(self) -> bool:
        """Whether every pack is in the file, so that the next process finds it."""
        return self.on_disk and not self._memory.packs

    def get_many(self, ids: bytes) -> Locations:
        """Each of `ids`, 32 bytes each, with its location: rows of `LOCATED_DTYPE` in the same
        order."""
        keys = ids_of(ids)
        if 0 < len(keys) <= _FEW:
            return with_ids(keys, self._get(keys))
        order = sorted_order(keys)
        rows = np.empty(len(keys), LOCATED_DTYPE)
        for start in range(0, len(keys), _BATCH):
            part = order[start : start + _BATCH]
            some = keys[part]
            rows[part] = with_ids(some, self._get(some))
        return rows

    def pack_ids(self, numbers: Iterable[int]) -> dict[int, PackId]:
        """The ids of those of the packs `numbers` that are in the index."""
        packs = self._packs()
        return {n: packs[n] for n in numbers if n in packs}

    def indexed(self) -> set[int]:
        """The numbers of the packs that are completely indexed; none after damage."""
        return set(self._packs())

    def add_pack(self, number: int, pack: PackId, table: npt.NDArray[np.void]) -> None:
        """Index the chunks of a pack, whose footer is `table`, rows of `FOOTER_DTYPE`. Idempotent.

        A chunk in several packs is found where the fewest patches make it, of equal places in the
        pack added last.
        """
        rows = encode(self._seed, number, table)
        with self._lock:
            if not self._insert(number, pack, rows):
                self._memory.add(number, pack, rows)
                return
            for waiting, other in list(self._memory.packs.items()):
                if not self._insert(waiting, other, self._memory.contents[waiting]):
                    break
                self._memory.drop([waiting])

    def drop_packs(self, numbers: Iterable[int]) -> None:
        """Remove packs; their chunks are found in other packs that hold them. Reads the whole index
        once."""
        gone = set(numbers)
        with self._lock:
            self._memory.drop(gone)
            self._write(lambda env, txn: remove(env, txn, gone))

    def reset(self) -> None:
        """Clear the index: for `reindex`, and for a caller that finds a chunk missing although
        every pack is indexed."""
        with self._lock:
            self._memory = MemoryRecords()
            self._open(anew=True)

    def close(self) -> None:
        """Close the index; nothing is found afterwards. The last index of the process on a path
        closes its environment."""
        with self._lock:
            self._closed = True
            self._memory = MemoryRecords()
            self._release()

    def _get(self, keys: npt.NDArray[np.void]) -> Locations:
        listed = keys.tolist()
        env = self._env if not self._forked else self._current()
        records = self._read(env, lambda _, txn: _records(txn, listed)) if env else None
        if records is None:
            records = bytearray(len(listed) * RECORD_BYTES)
        rows, whole = decode(self._seed, keys, records)
        if not whole and env:
            self._give_up(env)
        if self._memory.packs and not rows["found"].all():
            with self._lock:
                fallback, _ = decode(self._seed, keys, self._memory.get(listed))
            unknown = rows["found"] != 1
            rows[unknown] = fallback[unknown]
        return rows

    def _packs(self) -> dict[int, PackId]:
        with self._lock:
            env = self._current()
            if env and self._read(env, self._list_packs) is None:
                self._packs_at = -1, {}
            return self._packs_at[1] | self._memory.packs

    def _list_packs(self, env: LmdbEnvironment, txn: Transaction) -> bool:
        if txn.id() != self._packs_at[0]:
            rows = txn.cursor(env.packs)
            packs = dict(decode_pack(self._seed, key, row) for key, row in rows)
            self._packs_at = txn.id(), packs
        return True

    def _insert(self, number: int, pack: PackId, rows: Locations) -> bool:
        row = encode_pack(self._seed, number, pack)
        done = self._write(lambda env, txn: insert(env, txn, number, row, rows))
        if done and done - 1 == self._packs_at[0]:
            self._packs_at[1][number] = pack
            self._packs_at = done, self._packs_at[1]
        return done is not None

    def _read(self, env: LmdbEnvironment, work: Work[_T]) -> _T | None:
        """The result of `work`, or None if the file turns out to be damaged; it is then
        recreated."""
        try:
            return env.read(work)
        except UNSOUND:
            self._give_up(env)
            return None

    def _write(self, work: Work[_T]) -> _T | None:
        """The result of `work`, or None if the disk cannot take the write."""
        for _ in range(2):
            env = self._current()
            if not env:
                break
            with file_lock(self._lock_path, timeout_s=self._lock_timeout_s) as held:
                if not held:
                    break
                try:
                    return env.write(work)
                except lmdb.Error as error:
                    if isinstance(error, lmdb.DiskError) or error.code in _DISK_REFUSES:
                        break
                except Damaged:
                    pass
            self._give_up(env)
        return None

    @property
    def _lock_path(self) -> Path:
        return self._path.with_name(self._path.name + ".lock")

    def _current(self) -> LmdbEnvironment | None:
        """The environment at the path, opened if necessary."""
        with self._lock:
            if not self._closed and (self._env is None or self._env.replaced()):
                self._open()
            self._forked = False
            return self._env

    def _give_up(self, env: LmdbEnvironment) -> None:
        """Replace a damaged file, unless another thread or process has done so."""
        with self._lock:
            if self._env is env:
                self._open(anew=not env.replaced())

    def _open(self, *, anew: bool = False) -> None:
        """Open the file if it is sound; otherwise, or with `anew`, create one. `_env` stays None if
        neither works."""
        self._release()
        try:
            make_index_directory(self._path.parent)
            for exclusive in (False, True):
                with file_lock(
                    self._lock_path, timeout_s=self._lock_timeout_s, exclusive=exclusive
                ) as held:
                    sound = held and not anew and self._sound()
                    if held and exclusive and not sound:
                        self._make()
                    if sound or (held and exclusive):
                        self._env = share(self._path, self._map_bytes)
                        return
        except (OSError, *UNSOUND):
            return

    def _sound(self) -> bool:
        """Whether the file is of this store and boot, and safe for liblmdb. The caller holds the
        file lock."""
        if is_open(self._path):
            return True
        data, lock = self._path / "data.mdb", self._path / "lock.mdb"
        if not is_plain(data) or not is_plain(lock):
            return False
        try:
            # A process that has a lost or a shorter lock file open would not see others' locks.
            if lock.stat().st_size < LOCK_BYTES:
                return False
            lmdb_check.check(data, DATABASES)
            return read_plain(self._path / "stamp") == self._stamp().encode()
        except (OSError, Damaged):
            return False

    def _make(self) -> None:
        """Put an empty index in place of any existing file. Processes that have the old one open
        keep it until they check."""
        aside = self._path.with_name(f"{self._path.name}.{random_digits(8)}")
        with suppress(FileNotFoundError):
            self._path.rename(aside)
            _delete(aside)
        self._path.mkdir(mode=rights(self._path.parent))
        write_file(self._path / "lock.mdb", bytes(LOCK_BYTES))
        write_file(self._path / "stamp", self._stamp().encode())

    def _stamp(self) -> str:
        return f"{_FORMAT} {self._store} {_BOOT_ID.read_text() if _BOOT_ID.exists() else ''}"

    def _release(self) -> None:
        env, self._env, self._packs_at = self._env, None, (-1, {})
        if env:
            release(env)

    def forked(self) -> None:
        """After a fork, locks may be held by threads of the parent, and the environment belongs to
        the parent."""
        self._lock = threading.RLock()
        self._forked, self._closed = True, False
        self._env = None


def _records(txn: Transaction, keys: list[bytes]) -> bytearray:
    """The records of `keys`, `NOTHING` for absent ones."""
    records = bytearray().join(map(txn.get, keys, repeat(NOTHING)))
    if len(records) != len(keys) * RECORD_BYTES:
        raise Damaged("a record does not have the size that all have")
    return records


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        import shutil  # only here: seldom needed

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def insert(env: LmdbEnvironment, txn: Transaction, number: int, row: bytes, rows: Locations) -> int:
    """Add a pack with its chunks, replacing another one of the same number; returns the
    transaction's number, or 0 if the pack was present: LMDB gives the number of an empty
    transaction to the next one again."""
    key = number.to_bytes(NUMBER_BYTES)
    if (there := txn.get(key, db=env.packs)) == row:
        return 0
    if there is not None:
        remove(env, txn, {number})
    for start in range(0, len(rows), _BATCH):
        _insert_batch(env, txn, number, items_of(rows[start : start + _BATCH]))
    txn.put(key, row, db=env.packs)
    return txn.id()


def _insert_batch(
    env: LmdbEnvironment, txn: Transaction, number: int, items: list[tuple[bytes, bytes]]
) -> None:
    cursor = txn.cursor(env.chunks)
    _, added = cursor.putmulti(items, overwrite=False)
    if added < len(items):
        held = dict(cursor.getmulti([key for key, _ in items]))
        others, first = list[tuple[bytes, bytes]](), list[tuple[bytes, bytes]]()
        for key, record in items:
            there = held[key]
            pack = int.from_bytes(there[:NUMBER_BYTES], "little")
            if pack != number and depth_of(there) < depth_of(record):
                others.append((key + number.to_bytes(NUMBER_BYTES), record))
                continue
            first.append((key, record))
            if pack != number:
                others.append((key + pack.to_bytes(NUMBER_BYTES), there))
        txn.cursor(env.others).putmulti(others)
        cursor.putmulti(first)


def remove(env: LmdbEnvironment, txn: Transaction, gone: set[int]) -> int:
    """Remove packs; returns the transaction's number."""
    keys = {number.to_bytes(NUMBER_BYTES) for number in gone}
    deleted = [txn.delete(key, db=env.packs) for key in keys]
    if any(deleted):
        others: dict[bytes, tuple[int, bytes]] = {}
        for key in [key for key, _ in txn.cursor(env.others) if key[CHUNK_ID_BYTES:] in keys]:
            txn.delete(key, db=env.others)
        for key, record in txn.cursor(env.others):
            chunk, depth = key[:CHUNK_ID_BYTES], depth_of(record)
            if chunk not in others or depth <= others[chunk][0]:
                others[chunk] = depth, key
        for chunk in _chunks_of(env, txn, gone):
            if chunk in others:
                txn.put(chunk, txn.pop(others[chunk][1], db=env.others) or NOTHING)
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
