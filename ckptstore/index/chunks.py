"""The chunk index of one store on one host: chunk id to location.

It is a folder of runs. A *run* is a file that never changes and has the chunks of some packs, in
order of their ids. A new pack makes a new run, which takes in the newest runs as long as they are
not larger; so there are few, and a lookup searches each. Where several packs hold a chunk, the one
added last is found.

It is a cache that can be rebuilt from the packs, so damage, a full disk or an unwritable directory
never raise. Records that cannot be written stay in memory. A damaged run is deleted; `indexed()`
says so, and the caller adds its packs again. Nothing is synced, so a run from before the last boot
counts as damaged. A run is read before it is mapped, and its size is looked at before each use: a
missing page below a mapping would kill the process.

A lock on `<path>.lock` serializes the writers of all processes. Threads and forked children may
share an index.
"""

import mmap
import os
import re
import secrets
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.config import MIB
from ckptstore.core.ids import CHUNK_ID_BYTES, PackId, StoreId, digest
from ckptstore.core.paths import make_directories, rights, write_file
from ckptstore.errors import Corrupt
from ckptstore.index.sqlite_file import survive_forks
from ckptstore.log.entries import seal, unseal
from ckptstore.objects.canonical import decode, encode
from ckptstore.storage.file_lock import file_lock

