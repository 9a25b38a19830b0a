"""Where a log's entries lie: what any such place does, and the usual one, objects in the store's
`log/`.

A segment is a hundred entries of the log in one object, so that who knows none of them need not
ask for each (docs/format.md §9).

It is a cache of the log: the entries stay where they are, and are the authority. Each names the
hash of the one before, so a segment whose last entry is the log's holds the log's; whoever reads
one compares that, and ignores a segment that is not what it should be.

How long does a writer wait for others who append to the same log?

Where many append at once, all but one attempt for each number are in vain, and where the server is
what limits, each of them makes all others slower. Who waits lets others through; but by chance
alone some would be let through again and again and one never. So a wait is drawn from the time that
an attempt takes there, and becomes shorter with the number of entries that others appended since
the call began; and whoever was passed by many, and comes back at once with the next entry, begins
with a wait. That needs no message among the writers and no clock that they share.
"""

import logging
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Protocol

from ckptstore.core.ids import StoreId, digest, log_key, log_scratch_key, segment_key
from ckptstore.core.paths import is_network_filesystem
from ckptstore.core.threads import Pool
from ckptstore.errors import Corrupt, NotFound, ReadOnly
from ckptstore.log.entries import Entry, Position, check_follows, decode_entry, encode_again
from ckptstore.objects.frames import compress, decompress
from ckptstore.storage.contract import Storage
from ckptstore.storage.limits import SEGMENT_BYTES_MAX

SEGMENT_ENTRIES = 100
"""Few enough for whoever appends the last one to know them all, and to leave less than that many to
be asked for one by one."""

_HASH_DIGITS = 64
_LENGTHS = struct.Struct(f"<{SEGMENT_ENTRIES}I")


