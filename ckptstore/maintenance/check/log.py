"""fsck's first level: every entry of the log is examined, even damaged, exchanged or missing ones,
and so are its caches (checkpoints, segments) and its tags.

`log.log` stops at the first problem; this module continues, and folds the state as far as it is
known. Each entry attests the hash and length of the one before, so of two that disagree the first
is wrong.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptstore.core.config import MIB
from ckptstore.core.ids import StoreId, checkpoint_key, log_key, segment_key
from ckptstore.core.threads import Pool
from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.log.entries import Entry, NewerEntry, Position, decode_entry, origin
from ckptstore.log.fold import State, apply, genesis
from ckptstore.log.log_backend import decode_segment
from ckptstore.log.log_snapshots import decode_state
from ckptstore.maintenance.check.report import Finding, Kind, Severity, foreign
from ckptstore.storage.contract import Storage

ENTRY_BYTES_MAX = 256 * MIB
GAP_MAX = 1000
"""An entry further than this beyond the others is not part of this log, whatever its name says."""

_NAME = re.compile(r"log/(checkpoint-|segment-|)([0-9]{12})")
_SCRATCH = re.compile(r"log/scratch-[0-9a-f]{24}")
_READ_AHEAD = 16
_REPAIR = (
    "run `ckptstore repair`: it knows whether the entry can be made again, from a mirror "
    "with --from"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that is missing (`data` is None) or wrong at `n`; `wanted` is the attested one."""

    n: int
    data: bytes | None
    problem: str
    wanted: Position | None


@dataclass(frozen=True, slots=True)
class BadCache:
    """A checkpoint or segment `key` that does not match this log's own entry `n`."""

    key: str
    n: int
    problem: str