LOCATION_DTYPE = np.dtype(
    [
        ("pack", "<u4"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("codec", "u1"),
        ("width", "u1"),
        ("found", "u1"),
        ("zero", "u1"),
        ("offset", "<u8"),
        ("check", "<u8"),
    ]
)
"""The location of a chunk: pack number, offset and stored bytes in it, raw bytes, codec, element
width. `found` is 0 if unknown; `check` is a checksum over store, chunk id and the other fields."""

Locations: TypeAlias = npt.NDArray[np.void]
_Ids: TypeAlias = npt.NDArray[np.void]
_Words: TypeAlias = npt.NDArray[np.uint64]
_Listing: TypeAlias = dict[str, tuple[int, int, int]]

_ID = np.dtype(f"V{CHUNK_ID_BYTES}")
_RECORD = np.dtype([("chunk", _ID), ("where", LOCATION_DTYPE)])
_TAIL = struct.Struct("<QQ16s")
_MAGIC = b"ckptstore run 1\n"
_ROW_BYTES = _RECORD.itemsize + 8
_NAME = re.compile(r"[0-9]{12}-[0-9a-f]{16}")
"""A counter, by which runs are ordered, and random digits, so that no name is used twice."""
_READ_BYTES = 8 * MIB
_LOCK_TIMEOUT_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The chunks of `packs`, sorted by `words`, the first eight bytes of each id."""

    words: _Words
    records: npt.NDArray[np.void]
    packs: dict[int, PackId]
    name: str = ""

    def find(self, ids: _Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Which of `ids` this run has, and the positions of these here."""
        if not len(self.words):
            return np.zeros(len(ids), np.bool_), np.empty(0, np.intp)
        words = _first_words(ids)
        at = self.words.searchsorted(words, "right") - 1
        same = self.words[at] == words
        if same.any():
            alike = np.flatnonzero(same)
            same[alike] = self.records["chunk"][at[alike]] == ids[alike]
            for i in alike[~same[alike]]:  # another id that begins with the same eight bytes
                while not same[i] and at[i] > 0 and self.words[at[i] - 1] == words[i]:
                    at[i] -= 1
                    same[i] = self.records["chunk"][at[i]] == ids[i]
        return same, at[same]

    def without(self, gone: set[int]) -> "Run":
        """This run without some packs."""
        kept = ~np.isin(self.records["where"]["pack"], list(gone))
        packs = {number: pack for number, pack in self.packs.items() if number not in gone}
        return Run(self.words[kept], self.records[kept], packs)

    def encode(self, stamp: str) -> bytes:
        """The bytes of the run's file. `stamp` names store and boot."""
        packs = [[number, pack] for number, pack in self.packs.items()]
        head = seal(encode({"stamp": stamp, "packs": packs}))
        tail = _TAIL.pack(len(self.words), len(head), _MAGIC)
        return b"".join((self.records.tobytes(), self.words.tobytes(), head, tail))


def run_of_pack(seed: int, number: int, pack: PackId, table: npt.NDArray[np.void]) -> Run:
    """A run of one pack, whose footer is `table`, rows of `FOOTER_DTYPE`."""
    records = np.zeros(len(table), _RECORD)
    records["chunk"] = table["chunk"]
    where = records["where"]
    where["pack"], where["found"] = number, 1
    for field in ("stored", "raw", "codec", "width", "offset"):
        where[field] = table[field]
    where["check"] = checks(seed, records["chunk"], where)
    return _merged([Run(_first_words(records["chunk"]), records, {number: pack})])


def _merged(runs: Sequence[Run]) -> Run:
    """The content of `runs`, oldest first, as one run. Of equal ids the newest comes last."""
    words = np.concatenate([run.words for run in runs])
    order = np.argsort(words, kind="stable")
    packs = {number: pack for run in runs for number, pack in run.packs.items()}
    return Run(words[order], np.concatenate([run.records for run in runs])[order], packs)


def read_run(path: Path, stamp: str) -> Run:
    """The run at `path`, mapped into memory. Raises `Corrupt` if it is damaged or its stamp is
    another one, and `OSError` if the disk cannot read all of it."""
    with path.open("rb") as file:
        try:
            data = _content(file)
            size = len(data)
            count, head_bytes, magic = _TAIL.unpack(data[-_TAIL.size :])
            if magic != _MAGIC or count * _ROW_BYTES + head_bytes + _TAIL.size != size:
                raise Corrupt(f"{path} is no run of {count} chunks")
            head = decode(unseal(data[count * _ROW_BYTES : -_TAIL.size], "a run of chunks"))
            if head["stamp"] != stamp:
                raise Corrupt(f"{path} is of {head['stamp']}; wanted {stamp}")
            packs = {number: PackId(pack) for number, pack in head["packs"]}
            words: _Words = np.ndarray(count, "<u8", data, count * _RECORD.itemsize)
            return Run(words, np.ndarray(count, _RECORD, data), packs, path.name)
        except (ValueError, struct.error) as error:
            raise Corrupt(f"{path} is no run of chunks: {error}") from error


def _content(file: BufferedReader) -> "bytes | mmap.mmap":
    """The content of a file: read if it is small, else mapped after all of it could be read."""
    size = os.fstat(file.fileno()).st_size
    if size <= _READ_BYTES:
        return file.read()
    buffer = bytearray(_READ_BYTES)
    while file.readinto(buffer):
        pass
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def salvage(folder: Path, store: StoreId) -> Iterator[tuple[_Ids, Locations]]:
    """Chunk ids and locations of `store` in the index at `folder`, in whatever state its files are.

    Only the index knows the content of a pack whose footer is lost. Some records may be stale, so a
    record counts only if the bytes at its location match the chunk's id.
    """
    for name in sorted(_list(folder)):
        with suppress(OSError), (folder / name).open("rb") as file:
            while block := file.read(MIB):
                records = np.frombuffer(
                    block[: len(block) // _RECORD.itemsize * _RECORD.itemsize], _RECORD
                )
                sound = (
                    checks(seed_of(store), records["chunk"], records["where"])
                    == records["where"]["check"]
                )
                yield np.ascontiguousarray(records["chunk"][sound]), records["where"][sound]


def seed_of(store: StoreId) -> int:
    """The seed of a store's checksums, so that another store's records do not pass."""
    return int.from_bytes(digest(b"ckptstore chunk index " + store.encode())[:8], "little")


def checks(seed: int, ids: _Ids, where: Locations) -> _Words:
    """64-bit checksums of locations over store, chunk id and fields.

    Each step is a bijection of the sum so far, so that one changed word is always detected.
    """
    total = np.full(len(where), seed, np.uint64)
    for column in (_columns(ids), _columns(where)[:-1]):
        for words in column:
            total ^= words
            total *= _ODD
            total ^= total >> _SHIFT
    return total


def _columns(rows: npt.NDArray[np.void]) -> _Words:
    """The 64-bit words of rows of 32 bytes, by their position in the row."""
    columns: _Words = np.ascontiguousarray(rows).view("<u8").reshape(-1, 4).T
    return columns


def _first_words(ids: _Ids) -> _Words:
    return np.ascontiguousarray(_columns(ids)[0])


def _list(folder: Path) -> _Listing:
    """The runs in `folder`, by name, with what shows that a file was replaced or cut."""
    found: _Listing = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


class ChunkIndex:
    """Locations of chunks by id. Use `open` to get one."""

    def __init__(self, path: Path, store: StoreId, lock_timeout_s: float) -> None:
        self._path, self._seed, self._lock_timeout_s = path, seed_of(store), lock_timeout_s
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        self._stamp = f"{store} {boot}"
        self._listing: _Listing = {}
        self._runs: tuple[Run, ...] = ()
        self._unsaved: tuple[Run, ...] = ()
        self._closed = False
        self.lock = threading.RLock()
        survive_forks(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        store: StoreId,
        *,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> "ChunkIndex":
        """Open the index of `store` in the folder `path`; create it if it is absent, and delete
        what is damaged, of another store or from before the last boot."""
        index = cls(Path(path).resolve(), store, lock_timeout_s)
        if not index._current() and not index.on_disk:
            with index._writing():
                pass
        return index

    @property
    def on_disk(self) -> bool:
        """Whether there is a folder; otherwise the index is in memory and lost when the process
        ends."""
        return os.path.isdir(self._path)

    def get_many(self, ids: bytes) -> Locations:
        """The location of each of `ids`, 32 bytes each, as rows of `LOCATION_DTYPE` in the same
        order."""
        keys = np.frombuffer(ids, _ID)
        rows, left = np.zeros(len(keys), LOCATION_DTYPE), np.arange(len(keys))
        for run in reversed(self._current()):
            there, at = run.find(keys[left])
            rows[left[there]] = run.records["where"][at]
            left = left[~there]
            if not len(left):
                break
        wrong = checks(self._seed, keys, rows) != rows["check"]
        wrong[left] = False
        if wrong.any():
            self._discard(keys[wrong])
            rows[wrong] = np.zeros((), LOCATION_DTYPE)
        return rows

    def pack_ids(self, numbers: Iterable[int]) -> dict[int, PackId]:
        """The ids of those of the packs `numbers` that are in the index."""
        runs = self._current()
        return {n: run.packs[n] for n in numbers for run in runs if n in run.packs}

    def indexed(self) -> set[int]:
        """The numbers of the packs that are completely indexed."""
        return {number for run in self._current() for number in run.packs}

    def add_pack(self, number: int, pack: PackId, table: npt.NDArray[np.void]) -> None:
        """Index the chunks of a pack, whose footer is `table`, rows of `FOOTER_DTYPE`. Idempotent.

        A chunk in several packs is found in the one added last.
        """
        with self.lock:
            there = self.pack_ids([number]).get(number)
            if there not in (None, pack):
                self.drop_packs([number])
            if there != pack:
                self._unsaved += (run_of_pack(self._seed, number, pack, table),)
            if self._unsaved:
                with self._writing() as possible:
                    if possible:
                        self._save()

    def drop_packs(self, numbers: Iterable[int]) -> None:
        """Remove packs; their chunks are found in other packs that hold them. Reads the whole index
        once."""
        gone = set(numbers)
        with self.lock:
            self._unsaved = tuple(run.without(gone) for run in self._unsaved)
            with self._writing() as possible:
                if possible and any(gone & run.packs.keys() for run in self._runs):
                    self._write(_merged(self._runs).without(gone), self._runs)

    def reset(self) -> None:
        """Clear the index: for `reindex`, and for a caller that finds a chunk missing although
        every pack is indexed."""
        with self.lock:
            self._unsaved = ()
            with self._writing() as possible:
                if possible:
                    shutil.rmtree(self._path, ignore_errors=True)
                    self._read()
                    with suppress(OSError):
                        self._make_folder()

    def close(self) -> None:
        """Close the index; nothing is found afterwards."""
        with self.lock:
            self._closed = True
            self._listing, self._runs, self._unsaved = {}, (), ()

    def forked(self) -> None:
        """Nothing: what is mapped or in memory is the child's, too."""

    def _current(self) -> tuple[Run, ...]:
        """The runs as of now, oldest first."""
        if not self._closed and _list(self._path) != self._listing:
            with (
                self.lock,
                file_lock(self._lock_path, timeout_s=self._lock_timeout_s, exclusive=False),
            ):
                self._read()
        return self._runs + self._unsaved

    def _read(self) -> None:
        """Open the runs that are new. The caller keeps writers out, if it can."""
        known = {run.name: run for run in self._runs}
        listing, runs = _list(self._path), []
        for name in sorted(listing):
            if name in known and self._listing.get(name) == listing[name]:
                runs.append(known[name])
                continue
            try:
                runs.append(read_run(self._path / name, self._stamp))
            except (OSError, Corrupt):
                with suppress(OSError):
                    (self._path / name).unlink(missing_ok=True)
        if not self._closed:
            self._listing, self._runs = listing, tuple(runs)

    def _discard(self, ids: _Ids) -> None:
        """Delete the runs that have damaged records of `ids`."""
        with self.lock:
            for run in self._runs:
                if run.find(ids)[0].any():
                    with suppress(OSError):
                        (self._path / run.name).unlink(missing_ok=True)
                    self._runs = tuple(other for other in self._runs if other is not run)

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Keep all other writers out; the runs are as they left them. The value is False if this
        is impossible."""
        with suppress(OSError):
            make_directories(self._path.parent)
        with file_lock(self._lock_path, timeout_s=self._lock_timeout_s) as held:
            possible = held
            if held:
                try:
                    self._make_folder()
                    self._read()
                except OSError:
                    possible = False
            yield possible

    def _make_folder(self) -> None:
        if self._path.is_symlink() or not self._path.is_dir():
            self._path.unlink(missing_ok=True)
            self._path.mkdir(mode=rights(self._path.parent))

    def _save(self) -> None:
        """Write what is in memory, unless another process has, with the newest runs as long as
        they are not larger."""
        held = {item for run in self._runs for item in run.packs.items()}
        fresh = [run for run in self._unsaved if not run.packs.items() <= held]
        count, kept = sum(len(run.words) for run in fresh), len(self._runs)
        while fresh and kept and len(self._runs[kept - 1].words) <= count:
            kept -= 1
            count += len(self._runs[kept].words)
        old = self._runs[kept:]
        if not fresh or self._write(_merged([*old, *fresh]), old):
            self._unsaved = ()

    def _write(self, run: Run, old: Sequence[Run]) -> bool:
        """Put `run` in place of the `old` ones; False if the disk does not take it."""
        new, newest = self._path / "new", max(self._listing, default="0")
        name = f"{int(newest.partition('-')[0]) + 1:012}-{secrets.token_hex(8)}"
        data = run.encode(self._stamp)
        try:
            write_file(new, data)
            new.rename(self._path / name)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        for other in old:
            with suppress(OSError):
                (self._path / other.name).unlink(missing_ok=True)
        if len(data) <= _READ_BYTES:
            self._listing = _list(self._path)
            self._runs = (
                *(other for other in self._runs if other not in old),
                replace(run, name=name),
            )
        else:
            self._read()
        return True

    @property
    def _lock_path(self) -> Path:
        return self._path.with_name(self._path.name + ".lock")
