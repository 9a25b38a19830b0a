"""Where a log's entries lie: what any such place does, and the usual one, objects in the store's
`log/`."""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import takewhile
from typing import Protocol

from ckptstore.core.ids import StoreId, log_key, log_scratch_key, segment_key
from ckptstore.core.paths import is_network_filesystem
from ckptstore.core.threads import Pool
from ckptstore.errors import Corrupt, NotFound, ReadOnly
from ckptstore.log.entries import Entry, Position, check_follows, decode_entry
from ckptstore.log.segments import SEGMENT_ENTRIES, decode_segment, encode_segment, segment_end
from ckptstore.storage.contract import Storage

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
        root = self._storage.durable_root
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
        if self._storage.durable_root is None:
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
        limit = 1 if self._storage.durable_root is not None else _READ_AHEAD
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