@dataclass(frozen=True, slots=True)
class Chain:
    """The audited log. `state` is exact if `certain`; otherwise it lacks the effects of bad
    entries. `unknown` are foreign keys in `log/`."""

    state: State
    certain: bool
    head: int
    bad: tuple[BadEntry, ...]
    bad_caches: tuple[BadCache, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The names in `log/`: numbers of entries, checkpoints and segments, in order; `unknown` are
    other keys, and entries too far off."""

    entries: list[int]
    checkpoints: list[int]
    segments: list[int]
    unknown: list[str]


def list_log(storage: Storage) -> LogFiles:
    """List the names in `log/`."""
    files = LogFiles([], [], [], [])
    numbered = {"": files.entries, "checkpoint-": files.checkpoints, "segment-": files.segments}
    for key, _ in storage.list("log/"):
        found = _NAME.fullmatch(key)
        last = files.entries[-1] if files.entries else 0
        if found and (found[1] or 0 < int(found[2]) <= last + GAP_MAX):
            numbered[found[1]].append(int(found[2]))
        elif not _SCRATCH.fullmatch(key):
            files.unknown.append(key)
    return files


def read_chain(
    storage: Storage, store: StoreId, generation: int, *, remembered: Position | None = None
) -> Chain:
    """Examine every entry; `remembered` is an entry known to be in this log, for example by the
    catalog.

    Raises `Conflict` for an entry that only a newer ckptstore can read.
    """

    def state_at(n: int, data: bytes) -> State:
        state = decode_state(data, store, generation)
        if state.n != n:
            raise Corrupt(f"it is the state at entry {state.n}")
        return state

    def end_at(n: int, data: bytes) -> Position:
        return decode_segment(data, n, store)[-1].position

    files = list_log(storage)
    last = max(files.entries, default=0)
    states, bad = _caches(storage, checkpoint_key, files.checkpoints, state_at)
    ends, bad_segments = _caches(storage, segment_key, files.segments, end_at)
    witnesses = {n: state.position for n, state in states.items() if n <= last + GAP_MAX}
    if remembered and 0 < remembered.n <= last + GAP_MAX:
        witnesses.setdefault(remembered.n, remembered)
    examination = _Examination(store, generation, states, ends)
    head = max([last, *witnesses])
    for n, data in _read_many(storage, log_key, range(1, head + 1)):
        examination.add(n, data)
    broken = examination.finish()
    bad += (
        BadCache(checkpoint_key(n), n, "it is not the state at this log's own entry")
        for n, state in states.items()
        if examination.applied.get(n) != state.position
    )
    bad_segments += (
        BadCache(segment_key(n), n, "it does not end with this log's own entry")
        for n, end in ends.items()
        if examination.applied.get(n) != end
    )
    return Chain(
        examination.state,
        examination.certain,
        head,
        tuple(replace(entry, wanted=entry.wanted or witnesses.get(entry.n)) for entry in broken),
        (*bad, *bad_segments),
        tuple(files.unknown),
    )


def log_findings(chain: Chain) -> Iterator[Finding]:
    """Invalid entries and caches. Pure."""
    for bad in chain.bad:
        state = "is missing" if bad.data is None else "is damaged"
        what = f"entry {bad.n} of the log {state}: {bad.problem}"
        yield Finding(Kind.ENTRY, what, _REPAIR, key=log_key(bad.n), entry=bad.n)
    for cache in chain.bad_caches:
        what = f"{cache.key}, a cache of the log up to entry {cache.n}, is ignored: {cache.problem}"
        step = "run `ckptstore repair --apply`, which removes it"
        yield Finding(Kind.CHECKPOINT, what, step, Severity.INDEX, cache.key, cache.n)
    yield from (foreign(key, "into a log") for key in chain.unknown)
    if not chain.certain:
        what = (
            "what the bad entries did is unknown: commits, tags and packs that only they name "
            "are not in what follows"
        )
        yield Finding(Kind.ENTRY, what, _REPAIR)


def ref_findings(state: State) -> Iterator[Finding]:
    """Tags that name no commit. Pure."""
    for name, commit in sorted(state.tags.items()):
        if commit not in state.commits:
            what = f"tag {name!r} names commit {commit[:12]}, which is not in the log"
            step = f"set it again: `ckptstore tag {name} REF`, or remove it: `ckptstore tag -d "
            yield Finding(Kind.REF, what, f"{step}{name}`")


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
    except CkptStoreError:
        return None
    return data if len(data) <= ENTRY_BYTES_MAX else None


class _Examination:
    """One pass over the entries in order, which separates good from bad and folds the state.

    An entry is applied only once its successor has not contradicted it.
    """

    def __init__(
        self, store: StoreId, generation: int, checkpoints: Mapping[int, State], ends: Iterable[int]
    ) -> None:
        self.state = genesis(store, generation)
        self.certain = True
        self.applied: dict[int, Position] = {}
        self._store, self._checkpoints, self._cached = store, checkpoints, {*checkpoints, *ends}
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
        if entry.n in self._cached:
            self.applied[entry.n] = entry.position
        checkpoint = self._checkpoints.get(entry.n)
        if not self.certain and checkpoint and checkpoint.position == entry.position:
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


def _caches(
    storage: Storage,
    key_of: Callable[[int], str],
    numbers: Sequence[int],
    decode: Callable[[int, bytes], T],
) -> tuple[dict[int, T], list[BadCache]]:
    """The content of each checkpoint or segment, and the problems of invalid ones."""
    good, bad = dict[int, T](), list[BadCache]()
    for n, data in _read_many(storage, key_of, numbers):
        try:
            good[n] = decode(n, _there(data))
        except (Corrupt, NotFound) as error:
            # Older ones are deleted as new ones are written.
            if not _is_gone(storage, key_of(n)):
                bad.append(BadCache(key_of(n), n, str(error)))
    return good, bad


def _read_many(
    storage: Storage, key_of: Callable[[int], str], numbers: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    batch = _READ_AHEAD * 8
    with Pool(_READ_AHEAD) as pool:
        for first in range(0, len(numbers), batch):
            some = numbers[first : first + batch]
            yield from zip(
                some, pool.map(lambda n: read_small(storage, key_of(n)), some), strict=True
            )
