"""The log in a store: replay it to its head, append to it, and know for certain which of the two
happened (docs/format.md §8).

An entry exists once its object does, and objects are created exclusively, so the log needs no lock,
no lease and no clock. The one thing that may be unknown is whether a create whose answer was lost
took place; that is settled by reading what is at its number.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ckptstore.core.ids import CONFIG_KEY, StoreId, checkpoint_key
from ckptstore.core.paths import make_directories
from ckptstore.core.scratch import replace_file
from ckptstore.core.threads import behind
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
from ckptstore.log.entries import (
    Body,
    Entry,
    Position,
    check_follows,
    decode_entry,
    encode_entry,
    origin,
)
from ckptstore.log.fold import Refusal, State, apply, check, genesis, number
from ckptstore.log.log_backend import LogBackend, LogObjects, Met, pause_s
from ckptstore.log.log_snapshots import decode_state, encode_state
from ckptstore.storage.contract import Storage

CHECKPOINT_EVERY = 1000
CHECKPOINTS_KEPT = 2
APPEND_TIMEOUT_S = 60.0
LOCAL_PATIENCE_S = 2.0
"""So long a disk of this host is tried again: one that fails for longer does not come back by
itself, as a network does."""
RECENT = 1024
"""So many entries are kept decoded, for whoever folds them."""
REMEMBER_EVERY = 8
"""A host that had to read so many entries keeps what they came to."""

_AHEAD = (*range(2, 18), *(2**i for i in range(5, 13)))
"""How far behind a log's head an entry is looked for that must not be there."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_CHECKPOINT_PREFIX = "log/checkpoint-"

_random = secrets.SystemRandom()
"""Of the system: hosts of one job may all have seeded `random` alike, and what a trainer draws next
is none of the log's business."""

_logger = logging.getLogger("ckptstore")


