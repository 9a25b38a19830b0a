"""Backends that hold the log's entries: the contract, and the default one, objects in the store's
`log/`.

A segment bundles a hundred entries of the log in one object, so that a host which knows none of
them need not request each (docs/format.md §9). Segments are a cache; the entries remain and are the
authority. Each entry names the hash of the one before, so a segment is valid if its last entry
equals the log's. Readers check that, and ignore invalid segments.

Under contention all but one attempt for each number fail, and each failed attempt slows the server
for all writers. Waiting lets others through, but plain random waits starve some writers. So a wait
is drawn in proportion to the duration of an attempt, and shrinks with the number of entries that
others appended since the call began. A writer that many have passed and that returns at once with
its next entry waits first. This needs no messages among writers and no shared clock.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Protocol

from ckptstore.core.forks import cached_property
from ckptstore.core.ids import StoreId, log_key, log_scratch_key, random_digits, segment_key
from ckptstore.core.paths import is_network_filesystem
from ckptstore.core.process import Pool
from ckptstore.errors import Corrupt, NotFound, ReadOnly
from ckptstore.log.entries import Entry, Position, check_follows, decode_entry, encode_entry
from ckptstore.objects.frames import bundle, unbundle
from ckptstore.storage.contract import SEGMENT_BYTES_MAX, Storage

SEGMENT_ENTRIES = 100
"""Small enough that the writer of the last entry usually knows all of them, and that few entries
remain to be requested individually."""


def segment_end(n: int) -> int:
    """The last entry of the segment that contains entry `n`."""
    return -(-n // SEGMENT_ENTRIES) * SEGMENT_ENTRIES


def encode_segment(entries: Iterable[Entry]) -> bytes:
    """The bytes of the file `log/segment-<n>` for the `SEGMENT_ENTRIES` entries up to `n`."""
    return bundle({log_key(entry.n): encode_entry(entry) for entry in entries})


def decode_segment(data: bytes, last: int, store: StoreId) -> list[Entry]:
    """The entries up to `last` of the log of `store`, each of which names the one before.

    Raises `Corrupt` for invalid bytes, `NewerEntry` for an unknown entry.
    """
    what = "a segment of the log, which is ignored and may be deleted,"
    files = unbundle(data, what, SEGMENT_BYTES_MAX)
    if files.keys() != set(map(log_key, range(last - SEGMENT_ENTRIES + 1, last + 1))):
        raise Corrupt(f"{what} has other entries than the {SEGMENT_ENTRIES} up to {last}")
    entries = list(map(decode_entry, files.values()))
    for before, entry in pairwise(entries):
        check_follows(entry, before.position, store)
    if (entries[-1].n, entries[-1].store) != (last, store):
        raise Corrupt(
            f"a segment of the log ends at entry {entries[-1].n} of store {entries[-1].store}; "
            f"wanted {last} of {store}"
        )
    return entries


_READ_AHEAD = 32
_SEGMENTS_AT_ONCE = 8
_FAR = 8
"""After reading this many entries individually, a reader tries segments."""

_SEGMENT_PREFIX = "log/segment-"
_COMPLETED_EVERY = 10 * SEGMENT_ENTRIES
"""The writer of every such entry also writes missing earlier segments."""

_logger = logging.getLogger("ckptstore")


class LogBackend(Protocol):
    """Entries by number, each created once and never changed. One thread at a time."""

    @property
    def is_local(self) -> bool:
        """Whether it is a local disk, which, unlike a network, does not recover from failures."""

    def read(self, n: int) -> bytes | None:
        """The bytes of entry `n`, or None if there is none."""

    def behind(self, n: int) -> Iterator[Entry]:
        """The entries after `n`, up to the first missing number. The caller checks the chain."""

    def has(self, n: int) -> bool:
        """Whether entry `n` exists. One look-up."""

    def still_has(self, position: Position) -> bool:
        """Whether the known entry at `position` still exists; True where `create` detects the
        loss."""

    def create(self, entry: Entry, data: bytes) -> bool:
        """Create `entry`, whose bytes are `data`, durably; False if its number is taken.

        After `Unavailable` the outcome is unknown; after `NoSpace` it was not created.
        """

    def settle(self, n: int) -> None:
        """Make entry `n`, found in storage, as durable as `create` would have."""

    def gathers(self, n: int) -> bool:
        """Whether `gather` has work to do at entry `n`."""

    def gather(self, n: int, newest: Sequence[Entry]) -> None:
        """Bundle the entries up to `n`, so that `behind` needs fewer steps; `newest` are entries
        that the caller knows.

        Optional work. Raises storage errors.
        """

    def turn(self) -> AbstractContextManager[None]:
        """Make other appenders wait within the block, where the backend can. Correctness does not
        depend on it."""

    def refresh(self) -> None:
        """Drop caches of absent entries."""


class LogObjects:
    """The log in the store itself."""

    def __init__(self, storage: Storage, store: StoreId) -> None:
        self._storage, self._store = storage, store

    @cached_property
    def is_local(self) -> bool:
        root = self._storage.capabilities.local_root
        return root is not None and not is_network_filesystem(root)

    def read(self, n: int) -> bytes | None:
        return self._read(log_key(n))

    def behind(self, n: int) -> Iterator[Entry]:
        """On a bucket, read in growing batches, and use segments where there are many entries."""
        if (data := self.read(n + 1)) is None:
            return
        yield decode_entry(data)
        yield from self._one_by_one(n + 1) if self.is_local else self._many(n + 1)

    def has(self, n: int) -> bool:
        return self._storage.size(log_key(n)) is not None

    def still_has(self, position: Position) -> bool:
        """Compare the hash in the entry's first line. Damage further on is found when the store is
        opened."""
        data = self.read(position.n)
        return (
            data is not None
            and len(data) == position.bytes
            and data.startswith(position.hash.encode())
        )

    def create(self, entry: Entry, data: bytes) -> bool:
        return self._storage.put_new(log_key(entry.n), data)

    def settle(self, n: int) -> None:
        self._storage.sync_dirs((log_key(n),))

    def gathers(self, n: int) -> bool:
        """Local disks need no segments: a whole file is read as fast as part of one."""
        return n % SEGMENT_ENTRIES == 0 and not self.is_local

    def gather(self, n: int, newest: Sequence[Entry]) -> None:
        """Write the last segment, and sometimes missing earlier ones."""
        if len(newest) >= SEGMENT_ENTRIES and newest[-1].n == n:
            self._storage.put(segment_key(n), encode_segment(newest[-SEGMENT_ENTRIES:]))
            wanted = (
                range(SEGMENT_ENTRIES, n, SEGMENT_ENTRIES)
                if n % _COMPLETED_EVERY == 0
                else range(0)
            )
        else:
            wanted = range(n, n + 1)
        there = {key for key, _ in self._storage.list(_SEGMENT_PREFIX)} if wanted else set()
        for last in wanted:
            if segment_key(last) not in there:
                self._write_segment(last)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refresh(self) -> None:
        """Touch `log/`, so that an NFS client drops its cache of the directory, including absent
        names.

        A process killed in between leaves an empty file, which `gc` deletes. Buckets have no such
        cache.
        """
        if self._storage.capabilities.local_root is None:
            return
        scratch = log_scratch_key(random_digits(12))
        try:
            self._storage.put(scratch, b"", durable=False)
            self._storage.delete(scratch)
        except ReadOnly:
            _logger.debug(
                "%s is read-only: names cached as absent only expire with time", self._storage.url
            )

    def _read(self, key: str) -> bytes | None:
        try:
            return self._storage.read(key)
        except NotFound:
            return None

    def _one_by_one(self, n: int) -> Iterator[Entry]:
        while (data := self.read(n := n + 1)) is not None:
            yield decode_entry(data)

    def _many(self, n: int) -> Iterator[Entry]:
        # A network filesystem caches absent names, so it is never asked for an entry that may not
        # exist yet.
        limit = _READ_AHEAD if self._storage.capabilities.slow_requests else 1
        with Pool(limit) as pool:
            met, batch, look_from = 1, min(2, limit), 0
            while True:
                if met >= _FAR and n >= look_from:
                    entries = self._from_segments(pool, n)
                    yield from entries
                    more = len(entries) > (_SEGMENTS_AT_ONCE - 1) * SEGMENT_ENTRIES
                    n = entries[-1].n if entries else n
                    look_from = n if more else segment_end(n + 1)
                    continue
                for data in pool.map(self.read, range(n + 1, n + 1 + batch)):
                    if data is None:
                        return
                    yield decode_entry(data)
                n, met, batch = n + batch, met + batch, min(2 * batch, limit)

    def _from_segments(self, pool: Pool, n: int) -> list[Entry]:
        """The entries after `n` as far as segments reach; none if the log's own entry at their end
        differs."""
        first = segment_end(n + 1)
        numbers = range(first, first + _SEGMENTS_AT_ONCE * SEGMENT_ENTRIES, SEGMENT_ENTRIES)
        files = pool.map(lambda last: (last, self._read(segment_key(last))), numbers)
        entries: list[Entry] = []
        try:
            for last, data in takewhile(lambda file: file[1] is not None, files):
                segment = decode_segment(data or b"", last, self._store)
                if entries:
                    check_follows(segment[0], entries[-1].position, self._store)
                entries += segment
            if (
                not entries
                or decode_entry(self.read(entries[-1].n) or b"").position == entries[-1].position
            ):
                return entries[n % SEGMENT_ENTRIES :]
            raise Corrupt(f"the log's entry {entries[-1].n} differs")
        except Corrupt as error:
            _logger.warning("segments of the log behind entry %d are not used: %s", n, error)
            return []

    def _write_segment(self, last: int) -> None:
        with Pool(_READ_AHEAD) as pool:
            files = list(pool.map(self.read, range(last - SEGMENT_ENTRIES + 1, last + 1)))
        self._storage.put(
            segment_key(last), encode_segment([decode_entry(data or b"") for data in files])
        )


_LONGEST_ATTEMPTS = 8.0
"""The longest wait, in attempts, of a writer that was never passed. Two writers lose little by it,
and of thirty-two about four compete."""
_PATIENCE = 8.0
"""A writer that this many entries have passed waits half as long."""
_CROWD_MAX = 32
_CROWD_SHARE = 0.5
"""The share of the writers that passed it last time which a returning writer waits for."""
_LONGEST_S = 2.0
"""If attempts take seconds, longer waits do not help the server."""


def pause_s(attempt_s: float, passed: int, draw: float) -> float:
    """The wait after a failed attempt of `attempt_s`, when others appended `passed` entries since
    the call began. `draw` is from 0 to 1."""
    return min(draw * _LONGEST_ATTEMPTS * attempt_s, _LONGEST_S) / (1 + passed / _PATIENCE)


@dataclass(frozen=True, slots=True)
class Met:
    """The contention seen by a writer's last append: entries that passed it, duration of the last
    failed attempt, and end time."""

    passed: int = 0
    attempt_s: float = 0.0
    ended_s: float = 0.0

    def pause_s(self, now_s: float, draw: float) -> float:
        """The wait before the first attempt of an append that begins at `now_s`."""
        crowd = min(self.passed, _CROWD_MAX)
        if crowd < 2 or now_s > self.ended_s + crowd * self.attempt_s:
            return 0.0
        return min(draw * _CROWD_SHARE * crowd * self.attempt_s, _LONGEST_S)