def segment_end(n: int) -> int:
    """The last entry of the segment that entry `n` is in."""
    return -(-n // SEGMENT_ENTRIES) * SEGMENT_ENTRIES


def encode_segment(entries: Sequence[Entry]) -> bytes:
    """The bytes of the file `log/segment-<n>` for the `SEGMENT_ENTRIES` entries up to `n`."""
    files = [encode_again(entry) for entry in entries]
    frame = compress(_LENGTHS.pack(*map(len, files)) + b"".join(files))
    return digest(frame).hex().encode() + b"\n" + frame


def decode_segment(data: bytes, last: int, store: StoreId) -> list[Entry]:
    """The entries up to `last` of the log of `store`, each of which names the one before.

    Raises `Corrupt` for anything else, `NewerEntry` for an entry that is not known here.
    """
    frame = memoryview(data)[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != digest(frame).hex().encode() + b"\n":
        raise Corrupt(
            "a segment of the log does not match its hash; it is ignored and may be deleted"
        )
    entries = [
        decode_entry(file)
        for file in _files(decompress(frame, SEGMENT_BYTES_MAX, min_bytes=_LENGTHS.size))
    ]
    for before, entry in pairwise(entries):
        check_follows(entry, before.position, store)
    if (entries[-1].n, entries[-1].store) != (last, store):
        raise Corrupt(
            f"a segment of the log ends at entry {entries[-1].n} of store {entries[-1].store}; "
            f"wanted {last} of {store}"
        )
    return entries


def _files(content: bytes) -> list[bytes]:
    lengths = _LENGTHS.unpack_from(content)
    if _LENGTHS.size + sum(lengths) != len(content):
        raise Corrupt(
            f"a segment of the log has {len(content)} bytes; wanted "
            f"{_LENGTHS.size + sum(lengths)}; it is ignored"
        )
    files, at = [], _LENGTHS.size
    for length in lengths:
        files.append(content[at : at + length])
        at += length
    return files


_READ_AHEAD = 32
_SEGMENTS_AT_ONCE = 8
_FAR = 8
"""So many new entries were met one by one when it pays to ask for segments."""

_SEGMENT_PREFIX = "log/segment-"
_COMPLETED_EVERY = 10 * SEGMENT_ENTRIES
"""Whoever appends such an entry writes the segments, too, that others did not come to write."""

_logger = logging.getLogger("ckptstore")


class LogBackend(Protocol):
    """Entries by number, each created once and never changed. One thread at a time."""

    @property
    def is_local(self) -> bool:
        """Whether it is a disk of this host, which does not come back by itself as a network
        does."""

    def read(self, n: int) -> bytes | None:
        """The bytes of entry `n`, None if there is none."""

    def behind(self, n: int) -> Iterator[Entry]:
        """The entries behind `n`, up to the first that is not there. Whether each follows on the
        one before is for the caller to see."""

    def has(self, n: int) -> bool:
        """Whether there is an entry `n`; one look-up."""

    def still_has(self, position: Position) -> bool:
        """Whether the entry at `position`, which was there, still is; True where `create` finds
        that out by itself."""

    def create(self, entry: Entry, data: bytes) -> bool:
        """Create `entry`, whose bytes are `data`, durably; False if its number is taken.

        After `Unavailable` nobody knows, and after `NoSpace` it is not there.
        """

    def settle(self, n: int) -> None:
        """Make entry `n`, which was found there, as durable as `create` would have."""

    def gathers(self, n: int) -> bool:
        """Whether there is something for `gather` to do at entry `n`."""

    def gather(self, n: int, newest: Sequence[Entry]) -> None:
        """Put the entries up to `n` together, so that `behind` finds them in fewer steps; `newest`
        are those that the caller knows.

        Nothing depends on it. Raises what storage raises.
        """

    def turn(self) -> AbstractContextManager[None]:
        """Within, others who append wait, where the place can make them. What holds the log
        together does not depend on it."""

    def refresh(self) -> None:
        """Look anew from here on at what was not there."""


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
        """From a bucket more and more of them at a time, and where there are many, from
        segments."""
        if (data := self.read(n + 1)) is None:
            return
        yield decode_entry(data)
        yield from self._one_by_one(n + 1) if self.is_local else self._many(n + 1)

    def has(self, n: int) -> bool:
        return self._storage.size(log_key(n)) is not None

    def still_has(self, position: Position) -> bool:
        """By the hash in its first line: damage further on is for those to find who open the
        store."""
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
        """A disk of this host is asked for a file as fast as for a part of one."""
        return n % SEGMENT_ENTRIES == 0 and not self.is_local

    def gather(self, n: int, newest: Sequence[Entry]) -> None:
        """The last segment, and now and then those before it that are not there."""
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
        """A change in `log/` by this host makes an NFS client drop what it cached of the directory,
        names that were absent included.

        Who ends in between leaves an empty file, which `gc` deletes. A bucket is not asked by a
        client that remembers.
        """
        if self._storage.capabilities.local_root is None:
            return
        scratch = log_scratch_key(secrets.token_hex(12))
        try:
            self._storage.put(scratch, b"", durable=False)
            self._storage.delete(scratch)
        except ReadOnly:
            _logger.debug(
                "%s is read-only: names cached as absent expire by themselves", self._storage.url
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
        # A name that a network filesystem found absent stays so for a while: there nothing is asked
        # for that may not be there yet.
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
        """The entries behind `n` as far as segments have them; none if the log's own entry at their
        end is another one."""
        first = segment_end(n + 1)
        numbers = range(first, first + _SEGMENTS_AT_ONCE * SEGMENT_ENTRIES, SEGMENT_ENTRIES)
        found = takewhile(
            lambda data: data is not None, pool.map(self._read, map(segment_key, numbers))
        )
        entries: list[Entry] = []
        try:
            for last, data in zip(numbers, found, strict=False):
                segment = decode_segment(data or b"", last, self._store)
                if entries:
                    check_follows(segment[0], entries[-1].position, self._store)
                entries += segment
            if (
                not entries
                or decode_entry(self.read(entries[-1].n) or b"").position == entries[-1].position
            ):
                return entries[n % SEGMENT_ENTRIES :]
            raise Corrupt(f"the log's entry {entries[-1].n} is another one")
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
"""Who was never passed waits for at most so many attempts. Two writers lose little by it, and of
thirty-two some four compete."""
_PATIENCE = 8.0
"""Whoever so many entries have passed waits half as long."""
_CROWD = 32
_OF_CROWD = 0.5
"""Who comes back lets at most so many of those through that passed it the last time."""
_LONGEST_S = 2.0
"""Where an attempt takes seconds, the server is not to be spared by waiting longer."""


def pause_s(attempt_s: float, passed: int, draw: float) -> float:
    """After an attempt in vain, which took `attempt_s`; others appended `passed` entries since the
    call began. `draw` is from 0 to 1."""
    return min(draw * _LONGEST_ATTEMPTS * attempt_s, _LONGEST_S) / (1 + passed / _PATIENCE)


@dataclass(frozen=True, slots=True)
class Met:
    """What a writer met in its last append: how many entries passed it, how long its last attempt
    in vain took, when it ended."""

    passed: int = 0
    attempt_s: float = 0.0
    ended_s: float = 0.0

    def pause_s(self, now_s: float, draw: float) -> float:
        """Before the first attempt of an append that begins at `now_s`."""
        crowd = min(self.passed, _CROWD)
        if crowd < 2 or now_s > self.ended_s + crowd * self.attempt_s:
            return 0.0
        return min(draw * _OF_CROWD * crowd * self.attempt_s, _LONGEST_S)
