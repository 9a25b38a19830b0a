"""The log of a store: replay it to its head, append to it, and settle whether an append took place
(docs/format.md §8).

An entry exists once its object does, and objects are created exclusively, so the log needs no lock,
no lease and no clock. If the answer to a create is lost, reading the entry at its number tells
whether it took place.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ckptstore.core.forks import survives_forks
from ckptstore.core.ids import CONFIG_KEY, StoreId
from ckptstore.core.process import behind, pauses
from ckptstore.errors import (
    Busy,
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    Unavailable,
)
from ckptstore.log.admission import Demand, Refusal, check
from ckptstore.log.entries import (
    Body,
    Entry,
    Position,
    check_follows,
    decode_entry,
    encode_entry,
    origin,
)
from ckptstore.log.log_backend import LogBackend, LogObjects, Met, pause_s
from ckptstore.log.log_snapshots import SavedStates, has_position
from ckptstore.log.state import State, apply, genesis, next_entry, number
from ckptstore.storage.contract import Storage

CHECKPOINT_EVERY = 1000
APPEND_TIMEOUT_S = 60.0
LOCAL_PATIENCE_S = 2.0
"""How long operations on a local disk are retried. Unlike a network, a disk that fails for longer
does not recover."""
RECENT = 1024
"""Number of decoded entries kept in memory for folding."""
REMEMBER_EVERY = 8
"""A host saves the state after an open that had to read this many entries."""

_AHEAD = (*range(2, 18), *(2**i for i in range(5, 13)))
"""Distances past the end of the log at which `check_no_gap` looks for entries."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

_logger = logging.getLogger("ckptstore")


def _random_share() -> float:
    """A random number from 0 to less than 1, from the system's source. All hosts of a job may have
    seeded `random` alike, and the log must not change a trainer's random numbers."""
    return int.from_bytes(os.urandom(6), "big") / (1 << 48)