class Refused(Conflict):
    """The state at the head of the log does not admit the entry; nothing was appended. `refusal`
    says what to do next."""

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
        """The entries are at `place`, or in the store's own `log/`. `memory` is a file of this
        host's where the state is kept between processes, for storage that is slow to ask.
        `with_config`, nothing is appended to a directory that has lost its ckptstore.json."""
        self._storage = storage
        self._place = place or LogObjects(storage, store)
        self._state = genesis(store, generation)
        self._memory = memory
        self._remembered = 0
        self._recent: deque[Entry] = deque(maxlen=RECENT)
        self._opened = False
        self._is_far = (
            storage.capabilities.slow_requests
        )  # to look at the head again is a request, which only an append is worth
        self._lock = threading.RLock()
        self._gathering: threading.Thread | None = None
        self._met = Met()
        self._looks_for_config = (
            with_config and not storage.capabilities.slow_requests
        )  # to a bucket it would be one more request

    @property
    def state(self) -> State:
        """The state as it was last replayed; before the first replay that of an empty log."""
        return self._state

    def replay(self, *, refresh: bool = False) -> State:
        """The state at the head of the log.

        `refresh` first makes a network filesystem forget which names it believes to be absent.
        Raises `Corrupt` for a broken chain, and where the last entry that this process knows is not
        there any more.
        """
        with self._lock:
            if refresh:
                self._place.refresh()
            if not self._opened:
                self._state = self._recalled() or self._newest_checkpoint() or self._state
            known = self._state.n
            for entry in self._behind(self._state.position):
                self._advance(entry)
            if self._opened and self._state.n == known and not self._is_far:
                self.check_head()
            if not self._opened:
                self.check_no_gap(self._state.n)
                self._opened = True
                self._remember(REMEMBER_EVERY)
            return self._state

    def head_after(self, n: int) -> bool:
        """Whether the log has an entry after `n`; one look-up, no replay."""
        return self._place.has(n + 1)

    def has(self, position: Position) -> bool:
        """Whether `position` is the store's origin or an entry of this log."""
        if not position.n:
            return position == origin(self._state.store)
        data = self._place.read(position.n)
        return data is not None and decode_entry(data).position == position

    def check_head(self) -> None:
        """Raises `Corrupt` if the last entry that this process knows is not in the log any more.

        A store may be moved, deleted, or replaced by a backup or by another copy of itself while it
        is open. What was appended behind an entry that is not there would be acknowledged and lost.
        """
        with self._lock:
            position = self._state.position
            if position.n and not self._place.still_has(position):
                raise Corrupt(
                    f"entry {position.n} of the log, which this process has read or written, is "
                    f"not in {self._storage.url} any more: "
                    "the store was moved, deleted, or replaced by a backup or another copy while "
                    "it was open; nothing was appended; "
                    f"open it again"
                )

    def check_config(self) -> None:
        """Raises `Corrupt` if the directory has lost its ckptstore.json: it is being deleted, and
        what is in it goes next.

        After an entry was created, this decides whether it may be acknowledged.
        """
        if self._looks_for_config and self._storage.size(CONFIG_KEY) is None:
            raise Corrupt(
                f"{self._storage.url} has lost its ckptstore.json while it was open: the store is "
                "being deleted, or was damaged, and a "
                "commit in it would be lost; nothing is acknowledged; if it was not meant to go, "
                "run `ckptstore repair`, and open it again"
            )

    def check_no_gap(self, n: int) -> None:
        """Raises `Corrupt` if entry `n + 1` is missing although a later one is there: `n` would
        look like the head of the log.

        On a disk of this host several later ones are looked for, since more than one entry may be
        missing.
        """
        later = next(
            (
                n + ahead
                for ahead in (_AHEAD if self._place.is_local else _AHEAD[:1])
                if self.head_after(n + ahead - 1)
            ),
            None,
        )
        if later is None:
            return
        # All may have been created between two look-ups, the first of which a network filesystem
        # remembers.
        self._place.refresh()
        if not self.head_after(n):
            raise Corrupt(
                f"entry {n + 1} of the log is missing, although entry {later} is there; run "
                "`ckptstore repair`, with --from and a mirror"
            )

    def read_entries(
        self, after: int = 0, prev_hash: str = "", prev_bytes: int = 0
    ) -> Iterator[Entry]:
        """The entries after entry `after`, whose hash and length the caller remembers (for 0 they
        are not looked at).

        Raises `Corrupt` if the chain is broken, or if the log does not have that entry: then the
        caller remembers another log's.
        """
        position = Position(after, prev_hash, prev_bytes) if after else origin(self._state.store)
        entries = self._spliced(position)
        first = next(entries, None)
        if first is not None:
            yield first
            yield from entries
        elif after:
            self._check_has(position)

    def known_behind(self, position: Position) -> list[Entry] | None:
        """The entries behind `position` up to the state that was replayed last, if this process
        still has them all."""
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
        self, body: Body, *, time_ns: int | None = None, timeout_s: float = APPEND_TIMEOUT_S
    ) -> Entry:
        """Append `body` at the head of the log, its new packs numbered; durable on return.
        `time_ns` is when it happened, if not now.

        Raises `Refused` if the state at the head does not admit it, `Busy` if others took every
        number within `timeout_s`, `Unavailable` if storage did not answer within `timeout_s`, a
        disk of this host within `LOCAL_PATIENCE_S` (the entry may still be in the log, or arrive
        there: only a replay tells, so delete nothing), `InvalidInput` for a body that has no
        encoding, `Corrupt` if the log lost an entry meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if wait_s := self._met.pause_s(time.monotonic(), _random.random()):
                time.sleep(wait_s)
            with self._place.turn():
                return self._append(body, time_ns, deadline, timeout_s)

    def close(self) -> None:
        """Wait for a segment or checkpoint that is being written, and keep what this process knows
        for the next."""
        if self._gathering is not None:
            self._gathering.join()
        if self._opened:
            self._remember(1)

    # -- appending --

    def _append(self, body: Body, time_ns: int | None, deadline: float, timeout_s: float) -> Entry:
        known, lost_s = self._state.n, 0.0
        state = self.replay()
        began = state.n
        while True:
            numbered = number(state, body)
            if refusal := check(state, numbered):
                raise Refused(refusal)
            if (
                self._is_far and state.n == known
            ):  # an entry that was read during this call is there
                self.check_head()
            data, entry = self._encode(state, numbered, time_ns or time.time_ns())
            attempted_at_s = time.monotonic()
            there = self._create(data, entry, deadline)
            if there.attempt == entry.attempt:
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
            if not self._place.is_local:
                lost_s = time.monotonic() - attempted_at_s
                time.sleep(pause_s(lost_s, there.n - began, _random.random()))
            state = self.replay()

    def _encode(self, state: State, body: Body, time_ns: int) -> tuple[bytes, Entry]:
        """The bytes of the next entry, and that entry as its readers will decode it."""
        data = encode_entry(
            body,
            n=state.n + 1,
            attempt=secrets.token_hex(16),
            time_ns=time_ns,
            store=state.store,
            generation=state.generation,
            prev_hash=state.hash,
            prev_bytes=state.bytes,
        )
        try:
            return data, decode_entry(data)
        except Corrupt as error:
            raise InvalidInput(
                "this entry cannot be written, because nobody could read it: "
                f"{error.__cause__ or error}"
            ) from error

    def _create(self, data: bytes, entry: Entry, deadline: float) -> Entry:
        """The entry that took the number of `entry`: itself, or another one. The same create is
        repeated until an answer settles it."""
        wait_s, unknown = _FIRST_PAUSE_S, False
        while True:
            try:
                return entry if self._place.create(entry, data) else self._there(entry)
            except (Unavailable, NotFound) as error:
                if isinstance(error, NoSpace) and not unknown:
                    # what did not fit was not created; but that says nothing of an earlier attempt
                    # whose answer was lost
                    raise
                if not unknown and self._place.is_local:
                    deadline = min(deadline, time.monotonic() + LOCAL_PATIENCE_S)
                unknown = True
                if time.monotonic() + wait_s > deadline:
                    raise Unavailable(
                        f"storage did not say whether entry {entry.n} of the log was created: "
                        f"{error}; "
                        f"delete nothing, repeat the call once storage answers"
                    ) from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_PAUSE_S)

    def _there(self, entry: Entry) -> Entry:
        """What is at the number of `entry`: another one, or `entry`, created by an earlier attempt
        whose answer was lost."""
        data = self._place.read(entry.n)
        if data is None:
            self._place.refresh()
            data = self._place.read(entry.n)
        if data is None:
            raise NotFound(f"entry {entry.n} of the log is there to be created, and not to be read")
        there = decode_entry(data)
        if there.attempt == entry.attempt:
            self._place.settle(entry.n)
        return there

    def _check_successor(self, entry: Entry) -> None:
        """An entry at n + 1 that does not name entry n means that storage lost the entry n that its
        author had read."""
        data = self._place.read(entry.n + 1)
        if data is not None:
            check_follows(decode_entry(data), entry.position, self._state.store)

    # -- replaying --

    def _advance(self, entry: Entry) -> None:
        state = self._state
        oldest = state.moved[0] if state.moved else 0
        if not oldest <= entry.generation <= state.generation:
            raise Corrupt(
                f"entry {entry.n} is of generation {entry.generation} of the log; wanted {oldest} "
                f"to {state.generation}; "
                f"open the store again, and run `ckptstore fsck` if that does not help"
            )
        self._state = apply(state, entry)
        self._recent.append(entry)

    def _behind(self, position: Position) -> Iterator[Entry]:
        """The entries behind `position`, the chain verified link by link."""
        for entry in self._place.behind(position.n):
            check_follows(entry, position, self._state.store)
            position = entry.position
            yield entry

    def _spliced(self, position: Position) -> Iterator[Entry]:
        """As `_behind`, but what this process has read already is not read again."""
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
                f"this store's log has no entry {position.n} with hash {position.hash}; what "
                "remembers it belongs to another log; "
                f"run `ckptstore reindex`"
            )

    # -- this host's own memory --

    def _recalled(self) -> State | None:
        """The state that this host kept, if it is one of this very log."""
        if self._memory is None:
            return None
        try:
            state = decode_state(
                self._memory.read_bytes(), self._state.store, self._state.generation
            )
            if not self.has(state.position):
                return None
        except (OSError, Corrupt):
            return None
        self._remembered = state.n
        return state

    def _remember(self, least: int) -> None:
        """Keep the state for the next process if it is `least` entries ahead of the one that was
        kept."""
        if self._memory is None or self._state.n - self._remembered < least:
            return
        try:
            make_directories(self._memory.parent)
            replace_file(self._memory, encode_state(self._state))
        except OSError as error:
            _logger.debug("the state is not kept at %s: %s", self._memory, error)
            return
        self._remembered = self._state.n

    # -- checkpoints --

    def _newest_checkpoint(self) -> State | None:
        newest = self._last_multiple() * CHECKPOINT_EVERY
        for n in range(
            newest, max(newest - CHECKPOINTS_KEPT * CHECKPOINT_EVERY, 0), -CHECKPOINT_EVERY
        ):
            if (state := self._read_checkpoint(n)) is not None:
                return state
        return None

    def _last_multiple(self) -> int:
        """The largest k such that the log has an entry k * CHECKPOINT_EVERY, in few look-ups:
        double k, then bisect."""
        low, high = 0, 1
        while self.head_after(high * CHECKPOINT_EVERY - 1):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.head_after(middle * CHECKPOINT_EVERY - 1) else (low, middle)
            )
        return low

    def _read_checkpoint(self, n: int) -> State | None:
        """The checkpoint at `n`, if it is there and is that of this log's own entry `n`."""
        try:
            state = decode_state(
                self._storage.read(checkpoint_key(n)), self._state.store, self._state.generation
            )
            entry = decode_entry(self._place.read(n) or b"")
        except (NotFound, Corrupt) as error:
            _logger.debug("no usable checkpoint at entry %d: %s", n, error)
            return None
        return state if state.position == entry.position and n == entry.n else None

    def _gather_behind(self, n: int) -> None:
        """Off the critical path: what lets others read less of the log. Whoever appends the last
        entry of a segment writes that segment, whoever appends every CHECKPOINT_EVERY-th entry the
        state."""
        if n % CHECKPOINT_EVERY and not self._place.gathers(n):
            return
        if self._gathering is not None:
            self._gathering.join()
        self._gathering = behind(
            partial(self._gather, self._state, tuple(self._recent)), "ckptstore-log"
        )

    def _gather(self, state: State, newest: Sequence[Entry]) -> None:
        try:
            if self._place.gathers(state.n):
                self._place.gather(state.n, newest)
            if state.n % CHECKPOINT_EVERY == 0:
                self._write_checkpoint(state)
        except CkptStoreError as error:
            _logger.warning(
                "what was to be saved at entry %d of the log was not; the next open reads more of "
                "the log: %s",
                state.n,
                error,
            )

    def _write_checkpoint(self, state: State) -> None:
        self._storage.put(checkpoint_key(state.n), encode_state(state))
        keys = [key for key, _ in self._storage.list(_CHECKPOINT_PREFIX)]
        for key in keys[:-CHECKPOINTS_KEPT]:
            self._storage.delete(key)
