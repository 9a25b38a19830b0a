"""The chunk index of one store on one host: chunk id to location, in a SQLite file.

It is a cache that can be rebuilt from the packs' footers, so damage, a full disk or an unwritable
directory never raise. Records that cannot be written stay in memory. A damaged file is discarded,
`indexed()` says so, and the caller adds the packs again. SQLite survives damaged pages, and records
carry checksums of their own. Nothing is synced, so a file from before the last boot counts as
damaged.

Each lookup and each insert is one statement over all ids. SQLite gives the interpreter to other
threads between the steps of a statement, and a trainer at work would keep it from one step to the
next. Threads may share an index. A forked child opens its own connection.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import PackId, StoreId
from ckptstore.index import sqlite_file
from ckptstore.index.chunk_records import (
    LOCATION_DTYPE,
    NUMBER_BYTES,
    Locations,
    decode,
    decode_pack,
    encode,
    encode_pack,
    ids_of,
    seed_of,
    sorted_order,
)

_FORMAT = 2
_BATCH = 65536
_CACHE_KIB = 32 << 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_TABLES = """
CREATE TABLE about (stamp TEXT);
CREATE TABLE packs (number BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID;
CREATE TABLE chunks (id BLOB, pack BLOB, record BLOB, PRIMARY KEY (id, pack)) WITHOUT ROWID;
"""
"""Pack numbers are big-endian, so that each chunk id has its record at one distance in the file."""

_EACH = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count) "
_INSERT = (
    f"{_EACH} INSERT OR REPLACE INTO chunks "
    "SELECT substr(:ids, 32 * i + 1, 32), :pack, substr(:records, 32 * i + 1, 32) FROM n"
)
_GET = (
    f"{_EACH} SELECT group_concat(hex(coalesce((SELECT record FROM chunks "
    "WHERE id = substr(:ids, 32 * i + 1, 32) ORDER BY pack DESC LIMIT 1), zeroblob(32))), '') "
    "FROM n"
)
_LATER = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
}
"""Codes of failures that damage nothing."""
_T = TypeVar("_T")


_UNSOUND = (sqlite3.Error, ValueError, TypeError)
"""Errors of an unusable file. SQLite returns values of a damaged file unchecked."""


class ChunkIndex:
    """Locations of chunks by id. Use `open` to get one."""

    def __init__(self, path: Path, store: StoreId, timeout_s: float) -> None:
        self._path, self._store, self._seed = path, store, seed_of(store)
        self._timeout_s = timeout_s
        self.lock = threading.RLock()
        self._closed = False
        self._disk: _Database | None = None
        self._memory = _Database(None, self._seed, timeout_s)
        sqlite_file.survive_forks(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        store: StoreId,
        *,
        timeout_s: float = sqlite_file.LOCK_TIMEOUT_S,
    ) -> "ChunkIndex":
        """Open the index of `store` at `path`; create it if it is absent, damaged, of another store
        or from before the last boot."""
        index = cls(Path(path).absolute(), store, timeout_s)
        index._current()
        return index

    @property
    def on_disk(self) -> bool:
        """Whether there is a file; otherwise the index is in memory and lost when the process
        ends."""
        return self._current() is not None

    def get_many(self, ids: bytes) -> Locations:
        """The location of each of `ids`, 32 bytes each, as rows of `LOCATION_DTYPE` in the same
        order."""
        keys = ids_of(ids)
        order = sorted_order(keys)
        rows = np.empty(len(keys), LOCATION_DTYPE)
        for start in range(0, len(keys), _BATCH):
            part = order[start : start + _BATCH]
            rows[part] = self._get(keys[part])
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

        A chunk in several packs is found in the one with the largest number.
        """
        ids = np.ascontiguousarray(table["chunk"])
        order = sorted_order(ids)
        added = number, pack, ids[order], encode(self._seed, number, ids[order], table[order])
        with self.lock:
            if self._do(lambda database: database.insert(*added)):
                for waiting in list(self._memory.packs()):
                    if not self._do(
                        partial(_Database.insert_from, memory=self._memory, number=waiting)
                    ):
                        break
                    self._memory.remove({waiting})
            else:
                self._memory.insert(*added)

    def drop_packs(self, numbers: Iterable[int]) -> None:
        """Remove packs; their chunks are found in other packs that hold them. Reads the whole index
        once."""
        gone = set(numbers)
        with self.lock:
            self._memory.remove(gone)
            self._do(lambda database: database.remove(gone))

    def reset(self) -> None:
        """Clear the index: for `reindex`, and for a caller that finds a chunk missing although
        every pack is indexed."""
        with self.lock:
            self._memory.remove(set(self._memory.packs()))
            self._open(anew=True)

    def close(self) -> None:
        """Close the index; nothing is found afterwards."""
        with self.lock:
            self._closed = True
            self._memory.remove(set(self._memory.packs()))
            self._release()

    def _get(self, keys: npt.NDArray[np.void]) -> Locations:
        with self.lock:
            rows = self._do(lambda database: database.get(keys))
            rows = np.zeros(len(keys), LOCATION_DTYPE) if rows is None else rows
            if self._memory.packs() and not rows["found"].all():
                rows = np.where(rows["found"] == 1, rows, self._memory.get(keys))
            return rows

    def _packs(self) -> dict[int, PackId]:
        with self.lock:
            return (self._do(_Database.packs) or {}) | self._memory.packs()

    def _do(self, work: "Callable[[_Database], _T]") -> _T | None:
        """The result of `work`; None if there is no file, or it cannot be used now. A damaged one
        is recreated."""
        for _ in range(2):
            if (database := self._current()) is None:
                break
            try:
                return work(database)
            except _UNSOUND as error:
                replaced = database.replaced()
                if _code(error) in _LATER and not replaced:
                    break
                self._open(anew=not replaced)
        return None

    def _current(self) -> "_Database | None":
        """The file at the path, opened if necessary."""
        with self.lock:
            if not self._closed and (self._disk is None or self._disk.replaced()):
                self._open()
            return self._disk

    def _open(self, *, anew: bool = False) -> None:
        """Open the file if it is sound; otherwise, or with `anew`, create one. `_disk` stays None
        if neither works."""
        self._release()
        with suppress(OSError, *_UNSOUND):
            if sqlite_file.prepare(
                self._path,
                lambda _: not anew and self._sound(),
                self._fill,
                timeout_s=self._timeout_s,
            ):
                self._disk = _Database(self._path, self._seed, self._timeout_s)

    def _sound(self) -> bool:
        """Whether the file is of this store and boot. Raises if it is only busy."""
        try:
            database = _Database(self._path, self._seed, self._timeout_s)
            try:
                return database.stamp() == self._stamp()
            finally:
                database.close()
        except _UNSOUND as error:
            if _code(error) in _LATER:
                raise
            return False

    def _fill(self, path: Path) -> None:
        database = _Database(path, self._seed, self._timeout_s, journal="DELETE")
        try:
            database.make(self._stamp())
        finally:
            database.close()

    def _stamp(self) -> str:
        return f"{_FORMAT} {self._store} {_BOOT_ID.read_text() if _BOOT_ID.exists() else ''}"

    def _release(self) -> None:
        disk, self._disk = self._disk, None
        if disk:
            disk.close()

    def forked(self) -> None:
        """In a child: close the inherited connection, which holds no lock."""
        self._release()


class _Database:
    """The tables of the index at `path`, or in memory. The caller serializes access."""

    def __init__(
        self, path: Path | None, seed: int, timeout_s: float, *, journal: str = "TRUNCATE"
    ) -> None:
        self._path, self._seed = path, seed
        self._inode = sqlite_file.inode(path) if path else 0
        self._connection = sqlite3.connect(
            path or ":memory:", timeout=timeout_s, isolation_level=None, check_same_thread=False
        )
        for pragma in (
            f"journal_mode={journal}",
            "synchronous=OFF",
            "temp_store=MEMORY",
            f"cache_size=-{_CACHE_KIB}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        self._packs: dict[int, PackId] = {}
        self._packs_at = -1
        if path is None:
            self.make("")

    def make(self, stamp: str) -> None:
        """Create the tables of an empty index."""
        self._connection.executescript(_TABLES)
        self._connection.execute("INSERT INTO about VALUES (?)", [stamp])

    def stamp(self) -> object:
        return self._connection.execute("SELECT stamp FROM about").fetchone()[0]

    def replaced(self) -> bool:
        """Whether the path leads to another file now."""
        return self._path is not None and sqlite_file.inode(self._path) != self._inode

    def close(self) -> None:
        self._connection.close()

    def get(self, keys: npt.NDArray[np.void]) -> Locations:
        """The records of `keys`. Raises `ValueError` if one does not match its checksum."""
        if not len(keys):
            return np.zeros(0, LOCATION_DTYPE)
        values = {"ids": keys.tobytes(), "count": len(keys)}
        text = self._connection.execute(_GET, values).fetchone()[0]
        rows, whole = decode(self._seed, keys, bytearray.fromhex(text))
        if not whole:
            raise ValueError(f"{self._path} has an invalid record")
        return rows

    def packs(self) -> dict[int, PackId]:
        """The packs that are completely indexed. Read again only after another connection's
        change."""
        at = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        if at != self._packs_at:
            rows = self._connection.execute("SELECT number, row FROM packs").fetchall()
            packs = {
                int.from_bytes(key): decode_pack(self._seed, int.from_bytes(key), row)
                for key, row in rows
            }
            if None in packs.values():
                raise ValueError(f"{self._path} lists an invalid pack")
            self._packs = {number: pack for number, pack in packs.items() if pack}
            self._packs_at = at
        return self._packs

    def insert(self, number: int, pack: PackId, ids: npt.NDArray[np.void], rows: Locations) -> bool:
        """Add a pack unless it is present, replacing another one of the same number. True."""
        key, row = _key(number), encode_pack(self._seed, number, pack)
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            there = self._connection.execute("SELECT row FROM packs WHERE number = ?", [key])
            if (found := there.fetchone()) == (row,):
                return True
            if found:
                self._delete([key])
            if len(ids):
                self._connection.execute(
                    _INSERT,
                    {
                        "ids": ids.tobytes(),
                        "pack": key,
                        "records": rows.tobytes(),
                        "count": len(ids),
                    },
                )
            self._connection.execute("INSERT INTO packs VALUES (?, ?)", [key, row])
        self._packs[number] = pack
        return True

    def insert_from(self, memory: "_Database", number: int) -> bool:
        """Add a pack as it was added to `memory`."""
        rows = memory._connection.execute(
            "SELECT id, record FROM chunks WHERE pack = ?", [_key(number)]
        ).fetchall()
        ids, records = (b"".join(row[i] for row in rows) for i in range(2))
        return self.insert(
            number, memory.packs()[number], ids_of(ids), np.frombuffer(records, LOCATION_DTYPE)
        )

    def remove(self, numbers: set[int]) -> None:
        """Remove packs. Reads all chunks, if one of `numbers` is there."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._delete(map(_key, numbers))
        for number in numbers:
            self._packs.pop(number, None)

    def _delete(self, keys: Iterable[bytes]) -> None:
        deleted = self._connection.executemany(
            "DELETE FROM packs WHERE number = ?", [(key,) for key in keys]
        )
        if deleted.rowcount > 0:
            self._connection.execute(
                "DELETE FROM chunks WHERE pack NOT IN (SELECT number FROM packs)"
            )


def _key(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES)


def _code(error: Exception) -> int:
    """SQLite's primary result code; 0 for another error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
