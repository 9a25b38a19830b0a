"""Auditing the log's files: every entry is examined, even damaged, exchanged or missing ones.

`log.log` stops at the first problem; this module continues, and folds the state as far as it is
known. Each entry attests the hash and length of the one before, so of two that disagree the first
is wrong.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptstore.core.config import MIB
from ckptstore.core.ids import StoreId, checkpoint_key, log_key, segment_key
from ckptstore.core.threads import Pool
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.entries import Entry, NewerEntry, Position, decode_entry, origin
from ckptstore.log.fold import State, apply, genesis
from ckptstore.log.log_backend import decode_segment
from ckptstore.log.log_snapshots import decode_state
from ckptstore.storage.contract import Storage

ENTRY_BYTES_MAX = 256 * MIB
GAP_MAX = 1000
"""An entry further than this beyond the others is not part of this log, whatever its name says."""

_ENTRY = re.compile(r"log/([0-9]{12})")
_CHECKPOINT = re.compile(r"log/checkpoint-([0-9]{12})")
_SEGMENT = re.compile(r"log/segment-([0-9]{12})")
_SCRATCH = re.compile(r"log/scratch-[0-9a-f]{24}")
_READ_AHEAD = 16


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The names in `log/`: numbers of entries, checkpoints and segments, in order; `unknown` are
    other keys, and entries too far off."""

    entries: tuple[int, ...]
    checkpoints: tuple[int, ...]
    segments: tuple[int, ...]
    unknown: tuple[str, ...]

    @property
    def head(self) -> int:
        return max(self.entries, default=0)


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that is missing (`data` is None) or wrong at `n`; `wanted` is the attested one."""

    n: int
    data: bytes | None
    problem: str
    wanted: Position | None


@dataclass(frozen=True, slots=True)
class Chain:
    """The audited log. `state` is exact if `certain`; otherwise it lacks the effects of bad
    entries.

    `bad_checkpoints` are those that do not match this log's own entry, `bad_segments` those that do
    not end with it, with the problem of each.
    """

    state: State
    certain: bool
    head: int
    bad: tuple[BadEntry, ...]
    bad_checkpoints: tuple[tuple[int, str], ...]
    bad_segments: tuple[tuple[int, str], ...]
    unknown: tuple[str, ...]


def list_log(storage: Storage) -> LogFiles:
    """List the names in `log/`."""
    entries: list[int] = []
    checkpoints, segments, unknown = [], [], []
    for key, _ in storage.list("log/"):
        found = _ENTRY.fullmatch(key)
        if found and 0 < int(found[1]) <= (entries[-1] if entries else 0) + GAP_MAX:
            entries.append(int(found[1]))
        elif found := _CHECKPOINT.fullmatch(key):
            checkpoints.append(int(found[1]))
        elif found := _SEGMENT.fullmatch(key):
            segments.append(int(found[1]))
        elif not _SCRATCH.fullmatch(key):
            unknown.append(key)
    return LogFiles(tuple(entries), tuple(checkpoints), tuple(segments), tuple(unknown))


def read_chain(
    storage: Storage, store: StoreId, generation: int, *, remembered: Position | None = None
) -> Chain:
    """Examine every entry; `remembered` is an entry known to be in this log, for example by the
    catalog.

    Raises `Conflict` for an entry that only a newer ckptstore can read.
    """
    files = list_log(storage)
    states, bad_checkpoints = _read_checkpoints(storage, files, store, generation)
    witnesses = {n: state.position for n, state in states.items() if n <= files.head + GAP_MAX}
    if remembered and 0 < remembered.n <= files.head + GAP_MAX:
        witnesses.setdefault(remembered.n, remembered)
    ends, bad_segments = _read_segments(storage, files, store)
    examination = _Examination(store, generation, states, ends)
    head = max([files.head, *witnesses])
    for n, data in _contents(storage, head):
        examination.add(n, data)
    bad = tuple(
        replace(entry, wanted=entry.wanted or witnesses.get(entry.n))
        for entry in examination.finish()
    )
    strangers = tuple(
        (n, "it is not the state at this log's own entry")
        for n in states
        if n not in examination.matched
    )
    foreign = tuple(
        (n, "it does not end with this log's own entry") for n in ends if n not in examination.ended
    )
    segments = (*bad_segments, *foreign)
    return Chain(
        examination.state,
        examination.certain,
        head,
        bad,
        (*bad_checkpoints, *strangers),
        segments,
        files.unknown,
    )


def decode_at(n: int, data: bytes, store: StoreId) -> Entry:
    """The entry in the file `log/<n>` of `store`; raises `Corrupt`, or `NewerEntry`."""
    entry = decode_entry(data)
    if (entry.n, entry.store) != (n, store):
        raise Corrupt(
            f"the file holds entry {entry.n} of store {entry.store}; wanted entry {n} of store "
            f"{store}"
        )
    return entry


def read_small(storage: Storage, key: str) -> bytes | None:
    """The bytes of a small object; None if it is absent, unreadable, or far too large for its
    kind."""
    try:
        data = storage.read(key, 0, ENTRY_BYTES_MAX + 1)
    except (NotFound, Corrupt, Unavailable):
        return None
    return data if len(data) <= ENTRY_BYTES_MAX else None


class _Examination:
    """One pass over the entries in order, which separates good from bad and folds the state.

    An entry is applied only once its successor has not contradicted it.
    """

    def __init__(
        self,
        store: StoreId,
        generation: int,
        checkpoints: Mapping[int, State],
        ends: Mapping[int, Position],
    ) -> None:
        self.state = genesis(store, generation)
        self.certain = True
        self.matched: set[int] = set()
        self.ended: set[int] = set()
        self._store, self._checkpoints, self._ends = store, checkpoints, ends
        self._bad: dict[int, BadEntry] = {}
        self._waiting: tuple[Entry, bytes] | None = None

    def add(self, n: int, data: bytes | None) -> None:
        """Examine the entry after the last one added."""
        try:
            entry = decode_at(n, _there(data), self._store)
        except NewerEntry:
            raise
        except CkptStoreError as error:
            self._settle()
            self._bad[n] = BadEntry(n, data, str(error), None)
            return
        self._hear(entry)
        self._settle()
        self._waiting = (entry, _there(data))

    def finish(self) -> list[BadEntry]:
        """The bad entries, in order."""
        self._settle()
        return [self._bad[n] for n in sorted(self._bad)]

    def _hear(self, entry: Entry) -> None:
        """Compare what `entry` attests with the entry before it."""
        attested = Position(entry.n - 1, entry.prev_hash, entry.prev_bytes)
        if bad := self._bad.get(entry.n - 1):
            self._bad[bad.n] = replace(bad, wanted=attested)
            return
        before, data = (
            (self._waiting[0].position, self._waiting[1])
            if self._waiting
            else (origin(self._store), None)
        )
        if before != attested:
            # No entry precedes entry 1, so a wrong attestation is its own fault.
            n = max(entry.n - 1, 1)
            problem = f"entry {entry.n} wants before it the entry {attested}, got {before}"
            self._bad[n] = BadEntry(n, data, problem, attested if n < entry.n else None)

    def _settle(self) -> None:
        if self._waiting is None:
            return
        (entry, _), self._waiting = self._waiting, None
        if entry.n in self._bad:
            return
        self.certain = self.certain and entry.n == self.state.n + 1
        self.state = apply(self.state, entry)
        if self._ends.get(entry.n) == entry.position:
            self.ended.add(entry.n)
        checkpoint = self._checkpoints.get(entry.n)
        if checkpoint is not None and checkpoint.position == entry.position:
            self.matched.add(entry.n)
            if not self.certain:
                self.state, self.certain = checkpoint, True


def _is_gone(storage: Storage, key: str) -> bool:
    try:
        return storage.size(key) is None
    except CkptStoreError:
        return False


def _there(data: bytes | None) -> bytes:
    if data is None:
        raise NotFound("it is missing or cannot be read")
    return data


def _read_checkpoints(
    storage: Storage, files: LogFiles, store: StoreId, generation: int
) -> tuple[dict[int, State], tuple[tuple[int, str], ...]]:
    states, bad = {}, []
    for n in files.checkpoints:
        try:
            state = decode_state(_there(read_small(storage, checkpoint_key(n))), store, generation)
            if state.n != n:
                raise Corrupt(f"it is the state at entry {state.n}")
            states[n] = state
        except (Corrupt, NotFound) as error:
            # Older ones are deleted as new ones are written.
            if not _is_gone(storage, checkpoint_key(n)):
                bad.append((n, str(error)))
    return states, tuple(bad)


def _read_segments(
    storage: Storage, files: LogFiles, store: StoreId
) -> tuple[dict[int, Position], tuple[tuple[int, str], ...]]:
    """The last entry of each segment, and the problems of invalid ones."""
    ends, bad = {}, []
    with Pool(_READ_AHEAD) as pool:
        contents = pool.map(lambda n: read_small(storage, segment_key(n)), files.segments)
        for n, data in zip(files.segments, contents, strict=True):
            try:
                ends[n] = decode_segment(_there(data), n, store)[-1].position
            except (Corrupt, NotFound) as error:
                bad.append((n, str(error)))
    return ends, tuple(bad)


def _contents(storage: Storage, last: int) -> Iterator[tuple[int, bytes | None]]:
    batch = _READ_AHEAD * 8
    with Pool(_READ_AHEAD) as pool:
        for first in range(1, last + 1, batch):
            numbers = range(first, min(first + batch, last + 1))
            yield from zip(
                numbers, pool.map(lambda n: read_small(storage, log_key(n)), numbers), strict=True
            )