class Refused(Conflict):
    """The state at the head of the log does not admit the entry; nothing was appended. `refusal`
    tells what to do next."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.why)
        self.refusal = refusal


class Log:
    """The log of one store. Threads may share it; one append or replay runs at a time."""

    def __init__(
        self,
        storage: Storage,
        store: StoreId,
        generation: int,
        *,
        place: LogBackend | None = None,
        memory: Path | None = None,
        with_config: bool = False,
    ) -> None:
        """Entries are in `place`, by default the store's own `log/`.

        `memory` is a file on this host that keeps the state between processes, for slow storage.
        With `with_config`, an append fails if the directory has lost its ckptstore.json.
        """
        self._storage = storage
        self._backend = place or LogObjects(storage, store)
        self._state = genesis(store, generation)
        self.saved = SavedStates(storage, self._backend, self._state, memory)
        self._opened = False
        # Checking the head again costs a request on remote storage, so only appends do it there.
        self._is_far = storage.capabilities.slow_requests
        self._gathering: threading.Thread | None = None
        self._met = Met()
        self.appended: Entry | None = None
        """The last entry that this object appended. It is set before anything else is done with
        it, so that a call which is interrupted can tell."""
        # On a bucket the check would cost one more request.
        self._looks_for_config = with_config and not storage.capabilities.slow_requests
        survives_forks(self)

    def forked(self) -> None:
        self._lock = threading.RLock()
        self._recent: deque[Entry] = deque(maxlen=RECENT)

    @property
    def state(self) -> State:
        """The state as of the last replay; before the first one, the state of an empty log."""
        return self._state

    def replay(
        self, *, refresh: bool = False, tell: Callable[[Entry], object] = lambda _: None
    ) -> State:
        """The state at the head of the log.

        `refresh` first makes a network filesystem drop its cache of absent names. `tell` hears of
        each new entry before the next is looked for, and must not wait. Raises `Corrupt`
        for a broken chain, or if the last entry known to this process is gone.
        """
        with self._lock:
            if refresh:
                self._backend.refresh()
            if not self._opened:
                self._state = self.saved.newest(CHECKPOINT_EVERY) or self._state
            known = self._state.n
            for entry in self._behind(self._state.position):
                self._advance(entry)
                tell(entry)
            if self._opened and self._state.n == known and not self._is_far:
                self.check_head()
            if not self._opened:
                self.check_no_gap(self._state.n)
                self._opened = True
                self.saved.remember(self._state, REMEMBER_EVERY)
            return self._state

    def head_after(self, n: int) -> bool:
        """Whether the log has an entry after `n`. One look-up, no replay."""
        return self._backend.has(n + 1)

    def has(self, position: Position) -> bool:
        """Whether `position` is the store's origin or an entry of this log."""
        return has_position(self._backend, self._state.store, position)

    def check_head(self) -> None:
        """Raise `Corrupt` if the last entry known to this process is no longer in the log.

        A store may be moved, deleted, or replaced by a backup or another copy while it is open. An
        entry appended after a missing one would be acknowledged and lost.
        """
        with self._lock:
            position = self._state.position
            if position.n and not self._backend.still_has(position):
                raise Corrupt(
                    f"entry {position.n} of the log, which this process has read or written, is "
                    f"no longer in {self._storage.url}: the store was moved, deleted, or replaced "
                    "by a backup or another copy while it was open; nothing was appended; open "
                    "it again"
                )

    def check_config(self) -> None:
        """Raise `Corrupt` if the directory has lost its ckptstore.json: the store is being deleted.

        Called after an entry was created, to decide whether it may be acknowledged.
        """
        if self._looks_for_config and self._storage.size(CONFIG_KEY) is None:
            raise Corrupt(
                f"{self._storage.url} has lost its ckptstore.json while it was open: the store is "
                "being deleted, or was damaged, and a commit in it would be lost; nothing is "
                "acknowledged; if it was not deleted on purpose, run `ckptstore repair`, and open "
                "it again"
            )

    def check_no_gap(self, n: int) -> None:
        """Raise `Corrupt` if entry `n + 1` is missing although a later one exists: `n` would look
        like the head of the log.

        On a local disk, look for several later entries, since more than one may be missing.
        """
        later = next(
            (
                n + ahead
                for ahead in (_AHEAD if self._backend.is_local else _AHEAD[:1])
                if self.head_after(n + ahead - 1)
            ),
            None,
        )
        if later is None:
            return
        # All may have been created between two look-ups, and a network filesystem caches the first
        # answer.
        self._backend.refresh()
        if not self.head_after(n):
            raise Corrupt(
                f"entry {n + 1} of the log is missing, although entry {later} is there; run "
                "`ckptstore repair`, with --from and a mirror"
            )

    def read_entries(
        self, after: int = 0, prev_hash: str = "", prev_bytes: int = 0
    ) -> Iterator[Entry]:
        """The entries after entry `after`, given its hash and length (ignored if `after` is 0).

        Raises `Corrupt` if the chain is broken, or if the log does not have that entry: the
        caller's position is of another log.
        """
        position = Position(after, prev_hash, prev_bytes) if after else origin(self._state.store)
        entries = self._spliced(position)
        first = next(entries, None)
        if first is not None:
            yield first
            yield from entries
        elif after:
            self._check_has(position)

    def entry(self, n: int) -> Entry:
        """One entry; its place in the chain is not checked.

        Raises `NotFound` if there is none.
        """
        with self._lock:
            if self._recent and 0 <= n - self._recent[0].n < len(self._recent):
                return self._recent[n - self._recent[0].n]
        if (data := self._backend.read(n)) is None:
            raise NotFound(f"the log has no entry {n}; run `ckptstore fsck`")
        return decode_entry(data)

    def known_behind(self, position: Position) -> list[Entry] | None:
        """The entries after `position` up to the last replayed state, or None if this process no
        longer has them all."""
        with self._lock:
            if position == self._state.position:
                return []
            found = [entry for entry in self._recent if entry.n > position.n]
            if (
                not found
                or found[0].n != position.n + 1
                or (found[0].prev_hash, found[0].prev_bytes) != position[1:]
            ):
                return None
            return found

    def append(
        self,
        body: Body,
        *,
        time_ns: int | None = None,
        demand: Demand | None = None,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> Entry:
        """Append `body` at the head of the log, its new packs numbered; durable on return.
        `time_ns` is the time of the event, by default now.

        Raises `Refused` if the state at the head, or `demand`, does not admit it, `Busy` if other
        writers took every number within `timeout_s`, `InvalidInput` for a body that has no
        encoding, and `Corrupt` if the log lost an entry meanwhile. Raises `Unavailable` if storage
        did not answer within `timeout_s`, or a local disk within `LOCAL_PATIENCE_S`. The entry may
        then be in the log or still arrive: delete nothing before a replay has told.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if wait_s := self._met.pause_s(time.monotonic(), _random_share()):
                time.sleep(wait_s)
            with self._backend.turn():
                return self._append(body, time_ns, demand, deadline, timeout_s)

    def close(self) -> None:
        """Wait for a segment or checkpoint that is being written, and save the state for the next
        process."""
        if self._gathering is not None:
            self._gathering.join()
        if self._opened:
            self.saved.remember(self._state, 1)

    # -- appending --

    def _append(
        self,
        body: Body,
        time_ns: int | None,
        demand: Demand | None,
        deadline: float,
        timeout_s: float,
    ) -> Entry:
        known, lost_s = self._state.n, 0.0
        state = self.replay()
        began = state.n
        while True:
            numbered = number(state, body)
            if refusal := check(state, numbered) or (demand and demand(state)):
                raise Refused(refusal)
            # An entry that was read during this call needs no check.
            if self._is_far and state.n == known:
                self.check_head()
            data, entry = self._encode(state, numbered, time_ns or time.time_ns())
            attempted_at_s = time.monotonic()
            there = self._create(data, entry, deadline)
            if there.attempt == entry.attempt:
                self.appended = entry
                self.check_config()
                self._check_successor(entry)
                self._advance(entry)
                self._gather_behind(entry.n)
                self._met = Met(state.n - began, lost_s, time.monotonic())
                return entry
            check_follows(there, state.position, state.store)
            self._advance(there)
            if time.monotonic() > deadline:
                raise Busy(
                    f"others appended to the log for {timeout_s:.0f} s without a gap; nothing was "
                    "appended, repeat"
                )
            if not self._backend.is_local:
                lost_s = time.monotonic() - attempted_at_s
                time.sleep(pause_s(lost_s, there.n - began, _random_share()))
            state = self.replay()

    def _encode(self, state: State, body: Body, time_ns: int) -> tuple[bytes, Entry]:
        """The bytes of the next entry, and that entry as readers will decode it."""
        data = encode_entry(next_entry(state, body, time_ns))
        try:
            return data, decode_entry(data)
        except Corrupt as error:
            raise InvalidInput(
                "this entry cannot be written, because no reader could decode it: "
                f"{error.__cause__ or error}"
            ) from error

    def _create(self, data: bytes, entry: Entry, deadline: float) -> Entry:
        """Try to create `entry`. Returns the entry that got the number: `entry` itself, or another
        writer's. Retries until an answer settles it."""
        unknown = False
        for wait_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                return entry if self._backend.create(entry, data) else self._there(entry)
            except (Unavailable, NotFound) as error:
                if isinstance(error, NoSpace) and not unknown:
                    # An entry that did not fit was not created, but an earlier attempt whose answer
                    # was lost may have created it.
                    raise
                if not unknown and self._backend.is_local:
                    deadline = min(deadline, time.monotonic() + LOCAL_PATIENCE_S)
                unknown = True
                if time.monotonic() + wait_s > deadline:
                    raise Unavailable(
                        f"storage did not say whether entry {entry.n} of the log was created: "
                        f"{error}; "
                        "delete nothing, repeat the call once storage answers"
                    ) from error
            time.sleep(wait_s)
        raise AssertionError("pauses do not end")

    def _there(self, entry: Entry) -> Entry:
        """The entry stored at the number of `entry`: another one, or `entry` itself, created by an
        earlier attempt whose answer was lost."""
        data = self._backend.read(entry.n)
        if data is None:
            self._backend.refresh()
            data = self._backend.read(entry.n)
        if data is None:
            raise NotFound(f"entry {entry.n} of the log exists but cannot be read")
        there = decode_entry(data)
        if there.attempt == entry.attempt:
            self._backend.settle(entry.n)
        return there

    def _check_successor(self, entry: Entry) -> None:
        """An entry at n + 1 that does not name entry n proves that storage lost the entry n that
        its author had read."""
        data = self._backend.read(entry.n + 1)
        if data is not None:
            check_follows(decode_entry(data), entry.position, self._state.store)

    # -- replaying --

    def _advance(self, entry: Entry) -> None:
        state = self._state
        oldest = state.moved[0] if state.moved else 0
        if not oldest <= entry.generation <= state.generation:
            raise Corrupt(
                f"entry {entry.n} is of generation {entry.generation} of the log; wanted {oldest} "
                f"to {state.generation}; open the store again, and run `ckptstore fsck` if that "
                "does not help"
            )
        self._state = apply(state, entry)
        self._recent.append(entry)

    def _behind(self, position: Position) -> Iterator[Entry]:
        """The entries after `position`, with each link of the chain verified."""
        for entry in self._backend.behind(position.n):
            check_follows(entry, position, self._state.store)
            position = entry.position
            yield entry

    def _spliced(self, position: Position) -> Iterator[Entry]:
        """Like `_behind`, but entries that this process has already read are not read again."""
        with self._lock:
            known = list(self._recent)
        for entry in self._behind(position):
            yield entry
            if known and (known[0].n, known[0].prev_hash, known[0].prev_bytes) == (
                entry.n + 1,
                entry.hash,
                entry.bytes,
            ):
                yield from known
                yield from self._behind(known[-1].position)
                return

    def _check_has(self, position: Position) -> None:
        if not self.has(position):
            raise Corrupt(
                f"this store's log has no entry {position.n} with hash {position.hash}; the "
                "caller's position is of another log; run `ckptstore reindex`"
            )

    # -- segments and checkpoints, in the background --

    def _gather_behind(self, n: int) -> None:
        """Write segments and checkpoints in the background, so that other hosts read less of the
        log.

        The process that appends the last entry of a segment writes that segment; the one that
        appends every CHECKPOINT_EVERY-th entry writes the state.
        """
        if n % CHECKPOINT_EVERY and not self._backend.gathers(n):
            return
        if self._gathering is not None:
            self._gathering.join()
        self._gathering = behind(
            partial(self._gather, self._state, tuple(self._recent)), "ckptstore-log"
        )

    def _gather(self, state: State, newest: Sequence[Entry]) -> None:
        try:
            if self._backend.gathers(state.n):
                self._backend.gather(state.n, newest)
            if state.n % CHECKPOINT_EVERY == 0:
                self.saved.write_checkpoint(state)
        except CkptStoreError as error:
            _logger.warning(
                "the checkpoint or segment at entry %d of the log was not written; the next open "
                "reads more of the log: %s",
                state.n,
                error,
            )
